"""Trees of a shape that is fixed before the first token is drafted."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from offload_rt.speculate import child_sampling
from offload_rt.speculate.draft_model import DraftState
from offload_rt.speculate.ngrams import append_ngram
from offload_rt.tree.topology import DraftTree, SampledNodes, Topology

# A copied token that is at least so probable to the draft stays among its sampled children, whose subtrees are worth more.
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


class StaticTreeBuilder:
    """A tree of a given shape, growing level by level.

    child_sampling  how the children of a node get their tokens: "given" (the most probable), "without_replacement" or
               "independent"
    copied     tokens that once followed the sequence's last ones, to be appended on
    """

    def __init__(
        self, state: DraftState, shape: Shape, child_sampling: str, temperature: float, copied: tuple[int, ...] = ()
    ) -> None:
        self.state, self._shape, self._temperature = state, shape, temperature
        self._copied = copied if child_sampling != "independent" else ()
        self._child_sampling = child_sampling if temperature > 0 else "given"
        n = len(shape.topology)
        self._tokens = np.zeros(n, dtype=np.int64)
        self._tokens[0] = state.tokens[0]
        self._level = 0
        self._draft_probs: list[Tensor] = []

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
        self.state.add(shape.row_of[topology.parents[inner]].tolist(), self._tokens[inner].tolist())

    def tree(self, expected: float) -> DraftTree:
        """The whole tree, once no row is left to compute."""
        topology = self._shape.topology
        tokens = torch.from_numpy(self._tokens)
        n = len(topology) + len(self._copied)
        if self._child_sampling == "given":
            return append_ngram(DraftTree(topology, tokens, expected=expected), self._copied, n)
        is_sampled = np.ones(len(topology), dtype=bool)
        is_sampled[0] = False
        sampled = SampledNodes(
            is_sampled, torch.cat(self._draft_probs), self._shape.row_of, self._child_sampling == "independent"
        )
        return append_ngram(DraftTree(topology, tokens, sampled, expected), self._copied, n)

    def _children(self, logits: Tensor, n: int) -> Tensor:
        if self._child_sampling == "given":
            return child_sampling.top(logits, n)
        probs = child_sampling.probs_of(logits, self._temperature)
        self._draft_probs.append(probs)
        struck = self._strike_copied(probs) if self._level == 0 and self._copied else None
        generator = self.state.generator
        if self._child_sampling == "independent":
            return child_sampling.independent(probs, n, generator)
        return child_sampling.without_replacement(probs, n, generator, struck)

    def _strike_copied(self, probs: Tensor) -> Tensor | None:
        """The copied token, excluded from the root's children; None, and nothing copied, where they may well have it."""
        token = self._copied[0]
        if probs[0, token] > _LIKELY:
            self._copied = ()
            return None
        struck = torch.zeros_like(probs, dtype=torch.bool)
        struck[:, token] = True
        return struck
