"""Trees of drafted tokens: their shape, their tokens, and what a rule makes of them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops


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

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self._n_run == len(self)

    @cached_property
    def depths(self) -> np.ndarray:
        """(n,) int64, 0 at the root."""
        depths = list(range(self._n_run))
        for parent in self.parents[self._n_run :].tolist():
            depths.append(depths[parent] + 1)
        return np.array(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Per node its children, in order."""
        lists: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parents[1:].tolist(), 1):
            lists[parent].append(node)
        return tuple(map(tuple, lists))

    @cached_property
    def ranks(self) -> np.ndarray:
        """(n,) int64: each node's place among its siblings, 0 for the first and for the root."""
        ranks = np.zeros(len(self), dtype=np.int64)
        for siblings in self.children:
            ranks[list(siblings)] = np.arange(len(siblings))
        return ranks

    def path_to(self, node: int) -> list[int]:
        """The nodes from below the root down to `node`, which the root's is empty of."""
        path = []
        while node > 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    @cached_property
    def _n_run(self) -> int:
        """Nodes before the first that is not the child of the one before it: a prompt, or a tree's first path."""
        breaks = np.flatnonzero(self.parents != np.arange(-1, len(self) - 1))
        return int(breaks[0]) if len(breaks) else len(self)

    @cached_property
    def _last_in_run(self) -> np.ndarray:
        """(n,) of each node the last ancestor in the run, itself counted."""
        last = np.arange(len(self))
        for node, parent in enumerate(self.parents[self._n_run :].tolist(), self._n_run):
            last[node] = last[parent]
        return last

    def tree_rows(self, start: int, stop: int) -> tuple[int, np.ndarray]:
        """What the nodes [start, stop) look at: all of the first so many nodes, and their ancestors in the tree rows behind.

        Returns the number of nodes that all of them see, at most `start`, and the parents of the others up to `stop`
        among themselves, below zero for a root. A prompt above a tree is among the former, so that no mask of its length
        squared is ever made.
        """
        trunk = min(int(self._last_in_run[start:stop].min()) + 1, start)
        # A node of an earlier part may hang from inside the trunk; none of these nodes looks at it.
        return trunk, np.maximum(self.parents[trunk:stop] - trunk, -1)

    def visible(self, start: int, stop: int) -> Tensor:
        """(stop - start, stop) bool: which of nodes [0, stop) the nodes [start, stop) may look at."""
        trunk, parents = self.tree_rows(start, stop)
        seen = ops.make_tree_mask(parents, start - trunk, trunk, torch.device("cpu")).dense()
        return torch.ones(stop - start, stop, dtype=torch.bool) if seen is None else seen

    def after_chain(self, n: int) -> "Topology":
        """This tree below a chain of n nodes, whose last is the parent of the root."""
        return Topology(np.concatenate((np.arange(-1, n - 1), self.parents + n))) if n else self


@dataclass(frozen=True)
class SampledNodes:
    """How the sampled nodes of a tree were drawn. All other nodes are given: no chance decided which token they carry.

    A sampled node's distribution is the draft's after its parent, without the tokens of its deterministic siblings and of
    the siblings drawn before it; uniform over what is left where that is used up. Sampled siblings are verified first, in
    their order, then the deterministic ones in theirs.

    is_sampled   (n,) bool
    draft_probs  (rows, vocabulary) float32: the draft's distribution after each node with sampled children; none is denormal
    row_of       (n,) int64: the row of `draft_probs` that belongs to a node, -1 for none
    independent  siblings were drawn with replacement, each from the whole distribution; then none of them is given
    """

    is_sampled: np.ndarray
    draft_probs: Tensor
    row_of: np.ndarray
    independent: bool = False


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of a sequence.

    tokens    (n,) int64; tokens[0] is the last token of the sequence
    sampled     how the sampled nodes were drawn; None where all nodes are given
    expected  tokens the drafter expects of the pass, the bonus included
    """

    topology: Topology
    tokens: Tensor
    sampled: SampledNodes | None = None
    expected: float = 1.0

    def __post_init__(self) -> None:
        assert self.tokens.shape == (len(self.topology),), "one token a node"

    def path_to(self, node: int) -> list[int]:
        """Tokens from below the root down to `node`."""
        return self.tokens[self.topology.path_to(node)].tolist()


@dataclass(frozen=True)
class Verdict:
    """What a rule accepts of a tree.

    path   nodes, the first a child of the root, each the child of the one before
    bonus  the token that follows the path, from the target's own distribution, or what the refused children left of it
    """

    path: tuple[int, ...]
    bonus: int
