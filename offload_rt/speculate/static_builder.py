"""Trees of a shape that is fixed before the first token is drafted."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from offload_rt.speculate import child_sampling
from offload_rt.speculate.draft_model import Growth
from offload_rt.speculate.ngrams import graft
from offload_rt.tree.topology import DraftTree, Draws, Topology

# A copied token that is at least so probable to the draft stays among its drawn children, whose subtrees are worth more.
_LIKELY = 0.2


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

    @classmethod
    def of(cls, topology: Topology) -> "Shape":
        """Prepare a topology whose nodes are numbered level by level."""
        depths = topology.depths
        assert (np.diff(depths) >= 0).all(), "nodes are numbered level by level"
        has_children = np.zeros(len(topology), dtype=bool)
        has_children[topology.parents[1:]] = True
        levels = [np.flatnonzero(depths == depth) for depth in range(int(depths.max()) + 1)]
        row_of = np.where(has_children, np.cumsum(has_children) - 1, -1)
        return cls(topology, tuple(level[has_children[level]] for level in levels), tuple(levels[1:]), row_of)


shape_of = lru_cache(maxsize=16)(Shape.of)


class StaticSapling:
    """A tree of a given shape, growing level by level.

    child_law  how the children of a node get their tokens: "given" (the most probable), "without_replacement" or
               "independent"
    copied     tokens that once followed the sequence's last ones, to be grafted on
    """

    def __init__(
        self, growth: Growth, shape: Shape, child_law: str, temperature: float, copied: tuple[int, ...] = ()
    ) -> None:
        self.growth, self._shape, self._temperature = growth, shape, temperature
        self._copied = copied if child_law != "independent" else ()
        self._child_law = child_law if temperature > 0 else "given"
        n = len(shape.topology)
        self._tokens = np.zeros(n, dtype=np.int64)
        self._tokens[0] = growth.tokens[0]
        self._level = 0
        self._laws: list[Tensor] = []

    def take(self, logits: Tensor) -> None:
        """Give the next level its tokens; its inner nodes are computed next."""
        shape, topology, level = self._shape, self._shape.topology, self._level
        nodes = shape.below[level]
        parents = topology.parents[nodes]
        places = np.searchsorted(shape.inner[level], parents)
        children = self._children(logits, int(np.bincount(places).max()))
        self._tokens[nodes] = children.cpu().numpy()[places, topology.ranks[nodes]]
        self._level += 1
        inner = shape.inner[level + 1]
        self.growth.add(shape.row_of[topology.parents[inner]].tolist(), self._tokens[inner].tolist())

    def tree(self, expected: float) -> DraftTree:
        """The whole tree, once no row is left to compute."""
        topology = self._shape.topology
        tokens = torch.from_numpy(self._tokens)
        n = len(topology) + len(self._copied)
        if self._child_law == "given":
            return graft(DraftTree(topology, tokens, expected=expected), self._copied, n)
        drawn = np.ones(len(topology), dtype=bool)
        drawn[0] = False
        draws = Draws(drawn, torch.cat(self._laws), self._shape.row_of, self._child_law == "independent")
        return graft(DraftTree(topology, tokens, draws, expected), self._copied, n)

    def _children(self, logits: Tensor, n: int) -> Tensor:
        if self._child_law == "given":
            return child_sampling.top(logits, n)
        law = child_sampling.law_of(logits, self._temperature)
        self._laws.append(law)
        struck = self._strike_copied(law) if self._level == 0 and self._copied else None
        generator = self.growth.generator
        if self._child_law == "independent":
            return child_sampling.independent(law, n, generator)
        return child_sampling.without_replacement(law, n, generator, struck)

    def _strike_copied(self, law: Tensor) -> Tensor | None:
        """The copied token, struck from the root's draw; None, and no graft, where the root's children may well have it."""
        token = self._copied[0]
        if law[0, token] > _LIKELY:
            self._copied = ()
            return None
        struck = torch.zeros_like(law, dtype=torch.bool)
        struck[:, token] = True
        return struck
