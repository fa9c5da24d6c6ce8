"""Trees of drafted tokens: their shape, their tokens, and what a verification rule accepts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from offload_rt.ops.tree_mask import TreeMask


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
    def chain(cls, n: int) -> Topology:
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

    @property
    def n_levels(self) -> int:
        """Levels, the root's included."""
        return int(self.depths.max()) + 1

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
        """The nodes from below the root down to `node`; empty for the root."""
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
        """(n,) the last ancestor of each node in the run, the node itself counted."""
        nodes = np.arange(len(self))
        last = np.where(nodes < self._n_run, nodes, self.parents)
        while (last >= self._n_run).any():
            last = last[last]
        return last

    def mask(self, start: int, stop: int, n_before: int) -> TreeMask:
        """What the nodes [start, stop) see, `n_before` keys before all nodes included.

        Nodes that all of them see, such as a prompt above a tree, count as keys before the tree: no mask of a prompt's
        length squared is ever made.
        """
        from offload_rt.ops.tree_mask import make_tree_mask  # not at the top: a plan has shapes alone

        trunk = min(int(self._last_in_run[start:stop].min()) + 1, start)
        # A node of an earlier part may hang from inside the trunk; none of these nodes attends to it.
        parents = np.maximum(self.parents[trunk:stop] - trunk, -1)
        return make_tree_mask(parents, start - trunk, n_before + trunk)

    def after_chain(self, n: int) -> Topology:
        """This tree below a chain of n nodes, whose last is the parent of the root."""
        return Topology(np.concatenate((np.arange(-1, n - 1), self.parents + n))) if n else self


class GrowingTree:
    """A tree of up to `capacity` nodes that come level by level. What a node sees is packed when it comes.

    parents  (capacity,) int64, of which those of the nodes there are have been set
    """

    def __init__(self, capacity: int) -> None:
        self.parents = np.full(capacity, -1)
        self._depths = np.zeros(capacity, dtype=np.int32)
        self._words = np.zeros((capacity, -(-capacity // 32)), dtype=np.uint32)
        self._words[0, 0] = 1
        self._n = 1

    def __len__(self) -> int:
        return self._n

    @property
    def depths(self) -> np.ndarray:
        """(n,) int32, 0 at the root."""
        return self._depths[: self._n]

    def clear(self) -> None:
        """Keep the root alone."""
        self._n = 1

    def add(self, parents: Sequence[int]) -> range:
        """Add nodes below those there are; returns them."""
        from offload_rt.ops.tree_mask import own_bits

        nodes, above = np.arange(self._n, self._n + len(parents)), np.asarray(parents, dtype=np.int64)
        assert (above < self._n).all(), "a level hangs from those above"
        self.parents[nodes], self._depths[nodes] = above, self._depths[above] + 1
        self._words[nodes] = self._words[above]
        self._words[nodes, nodes // 32] |= own_bits(nodes)
        self._n += len(parents)
        return range(self._n - len(parents), self._n)

    def mask(self, start: int, stop: int, n_before: int) -> TreeMask:
        """What the nodes [start, stop) see, `n_before` keys before all nodes included."""
        from offload_rt.ops.tree_mask import packed_mask

        bits = self._words[start:stop, : -(-stop // 32)].view(np.int32)
        return packed_mask(bits, self._depths[start:stop], self._depths[:stop], n_before)


@dataclass(frozen=True)
class SampledNodes:
    """How the sampled nodes of a tree were drawn. All other nodes are deterministic: no chance decided their tokens.

    A sampled node's token was drawn from the draft's distribution after its parent, without the tokens of its
    deterministic siblings and of the siblings drawn before it; uniformly over the other tokens where that leaves nothing.
    Sampled siblings are verified first, in their order, then the deterministic ones in theirs.

    is_sampled   (n,) bool
    draft_probs  (rows, vocabulary) float32: the draft's distribution after each node with sampled children; none is denormal
    row_of       (n,) int64: the row of `draft_probs` that belongs to a node, -1 for none
    independent  siblings were drawn with replacement, each from the whole distribution; then none is deterministic
    """

    is_sampled: np.ndarray
    draft_probs: Tensor
    row_of: np.ndarray
    independent: bool = False


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of a sequence, and rows that are computed beside them.

    tokens        (n,) int64; tokens[0] is the last token of the sequence
    sampled       how the sampled nodes were drawn; None where all nodes are deterministic
    expected      tokens the drafter expects of the pass, the bonus included
    n_unverified  the last so many nodes are computed, so that the drafter sees what the target predicts there, and are
                  never verified nor committed
    """

    topology: Topology
    tokens: Tensor
    sampled: SampledNodes | None = None
    expected: float = 1.0
    n_unverified: int = 0

    def __post_init__(self) -> None:
        assert self.tokens.shape == (len(self.topology),), "one token a node"
        assert 0 <= self.n_unverified < len(self.topology), "the root is verified"

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        """A tree of the last token alone: plain decoding."""
        import torch

        return cls(Topology.chain(1), torch.tensor([token]))

    def candidates(self) -> DraftTree:
        """The tree that is verified: all nodes but the last `n_unverified`."""
        if self.n_unverified == 0:
            return self
        n, sampled = len(self.topology) - self.n_unverified, self.sampled
        if sampled is not None:
            sampled = replace(sampled, is_sampled=sampled.is_sampled[:n], row_of=sampled.row_of[:n])
        return DraftTree(Topology(self.topology.parents[:n]), self.tokens[:n], sampled, self.expected)

    def path_to(self, node: int) -> list[int]:
        """Tokens from below the root down to `node`."""
        tokens: list[int] = self.tokens[self.topology.path_to(node)].tolist()
        return tokens


@dataclass(frozen=True)
class Verdict:
    """What a rule accepts of a tree.

    path   nodes, the first a child of the root, each the child of the one before
    bonus  the token after the path, drawn from the target's distribution, or from its residual after rejected children
    """

    path: tuple[int, ...]
    bonus: int
