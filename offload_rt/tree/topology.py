"""Trees of drafted tokens: their shape, their tokens, and what a rule makes of them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Topology:
    """The shape of a tree of n nodes; node 0 is the root, and a parent stands before its children.

    parents  (n,) int64, parents[0] = -1, parents[i] < i
    """

    parents: np.ndarray

    def __post_init__(self) -> None:
        parents = self.parents
        assert parents.ndim == 1 and len(parents) > 0 and parents[0] == -1, "node 0 is the root"
        assert (parents[1:] >= 0).all() and (parents[1:] < np.arange(1, len(parents))).all(), (
            "a parent stands before its children"
        )

    def __len__(self) -> int:
        return len(self.parents)

    @classmethod
    def chain(cls, n: int) -> "Topology":
        """n nodes, each the only child of the one before."""
        return cls(np.arange(-1, n - 1))

    @cached_property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    @cached_property
    def depths(self) -> np.ndarray:
        """(n,) int64, 0 at the root."""
        depths = np.zeros(len(self), dtype=np.int64)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Per node its children, in order."""
        lists: list[list[int]] = [[] for _ in range(len(self))]
        for node in range(1, len(self)):
            lists[self.parents[node]].append(node)
        return tuple(map(tuple, lists))

    @cached_property
    def _ancestors(self) -> Tensor:
        """(n, n) bool, True where the column is the row or an ancestor of it."""
        mask = np.eye(len(self), dtype=bool)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parents[node]]
        return torch.from_numpy(mask)

    def visible(self, start: int, stop: int) -> Tensor:
        """(stop - start, stop) bool: which of nodes [0, stop) the nodes [start, stop) may look at."""
        if self.is_chain:
            return torch.arange(stop) <= torch.arange(start, stop)[:, None]
        return self._ancestors[start:stop, :stop]

    def after_chain(self, n: int) -> "Topology":
        """This tree below a chain of n nodes, whose last is the parent of the root."""
        return Topology(np.concatenate((np.arange(-1, n - 1), self.parents + n))) if n else self


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of a sequence.

    tokens  (n,) int64; tokens[0] is the last token of the sequence
    laws    (n, vocabulary) float32: the law each node's token was drawn from; None where children are deterministic
    """

    topology: Topology
    tokens: Tensor
    laws: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.tokens.shape == (len(self.topology),), "one token a node"

    def path_to(self, node: int) -> list[int]:
        """Tokens from below the root down to `node`."""
        path = []
        while node > 0:
            path.append(int(self.tokens[node]))
            node = int(self.topology.parents[node])
        return path[::-1]


@dataclass(frozen=True)
class Verdict:
    """What a rule accepts of a tree.

    path   nodes, the first a child of the root, each the child of the one before
    bonus  the token that follows the path, from the target's own law
    """

    path: tuple[int, ...]
    bonus: int
