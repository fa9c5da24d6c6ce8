"""Which keys each row of a tree sees."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

# Entries of a dense mask that is kept for the next layer instead of being made again.
KEPT_ENTRIES = 2 << 20


def packed_ancestors(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed ancestor masks and depths of one or more trees.

    parents  (n,) int64, parents[i] < i; negative for a root
    Returns (n, ceil(n / 32)) int32, where bit j % 32 of word j // 32 in row i says that row j is
    row i or an ancestor of it, and (n,) int32 depths, 0 at a root.
    """
    n = len(parents)
    nodes = np.arange(len(parents))
    words = np.zeros((n + 1, -(-n // 32)), dtype=np.uint32)
    depths = np.zeros(n + 1, dtype=np.int32)
    words[nodes, nodes // 32] = own_bits(nodes)
    depths[:n] = parents >= 0
    # Row n stands above all roots. A round adds what the ancestor at the end of the reach has
    # gathered, and doubles the reach.
    above = np.append(np.where(parents < 0, n, parents), n)
    while (above < n).any():
        words |= words[above]
        depths += depths[above]
        above = above[above]
    return words[:n].view(np.int32), depths[:n]


def own_bits(nodes: np.ndarray) -> np.ndarray:
    """(n,) uint32: the bit of each node in its word."""
    return np.uint32(1) << (nodes % 32).astype(np.uint32)


def make_tree_mask(parents: np.ndarray, first: int, n_before: int) -> "TreeMask":
    """What rows `first` and on of a tree see, without a window; on the host.

    parents   (n,) int64, parents[i] < i, negative for a root
    n_before  keys before the tree
    """
    bits, depths = packed_ancestors(parents)
    return packed_mask(bits[first:], depths[first:], depths, n_before)


def packed_mask(
    bits: np.ndarray, depths: np.ndarray, key_depths: np.ndarray, n_before: int
) -> "TreeMask":
    """A mask without a window, on the host, of arrays as `TreeMask` has them; `n_before` keys stand
    before the tree.
    """
    rows, at, keys_at = (
        torch.from_numpy(np.ascontiguousarray(one)) for one in (bits, depths, key_depths)
    )
    extent = torch.tensor((n_before, len(key_depths)), dtype=torch.int32)
    return TreeMask(rows, at, keys_at, extent, n_before + len(key_depths))


@dataclass(frozen=True, eq=False)
class TreeMask:
    """n rows of a tree see the keys before the tree, their ancestors and themselves.

    bits        (n, words) int32: bit j % 32 of word j // 32 of row i says whether row i sees key j
                of the tree;
                0 where there is no such key
    depths      (n,) int32, 0 at a root, whose position is the number of keys before the tree
    key_depths  (keys of the tree,) int32, likewise
    extent      (2,) int32: keys before the tree, which all rows see, and keys of the tree
    n_keys      both together
    is_exact    False: the tensors' content changes, n_keys is an upper bound, and key_depths may be
                longer
    window      a row sees positions greater than its own minus the window; None: all of them
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
        """Bits, depths, depths of the keys and extent."""
        return self.bits, self.depths, self.key_depths, self.extent

    def of(self, tensors: Iterable[Tensor]) -> "TreeMask":
        """This mask of other `tensors`, such as copies on a device."""
        bits, depths, key_depths, extent = tensors
        return replace(self, bits=bits, depths=depths, key_depths=key_depths, extent=extent)

    def within(self, window: int | None) -> "TreeMask":
        """This mask with a window; one and the same for all layers that have it."""
        if window not in self._windows:
            self._windows[window] = replace(self, window=window)
        return self._windows[window]

    def split(self, n: int) -> tuple["TreeMask", "TreeMask"]:
        """The masks of the first n keys, all of them before the tree, and of the others."""
        extent = torch.nn.functional.pad(self.extent.new_full((1,), n), (0, 1))
        depths = self.depths + (self.extent[0] - n)  # a position counts from the end of the n keys
        return (
            replace(self, depths=depths, key_depths=self.key_depths[:0], extent=extent, n_keys=n),
            replace(self, extent=self.extent - extent, n_keys=self.n_keys - n),
        )

    def part(self, first: int, stop: int) -> "TreeMask":
        """The mask of the keys [first, stop), all of them before the tree or up to its end; one and
        the same for all layers.
        """
        is_tail = stop == self.n_keys
        if self.window is None and not is_tail:  # all rows see all of them
            first, stop = 0, stop - first
        if (first, stop) not in self._parts:
            self._parts[first, stop] = (self if is_tail else self.split(stop)[0]).split(first)[1]
        return self._parts[first, stop]

    def dense(self) -> Tensor | None:
        """(n, n_keys) bool, True where a row sees a key; None: everywhere. Nothing is copied to the
        host.
        """
        n_tree = len(self.key_depths)
        is_alone = len(self.bits) == n_tree == 1 and (
            self.window is None or self.n_keys <= self.window
        )
        if self.is_exact and (is_alone or (n_tree == 0 and self.window is None)):
            return None
        if "dense" in self._kept:
            return self._kept["dense"]
        mask = self._unpacked()
        if mask.numel() <= KEPT_ENTRIES:
            self._kept["dense"] = mask
        return mask

    def _unpacked(self) -> Tensor:
        device = self.bits.device
        n_before = self.extent[0]
        n_most = len(self.key_depths)
        keys = torch.arange(self.n_keys, device=device)
        shifts = torch.arange(32, dtype=torch.int32, device=device)
        tree = (self.bits[:, :, None] >> shifts & 1).bool().flatten(1)[:, :n_most]
        # Columns without keys wrap around to the prefix, which is written after them.
        place = (n_before + keys[:n_most]) % self.n_keys
        mask = tree.new_zeros(len(tree), self.n_keys).index_copy_(1, place, tree)
        mask |= keys < n_before
        if self.window is not None:
            positions = self.key_depths.new_zeros(self.n_keys).index_copy_(
                0, place, self.key_depths
            )
            positions = torch.where(keys < n_before, keys - n_before, positions)
            mask &= positions > self.depths[:, None] - self.window
        return mask
