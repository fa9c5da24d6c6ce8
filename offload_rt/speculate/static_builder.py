"""Trees of a shape that is fixed before the first token is drafted."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from offload_rt.executor.cuda_graphs import Reduce
from offload_rt.speculate import child_sampling
from offload_rt.speculate.draft_model import TreeState
from offload_rt.tree.choose import Acceptance
from offload_rt.tree.topology import DraftTree, SampledNodes, Topology

# A copied token that is at least so probable to the draft is left to sampling, for sampled children have larger subtrees.
_LIKELY = 0.2
# The most probable tokens of a level are so many or a power of two above.
_LEAST_CHILDREN = 8


@dataclass(frozen=True, eq=False)
class Shape:
    """A topology in level order, prepared for growing it.

    inner    per level the nodes that have children
    below    per level the nodes of the next one
    row_of   (n,) a node's place among the inner nodes, -1 for a leaf
    """

    topology: Topology
    inner: tuple[np.ndarray, ...]
    below: tuple[np.ndarray, ...]
    row_of: np.ndarray


@lru_cache(maxsize=16)
def shape_of(topology: Topology) -> Shape:
    """Prepare a topology whose nodes are numbered level by level."""
    depths = topology.depths
    assert (np.diff(depths) >= 0).all(), "nodes are numbered level by level"
    has_children = np.zeros(len(topology), dtype=bool)
    has_children[topology.parents[1:]] = True
    levels = [np.flatnonzero(depths == depth) for depth in range(topology.n_levels)]
    row_of = np.where(has_children, np.cumsum(has_children) - 1, -1)
    return Shape(topology, tuple(level[has_children[level]] for level in levels), tuple(levels[1:]), row_of)


@dataclass(frozen=True)
class StaticTree:
    """A tree to grow.

    expected        tokens of a pass over it
    child_sampling  how the children of a node get their tokens: "deterministic" (the most probable), "without_replacement"
                    or "independent"
    temperature     at which the draft's distributions are taken
    copied          tokens that once followed the sequence's last ones, to be appended
    """

    topology: Topology
    expected: float
    child_sampling: str
    temperature: float
    copied: tuple[int, ...] = ()


class StaticTreeBuilder:
    """A tree of a given shape, growing level by level; it has no candidates of which some could be left out."""

    chances = np.empty(0)

    def __init__(self, state: TreeState, plan: StaticTree, acceptance: Acceptance) -> None:
        self.state, self._plan, self._acceptance = state, plan, acceptance
        self.copied = plan.copied if plan.child_sampling != "independent" else ()
        self._shape = shape_of(plan.topology)
        self._tokens = np.zeros(len(plan.topology), dtype=np.int64)
        self._tokens[0] = state.tokens[0]
        self._level = self._n_probs = 0
        self._draft_probs: Tensor | None = None

    @property
    def reduce(self) -> Reduce | None:
        """The most probable tokens, of one of a few numbers so that few are captured; sampling takes the logits."""
        if self._plan.child_sampling != "deterministic":
            return None
        k = max(1 << (self._n_children - 1).bit_length(), _LEAST_CHILDREN)
        return child_sampling.MostProbable(k, self.state.vocab_size)

    def choose(self, out: Tensor) -> Tensor:
        """Draw the children, unless they are there already."""
        if self._plan.child_sampling == "deterministic":
            return out
        logits = child_sampling.fitted(out, self.state.vocab_size)
        probs = self._keep(child_sampling.probs_of(logits, self._plan.temperature))
        n, generator = self._n_children, self.state.generator
        if self._plan.child_sampling == "independent":
            return child_sampling.packed(child_sampling.independent(probs, n, generator), probs[:, :1])
        if self._level or not self.copied:
            return child_sampling.packed(child_sampling.without_replacement(probs, n, generator), probs[:, :1])
        token = slice(self.copied[0], self.copied[0] + 1)
        excluded = torch.zeros_like(probs, dtype=torch.bool)
        excluded[:, token] = probs[:, token] <= _LIKELY
        tokens = child_sampling.without_replacement(probs, n, generator, excluded)
        return child_sampling.packed(tokens, torch.cat((probs[:, :1], probs[:, token]), dim=-1))

    def take(self, chosen: Tensor) -> None:
        """Give the next level its tokens; its inner nodes are computed next."""
        shape, topology, level = self._shape, self._shape.topology, self._level
        is_deterministic = self._plan.child_sampling == "deterministic"
        n_tokens = chosen.shape[1] // 2 if is_deterministic else self._n_children
        tokens, values = child_sampling.unpacked(chosen, n_tokens)
        if values.shape[1] == 2 and not is_deterministic and values[0, 1] > _LIKELY:
            self.copied = ()  # it was left to sampling
        nodes = shape.below[level]
        places = np.searchsorted(shape.inner[level], topology.parents[nodes])
        self._tokens[nodes] = tokens[places, topology.ranks[nodes]]
        self._level += 1
        inner = shape.inner[level + 1]
        self.state.add(shape.row_of[topology.parents[inner]].tolist(), self._tokens[inner].tolist())

    @property
    def _n_children(self) -> int:
        """The most that a node of this level has."""
        return int(self._shape.topology.ranks[self._shape.below[self._level]].max()) + 1

    def _keep(self, probs: Tensor) -> Tensor:
        """Keep the distributions of a level beside those of the levels above; returns them."""
        if self._draft_probs is None:
            n_inner = int(self._shape.row_of.max()) + 1
            self._draft_probs = self.state.room(n_inner, probs)
        first, self._n_probs = self._n_probs, self._n_probs + len(probs)
        self._draft_probs[first : self._n_probs] = probs
        return self._draft_probs[first : self._n_probs]

    @property
    def n_fixed(self) -> int:
        """Nodes below the root, whose number was chosen before."""
        return len(self._plan.topology) - 1

    def tree(self, size: int) -> DraftTree:
        """The whole tree, once no row is left to compute."""
        topology, sampled = self._shape.topology, None
        if self._draft_probs is not None:
            is_sampled = np.arange(len(topology)) > 0
            independent = self._plan.child_sampling == "independent"
            sampled = SampledNodes(is_sampled, self._draft_probs, self._shape.row_of, independent)
        return DraftTree(topology, torch.from_numpy(self._tokens), sampled, self._plan.expected)

    def learn(self, path: list[int], after: list[int]) -> None:
        """Count which children were accepted along the path, the root first."""
        topology = self._shape.topology
        for node, accepted in zip(path, [*path[1:], None], strict=True):
            if max(node, accepted or 0) >= len(topology):
                return  # along a copied continuation, which tells nothing of the draft
            rank = None if accepted is None else int(topology.ranks[accepted])
            self._acceptance.observe(len(topology.children[node]), rank)
