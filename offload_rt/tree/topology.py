"""Token trees: topology, draft tokens, and verdicts of verification rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt.ops import tree_mask
else:
    from offload_rt.lazy import torch, tree_mask


def path_up(parents: np.ndarray, node: int) -> list[int]:
    """Return the nodes from below the root to `node`; empty for the root."""
    path = []
    while node > 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


@dataclass(frozen=True, eq=False)
class Topology:
    """Shape of a tree with n nodes; node 0 is the root, and parents precede their children.

    parents  (n,) int64, parents[0] = -1, parents[i] < i
    """

    parents: np.ndarray

    def __post_init__(self) -> None:
        parents = self.parents
        assert parents.ndim == 1 and len(parents) > 0 and parents[0] == -1, "node 0 is the root"
        is_ordered = (parents[1:] >= 0).all() and (parents[1:] < np.arange(1, len(parents))).all()
        assert is_ordered, "parents precede their children"

    def __len__(self) -> int:
        return len(self.parents)

    @classmethod
    @lru_cache(maxsize=16)
    def chain(cls, n: int) -> Topology:
        """Return a chain of n nodes."""
        return cls(np.arange(-1, n - 1))

    @classmethod
    def star(cls, n: int) -> Topology:
        """A root with n - 1 children."""
        return cls(np.minimum(np.arange(-1, n - 1), 0))

    @property
    def is_chain(self) -> bool:
        """Whether no node has siblings."""
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
        """Number of levels, including the root."""
        return int(self.depths.max()) + 1

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in order."""
        lists: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parents[1:].tolist(), 1):
            lists[parent].append(node)
        return tuple(map(tuple, lists))

    @cached_property
    def ranks(self) -> np.ndarray:
        """(n,) int64 index of each node among its siblings; 0 for the root."""
        ranks = np.zeros(len(self), dtype=np.int64)
        for siblings in self.children:
            ranks[list(siblings)] = np.arange(len(siblings))
        return ranks

    def path_to(self, node: int) -> list[int]:
        """Return the path from below the root to `node`; empty for the root."""
        return path_up(self.parents, node)

    def paths(self, labels: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the labels of the nodes from below the root to each node."""
        paths: list[tuple[int, ...]] = [()]
        for parent, label in zip(self.parents[1:].tolist(), labels[1:], strict=True):
            paths.append((*paths[parent], label))
        return paths

    def subtree(self, nodes: np.ndarray) -> Topology:
        """Return the tree of these nodes, ascending and with the parents of each."""
        return Topology(np.searchsorted(nodes, self.parents[nodes]) - (self.parents[nodes] < 0))

    @cached_property
    def _n_run(self) -> int:
        """Length of the leading chain: a prompt, or the first path of a tree."""
        breaks = np.flatnonzero(self.parents != np.arange(-1, len(self) - 1))
        return int(breaks[0]) if len(breaks) else len(self)

    @cached_property
    def _last_in_run(self) -> np.ndarray:
        """(n,) last ancestor of each node, or the node itself, within the leading chain."""
        nodes = np.arange(len(self))
        last = np.where(nodes < self._n_run, nodes, self.parents)
        while (last >= self._n_run).any():
            last = last[last]
        return last

    def mask(self, start: int, stop: int, n_before: int) -> tree_mask.TreeMask:
        """Build the attention mask of nodes [start, stop), with `n_before` keys before the tree.

        A prefix visible to all of these nodes, e.g. a prompt above a tree, counts as keys before
        the tree. Masks quadratic in the prompt length are thus avoided.
        """
        trunk = min(int(self._last_in_run[start:stop].min()) + 1, start)
        # Earlier nodes may branch off inside the trunk; none of these nodes attends to them.
        parents = np.maximum(self.parents[trunk:stop] - trunk, -1)
        return tree_mask.make_tree_mask(parents, start - trunk, n_before + trunk)

    def after_chain(self, n: int) -> Topology:
        """Return this tree below a chain of n nodes; the last chain node is the root's parent."""
        return Topology(np.concatenate((np.arange(-1, n - 1), self.parents + n))) if n else self


class GrowingTree:
    """Tree of up to `capacity` nodes, extended by rounds, with precomputed visibility bits.

    parents  (capacity,) int64, set for existing nodes
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
        """Remove all nodes except the root."""
        self._n = 1

    def add(self, parents: Sequence[int]) -> range:
        """Add nodes below existing nodes; return them."""
        nodes = np.arange(self._n, self._n + len(parents))
        above = np.asarray(parents, dtype=np.int64)
        assert (above < self._n).all(), "parents must exist"
        self.parents[nodes] = above
        self._depths[nodes] = self._depths[above] + 1
        self._words[nodes] = self._words[above]
        self._words[nodes, nodes // 32] |= tree_mask.own_bits(nodes)
        self._n += len(parents)
        return range(self._n - len(parents), self._n)

    def mask(self, start: int, stop: int, n_before: int) -> tree_mask.TreeMask:
        """Build the attention mask of nodes [start, stop), with `n_before` keys before the tree."""
        bits = self._words[start:stop, : -(-stop // 32)].view(np.int32)
        return tree_mask.packed_mask(bits, self._depths[start:stop], self._depths[:stop], n_before)


@dataclass(frozen=True)
class SampledNodes:
    """Sampling of a tree's nodes. Further nodes are deterministic: no chance decided their tokens.

    A sampled token follows the draft's distribution after its parent. The tokens of deterministic
    siblings and of earlier sampled siblings are excluded; if nothing is left, the draw is uniform
    over the remaining tokens. Verification tries sampled siblings first, in order, then
    deterministic siblings in order.

    is_sampled   (n,) bool
    draft_probs  (rows, vocabulary) float32 draft distributions after nodes with sampled children,
                 without denormals
    row_of       (n,) int64 row of each node in `draft_probs`, -1 for none
    independent  siblings were drawn with replacement from the full distribution; then no sibling is
                 deterministic
    """

    is_sampled: np.ndarray
    draft_probs: Tensor
    row_of: np.ndarray
    independent: bool = False


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of a sequence, and unverified extra rows.

    tokens        (n,) int64; tokens[0] is the last token of the sequence
    sampled       sampling of the nodes; None for deterministic trees
    expected      expected tokens of the pass, including the bonus token
    n_unverified  number of trailing nodes that are computed for the drafter only, and never
                  verified or committed
    n_forced      number of trailing nodes in chains of forced tokens, unknown to the drafter
    """

    topology: Topology
    tokens: Tensor
    sampled: SampledNodes | None = None
    expected: float = 1.0
    n_unverified: int = 0
    n_forced: int = 0

    def __post_init__(self) -> None:
        assert self.tokens.shape == (len(self.topology),), "a token per node"
        assert 0 <= self.n_unverified < len(self.topology), "the root is always verified"

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        """Return a tree with only the last token: plain decoding."""
        return cls(Topology.chain(1), torch.tensor([token]))

    def candidates(self) -> DraftTree:
        """Return the verified tree, without the last `n_unverified` nodes."""
        return self._without(self.n_unverified)

    def drafted(self, verdict: Verdict) -> tuple[DraftTree, Verdict]:
        """Return the drafter's tree, and the verdict on it."""
        tree = self._without(self.n_forced)
        path = tuple(node for node in verdict.path if node < len(tree.topology))
        after = (*self.tokens[list(verdict.path)].tolist(), verdict.bonus)
        return tree, Verdict(path, after[len(path)])

    def extended(self, parents: Sequence[int], tokens: Sequence[int]) -> DraftTree:
        """Return a tree with further deterministic nodes; `parents` and `tokens` are of all."""
        n_new = len(parents) - len(self.topology)
        if n_new == 0:
            return self
        sampled = self.sampled
        if sampled is not None:
            is_sampled = np.pad(sampled.is_sampled, (0, n_new))
            row_of = np.pad(sampled.row_of, (0, n_new), constant_values=-1)
            sampled = replace(sampled, is_sampled=is_sampled, row_of=row_of)
        topology = Topology(np.array(parents))
        return replace(self, topology=topology, tokens=torch.tensor(tokens), sampled=sampled)

    def _without(self, n_last: int) -> DraftTree:
        if n_last == 0:
            return self
        n = len(self.topology) - n_last
        sampled = self.sampled
        if sampled is not None:
            sampled = replace(sampled, is_sampled=sampled.is_sampled[:n], row_of=sampled.row_of[:n])
        topology = Topology(self.topology.parents[:n])
        return DraftTree(topology, self.tokens[:n], sampled, self.expected)

    def paths(self) -> list[tuple[int, ...]]:
        """Return the tokens from below the root to each node."""
        return self.topology.paths(self.tokens.tolist())

    def path_to(self, node: int) -> list[int]:
        """Return the tokens from below the root to `node`."""
        tokens: list[int] = self.tokens[self.topology.path_to(node)].tolist()
        return tokens


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a tree.

    path   accepted nodes from below the root downwards
    bonus  token after the path, drawn from the target's distribution or from its residual after
           rejected children
    """

    path: tuple[int, ...]
    bonus: int
