"""The first rows of a text and its most recent ones (StreamingLLM, Xiao et al. 2024; MagicDec, Chen et al. 2024)."""

import torch

from offload_rt import ops
from offload_rt.kv.sparse import SparseCache

# Rows of the text's beginning, which attention rests on. Four are enough in the paper; both repositories keep so many.
_N_SINKS = 16


class WindowCache(SparseCache):
    """Sinks and a window of recent rows, at positions inside the cache: rows that are gone leave no gap.

    Rotary attention knows differences of positions alone. So the sinks are turned up to the window, and all others, queries
    included, stay where the text has them.
    """

    def fill(self, n_verified: int, n_filled: int) -> int:
        """The sinks, next to the window."""
        self.n_kept = min(_N_SINKS, self.budget // 8)
        self.first_recent = n_verified - n_filled + self.n_kept
        shift = torch.tensor([self.first_recent - self.n_kept])
        cos, sin = ops.to_device(self.spec.row_inputs(shift, shift + 1, torch.float32), self.buffer.keys.device)
        size = torch.hypot(cos, sin)  # a scale of the rope is in the keys already
        self.copy(range(self.n_kept), 0, (cos / size, sin / size))
        return n_verified
