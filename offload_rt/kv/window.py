"""Sliding-window view with attention sinks (StreamingLLM, Xiao et al. 2024; MagicDec, 2024)."""

import torch

from offload_rt import ops
from offload_rt.kv.sparse import SparseCache

# Attention sinks. The paper needs four; StreamingLLM's and MagicDec's repositories keep 16.
_N_SINKS = 16


class WindowCache(SparseCache):
    """First rows (sinks) and a window of recent rows, at contiguous positions.

    Rotary attention depends only on position differences. Therefore the sinks are rotated up to the
    window; all further keys and queries keep their positions.
    """

    def fill(self, n_verified: int, n_filled: int) -> int:
        """Copy the sinks to positions directly before the window."""
        self.n_kept = min(_N_SINKS, self.budget // 8)
        self.first_recent = n_verified - n_filled + self.n_kept
        shift = torch.tensor([self.first_recent - self.n_kept])
        cos, sin = ops.to_device(
            self.spec.row_inputs(shift, shift + 1, torch.float32), self.buffer.keys.device
        )
        size = torch.hypot(cos, sin)  # divide out RoPE scaling: cached keys already include it
        self.copy(range(self.n_kept), 0, (cos / size, sin / size))
        return n_verified
