"""Static trees: the shape is fixed before drafting."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from offload_rt.cost.tree_size import Acceptance
from offload_rt.executor.cuda_graphs import Reduce
from offload_rt.ops import reference
from offload_rt.speculate import child_sampling
from offload_rt.speculate.tree_state import TreeState
from offload_rt.tree.topology import DraftTree, SampledNodes, Topology

# Copied tokens with a higher draft probability are left to sampling: sampled children have larger
# subtrees.
_LIKELY = 0.2
# The number of top tokens per level is this or a larger power of two, which limits CUDA graphs.
_LEAST_CHILDREN = 8


@dataclass(frozen=True, eq=False)
class Shape:
    """Levels of a topology in level order, prepared for growth.

    inner   nodes with children, per level
    below   nodes of the next level, per level
    row_of  (n,) index of a node among the inner nodes, -1 for a leaf
    """

    inner: tuple[np.ndarray, ...]
    below: tuple[np.ndarray, ...]
    row_of: np.ndarray


@lru_cache(maxsize=16)
def shape_of(topology: Topology) -> Shape:
    """Prepare a topology whose nodes are numbered by level."""
    depths = topology.depths
    assert (np.diff(depths) >= 0).all(), "nodes are numbered by level"
    has_children = np.zeros(len(topology), dtype=bool)
    has_children[topology.parents[1:]] = True
    levels = [np.flatnonzero(depths == depth) for depth in range(topology.n_levels)]
    inner = tuple(level[has_children[level]] for level in levels)
    row_of = np.where(has_children, np.cumsum(has_children) - 1, -1)
    return Shape(inner, tuple(levels[1:]), row_of)


@dataclass(frozen=True)
class StaticTree:
    """Plan of a static tree.

    expected        expected tokens of a pass
    child_sampling  selection of children: "deterministic" (most probable), "without_replacement" or
                    "independent"
    temperature     temperature of the draft's distributions
    copied          copied continuation to append
    """

    topology: Topology
    expected: float
    child_sampling: str
    temperature: float
    copied: tuple[int, ...] = ()


class StaticTreeBuilder:
    """Grow a tree of fixed shape level by level. All nodes are verified: no candidates."""

    chances = np.empty(0)

    def __init__(self, state: TreeState, plan: StaticTree, acceptance: Acceptance) -> None:
        self.state = state
        self._plan = plan
        self._acceptance = acceptance
        self.copied = plan.copied if plan.child_sampling != "independent" else ()
        self._shape = shape_of(plan.topology)
        self._tokens = np.zeros(len(plan.topology), dtype=np.int64)
        self._tokens[0] = state.tokens[0]
        self._is_possible = np.ones(len(plan.topology), dtype=bool)
        self._level = 0
        self._n_probs = 0
        self._draft_probs: Tensor | None = None

    @property
    def reduce(self) -> Reduce | None:
        """Select the most probable tokens; None for sampling, which needs the logits."""
        if self._plan.child_sampling != "deterministic":
            return None
        k = max(1 << (self._n_children - 1).bit_length(), _LEAST_CHILDREN)
        return child_sampling.MostProbable(k, self.state.vocab_size)

    def select(self, out: Tensor) -> Tensor:
        """Draw the children; deterministic children are already selected by `reduce`."""
        if self._plan.child_sampling == "deterministic":
            return out
        logits = child_sampling.fitted(out, self.state.vocab_size)
        probs = self._keep(reference.probs_of(logits, self._plan.temperature))
        n = self._n_children
        generator = self.state.generator
        if self._level or not self.copied:
            tokens = getattr(child_sampling, self._plan.child_sampling)(probs, n, generator)
            return child_sampling.packed(tokens, probs.gather(1, tokens))
        token = slice(self.copied[0], self.copied[0] + 1)
        excluded = torch.zeros_like(probs, dtype=torch.bool)
        excluded[:, token] = probs[:, token] <= _LIKELY
        tokens = child_sampling.without_replacement(probs, n, generator, excluded)
        values = torch.cat((probs.gather(1, tokens), probs[:, token]), dim=-1)
        return child_sampling.packed(tokens, values)

    def extend(self, selected: Tensor) -> None:
        """Assign tokens to the next level, and add the rows of its inner nodes."""
        shape = self._shape
        topology = self._plan.topology
        level = self._level
        is_deterministic = self._plan.child_sampling == "deterministic"
        n_tokens = selected.shape[1] // 2 if is_deterministic else self._n_children
        tokens, values = child_sampling.unpacked(selected, n_tokens)
        if values.shape[1] > n_tokens and values[0, n_tokens] > _LIKELY:
            self.copied = ()  # left to sampling
        nodes = shape.below[level]
        parents = topology.parents[nodes]
        cells = np.searchsorted(shape.inner[level], parents), topology.ranks[nodes]
        self._tokens[nodes] = tokens[cells]
        # Drop children beyond the possible tokens. Their number depends on no draw.
        least = -np.inf if is_deterministic else 0.0
        self._is_possible[nodes] = self._is_possible[parents] & (values[cells] > least)
        self._level += 1
        inner = shape.inner[level + 1]
        self.state.add(shape.row_of[topology.parents[inner]].tolist(), self._tokens[inner].tolist())

    @property
    def _n_children(self) -> int:
        return int(self._plan.topology.ranks[self._shape.below[self._level]].max()) + 1

    def _keep(self, probs: Tensor) -> Tensor:
        if self._draft_probs is None:
            n_inner = int(self._shape.row_of.max()) + 1
            self._draft_probs = self.state.room(n_inner, probs)
        first = self._n_probs
        self._n_probs += len(probs)
        self._draft_probs[first : self._n_probs] = probs
        return self._draft_probs[first : self._n_probs]

    @property
    def n_fixed(self) -> int:
        """Nodes below the root, all verified."""
        return len(self._plan.topology) - 1

    def tree(self, size: int) -> DraftTree:
        """Return the complete tree; `size` is ignored."""
        nodes = np.flatnonzero(self._is_possible)
        sampled = None
        if self._draft_probs is not None:
            independent = self._plan.child_sampling == "independent"
            row_of = self._shape.row_of[nodes]
            sampled = SampledNodes(nodes > 0, self._draft_probs, row_of, independent)
        self._topology = self._plan.topology.subtree(nodes)
        expected = min(self._plan.expected, len(nodes))
        return DraftTree(self._topology, torch.from_numpy(self._tokens[nodes]), sampled, expected)

    def learn(self, path: list[int], after: list[int]) -> None:
        """Record acceptance by sibling rank along the accepted path, root first."""
        topology = self._topology
        for node, accepted in zip(path, [*path[1:], None], strict=True):
            if max(node, accepted or 0) >= len(topology):
                return  # a copied continuation is no evidence about the draft
            rank = None if accepted is None else int(topology.ranks[accepted])
            self._acceptance.observe(len(topology.children[node]), rank)
