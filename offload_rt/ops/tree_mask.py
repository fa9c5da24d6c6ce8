"""Which keys each row of a tree sees."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

# Entries of a dense mask that is kept for the next layer instead of being made again.
KEPT_ENTRIES = 2 << 20


@dataclass(frozen=True, eq=False)
class TreeMask:
    """n rows of a tree see the keys before the tree, their ancestors and themselves.

    bits        (n, words) int32: bit j % 32 of word j // 32 of row i says whether row i sees key j of the tree;
                0 where there is no such key
    depths      (n,) int32, 0 at a root, whose position is the number of keys before the tree
    key_depths  (keys of the tree,) int32, likewise
    extent      (2,) int32: keys before the tree, which all rows see, and keys of the tree
    n_keys      both together
    is_exact    False: the tensors' content changes, n_keys is an upper bound, and key_depths may be longer
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

    def split(self, n: int) -> tuple["TreeMask", "TreeMask"]:
        """The masks of the first n keys, all of them before the tree, and of the others."""
        extent = torch.tensor((n, 0), dtype=torch.int32, device=self.extent.device)
        depths = self.depths + (self.extent[0] - n)  # a position counts from the end of the n keys
        return (
            replace(self, depths=depths, key_depths=self.key_depths[:0], extent=extent, n_keys=n),
            replace(self, extent=self.extent - extent, n_keys=self.n_keys - n),
        )

    def dense(self) -> Tensor | None:
        """(n, n_keys) bool, True where a row sees a key; None: everywhere. Nothing is copied to the host."""
        is_alone = self.is_exact and len(self.bits) == len(self.key_depths) == 1
        if is_alone and (self.window is None or self.n_keys <= self.window):
            return None
        if "dense" in self._kept:
            return self._kept["dense"]
        mask = self._unpacked()
        if mask.numel() <= KEPT_ENTRIES:
            self._kept["dense"] = mask
        return mask

    def _unpacked(self) -> Tensor:
        device, n_before, n_most = self.bits.device, self.extent[0], len(self.key_depths)
        keys = torch.arange(self.n_keys, device=device)
        shifts = torch.arange(32, dtype=torch.int32, device=device)
        tree = (self.bits[:, :, None] >> shifts & 1).bool().flatten(1)[:, :n_most]
        # Columns without keys wrap around to the prefix, which is written after them.
        place = (n_before + keys[:n_most]) % self.n_keys
        mask = tree.new_zeros(len(tree), self.n_keys).index_copy_(1, place, tree)
        mask |= keys < n_before
        if self.window is not None:
            positions = self.key_depths.new_zeros(self.n_keys).index_copy_(0, place, self.key_depths)
            positions = torch.where(keys < n_before, keys - n_before, positions)
            mask &= positions > self.depths[:, None] - self.window
        return mask
