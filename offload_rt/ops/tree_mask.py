"""Packed attention masks of trees."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor


def packed_ancestors(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute packed ancestor masks and depths of one or more trees.

    parents  (n,) int64, parents[i] < i; negative for a root
    Returns (n, ceil(n / 32)) int32 and (n,) int32 depths, 0 at a root.
    Bit j % 32 of word j // 32 in row i is set if row j is row i or an ancestor of row i.
    """
    n = len(parents)
    if n == 1:
        return np.ones((1, 1), dtype=np.int32), np.zeros(1, dtype=np.int32)
    nodes = np.arange(n)
    words = np.zeros((n + 1, -(-n // 32)), dtype=np.uint32)
    depths = np.zeros(n + 1, dtype=np.int32)
    words[nodes, nodes // 32] = own_bits(nodes)
    depths[:n] = parents >= 0
    # Row n is above all roots. Each round adds the mask of the ancestor at the current distance and
    # doubles the distance.
    above = np.append(np.where(parents < 0, n, parents), n)
    while (above < n).any():
        words |= words[above]
        depths += depths[above]
        above = above[above]
    return words[:n].view(np.int32), depths[:n]


def own_bits(nodes: np.ndarray) -> np.ndarray:
    """Return the bit of each node in its word: (n,) uint32."""
    return np.uint32(1) << (nodes % 32).astype(np.uint32)


def make_tree_mask(parents: np.ndarray, first: int, n_before: int) -> "TreeMask":
    """Create the host mask of tree rows from `first`, without a window.

    parents   (n,) int64, parents[i] < i, negative for a root
    n_before  keys before the tree
    """
    bits, depths = packed_ancestors(parents)
    return packed_mask(bits[first:], depths[first:], depths, n_before)


def packed_mask(
    bits: np.ndarray, depths: np.ndarray, key_depths: np.ndarray, n_before: int
) -> "TreeMask":
    """Create a host mask without a window from the arrays of `TreeMask`, after `n_before` keys."""
    row_bits, row_depths, tree_depths = (
        torch.from_numpy(np.ascontiguousarray(array)) for array in (bits, depths, key_depths)
    )
    extent = torch.tensor((n_before, len(key_depths)), dtype=torch.int32)
    return TreeMask(row_bits, row_depths, tree_depths, extent, n_before + len(key_depths))


@dataclass(frozen=True, eq=False)
class TreeMask:
    """Mask of n tree rows: prefix keys, ancestors and the row itself are visible.

    bits        (n, words) int32: bit j % 32 of word j // 32 of row i, set if row i sees tree key
                j; 0 for absent keys
    depths      (n,) int32, 0 at a root; the root's position is the number of prefix keys
    key_depths  (tree keys,) int32
    extent      (2,) int32: number of prefix keys and of tree keys
    n_keys      sum of both
    is_exact    False: tensor contents change, n_keys is an upper bound, key_depths may be longer
    window      visible positions exceed the row's position minus the window; None: no window
    """

    bits: Tensor
    depths: Tensor
    key_depths: Tensor
    extent: Tensor
    n_keys: int
    window: int | None = None
    is_exact: bool = True
    _kept: dict[str, Tensor] = field(default_factory=dict, init=False)
    _windows: dict[int | None, "TreeMask"] = field(default_factory=dict, init=False)
    _parts: dict[tuple[int, int], "TreeMask"] = field(default_factory=dict, init=False)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return bits, depths, key depths and extent."""
        return self.bits, self.depths, self.key_depths, self.extent

    def with_tensors(self, tensors: Iterable[Tensor]) -> "TreeMask":
        """Return this mask with replaced `tensors`, such as device copies."""
        bits, depths, key_depths, extent = tensors
        return replace(self, bits=bits, depths=depths, key_depths=key_depths, extent=extent)

    def connect(self, rows: range) -> None:
        """Let rows of a chain see each other, on the host; the last rows and keys are equal."""
        columns = np.arange(rows.start, rows.stop) + len(self.key_depths) - len(self.bits)
        words = np.zeros(self.bits.shape[1], dtype=np.uint32)
        np.bitwise_or.at(words, columns // 32, own_bits(columns))
        self.bits.numpy()[rows.start : rows.stop] |= words.view(np.int32)

    def within(self, window: int | None) -> "TreeMask":
        """Return this mask with a window; cached for all layers."""
        if window not in self._windows:
            self._windows[window] = replace(self, window=window)
        return self._windows[window]

    def split(self, n: int) -> tuple["TreeMask", "TreeMask"]:
        """Return the masks of the first n keys, all in the prefix, and of the remaining keys."""
        extent = torch.nn.functional.pad(self.extent.new_full((1,), n), (0, 1))
        depths = self.depths + (self.extent[0] - n)  # a position counts from the end of the n keys
        return (
            replace(self, depths=depths, key_depths=self.key_depths[:0], extent=extent, n_keys=n),
            replace(self, extent=self.extent - extent, n_keys=self.n_keys - n),
        )

    def part(self, first: int, stop: int) -> "TreeMask":
        """Return the mask of keys [first, stop), inside the prefix or up to the end of the tree.

        Cached for all layers.
        """
        is_tail = stop == self.n_keys
        if self.window is None and not is_tail:  # visible to all rows
            first, stop = 0, stop - first
        if (first, stop) not in self._parts:
            self._parts[first, stop] = (self if is_tail else self.split(stop)[0]).split(first)[1]
        return self._parts[first, stop]

    def dense(self) -> Tensor | None:
        """Return the dense mask (n, n_keys) bool; None: all visible. Copies nothing to the host."""
        n_tree = len(self.key_depths)
        has_all = self.window is None or self.n_keys <= self.window
        is_alone = len(self.bits) == n_tree == 1 and has_all
        if self.is_exact and (is_alone or (n_tree == 0 and self.window is None)):
            return None
        if "dense" in self._kept:
            return self._kept["dense"]
        device = self.bits.device
        n_before = self.extent[0]
        keys = torch.arange(self.n_keys, device=device)
        shifts = torch.arange(32, dtype=torch.int32, device=device)
        tree = (self.bits[:, :, None] >> shifts & 1).bool().flatten(1)[:, :n_tree]
        # Columns without keys wrap around to the prefix, written afterwards.
        place = (n_before + keys[:n_tree]) % self.n_keys
        mask = tree.new_zeros(len(tree), self.n_keys).index_copy_(1, place, tree)
        mask |= keys < n_before
        if self.window is not None:
            depths = self.key_depths.new_zeros(self.n_keys).index_copy_(0, place, self.key_depths)
            positions = torch.where(keys < n_before, keys - n_before, depths)
            mask &= positions > self.depths[:, None] - self.window
        if mask.numel() <= 2 << 20:  # cache small masks for further layers
            self._kept["dense"] = mask
        return mask
