"""Which keys the rows of a forest look at."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

# Entries of a dense mask that is kept for the next layer instead of being made again.
KEPT_ENTRIES = 2 << 20


@dataclass(frozen=True, eq=False)
class TreeMask:
    """The rows of a forest from `first` on look at a prefix, at their ancestors and at themselves.

    bits      (rows, words) int32: bit j % 32 of word j // 32 of row i says whether row i looks at row j of the forest
    depths    (rows,) int32, 0 at a root, whose position is n_before
    n_before  keys that stand before the forest and that all rows see
    window    a row looks at positions greater than its own less so many; None: at all of them
    """

    bits: Tensor
    depths: Tensor
    first: int
    n_before: int
    window: int | None
    _kept: dict[str, Tensor] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Rows that look."""
        return len(self.bits) - self.first

    @property
    def n_keys(self) -> int:
        """Keys of the prefix and of the forest."""
        return self.n_before + len(self.bits)

    def dense(self) -> Tensor | None:
        """(n, n_keys) bool, True where a row may look; None: everywhere."""
        if self.n == 1 and self.first == 0 and (self.window is None or self.n_before < self.window):
            return None
        if "dense" in self._kept:
            return self._kept["dense"]
        mask = self._unpacked()
        if mask.numel() <= KEPT_ENTRIES:
            self._kept["dense"] = mask
        return mask

    def _unpacked(self) -> Tensor:
        last = len(self.bits)
        bits = self.bits[self.first :].cpu().numpy().view(np.uint8)
        tree = torch.from_numpy(np.unpackbits(bits, axis=1, count=last, bitorder="little").view(np.bool_))
        mask = torch.cat((torch.ones(self.n, self.n_before, dtype=torch.bool), tree), dim=1)
        if self.window is not None:
            depths = self.depths.cpu()
            of_keys = torch.cat((torch.arange(self.n_before), depths + self.n_before))
            mask &= of_keys > (depths[self.first :, None] + self.n_before - self.window)
        return mask.to(self.bits.device)
