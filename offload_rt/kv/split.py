"""Sizes of KV caches: bytes of rows and states, and division between device and host or disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_rt.chunks import CHUNK_ROWS, MAX_SCORES
from offload_rt.cost.pass_times import StreamedRows
from offload_rt.dtypes import DType
from offload_rt.models.architecture import Architecture

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from offload_rt.lazy import torch

# Bytes of a block per layer: large enough for a link, small enough for a few blocks in any budget.
# A GPU's link copies 4 MiB in 160 us, less than the host needs to launch attention to a block
# (250 us, estimated).
_BLOCK_NBYTES = 4 << 20
_CARD_BLOCK_NBYTES = 16 << 20
# Blocks start, and are read, at multiples of these rows. As rows are multiples of 64 bytes, these
# offsets are multiples of 4096 bytes.
PAGE_ROWS = 64
N_SLOTS = 4  # device slots for prefetched blocks
# Committed rows kept on the device before they are offloaded together, and sequences with room for
# a tree.
_TAIL_ROWS = 64
_N_SEQUENCES = 4
_FP8 = DType.FLOAT8_E4M3FN
_FP8_MAX = 448.0

# States kept for a rewind, besides the last state.
N_KEPT = 2
# Minimum rows of a sparse view: older, recent and new rows.
LEAST_BUDGET = 32


@dataclass(frozen=True)
class RowFormat:
    """Format of an offloaded row of a layer: keys of all heads, then values.

    is_fp8  both in fp8 (e4m3), after a float32 scale per head; not exact
    """

    n_kv_heads: int
    head_dim: int
    dtype: DType
    is_fp8: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of a row, a multiple of 64."""
        of_head = 4 + self.head_dim if self.is_fp8 else self.head_dim * self.dtype.itemsize
        return -(-2 * self.n_kv_heads * of_head // 64) * 64

    def pack(self, keys: Tensor, values: Tensor) -> Tensor:
        """Convert keys, values (..., n_kv_heads, n, head_dim) to rows (..., n, nbytes) uint8."""
        pair = torch.stack((keys, values), -4).movedim(-2, -4)
        parts = [pair]
        if self.is_fp8:
            wide = pair.float()
            scales = wide.abs().amax(-1, keepdim=True) / _FP8_MAX
            scales.clamp_min_(torch.finfo(torch.float32).tiny)
            parts = [scales, (wide / scales).to(_FP8.torch)]
        content = torch.cat([part.contiguous().flatten(-3).view(torch.uint8) for part in parts], -1)
        rows = content.new_zeros(*content.shape[:-1], self.nbytes)
        rows[..., : content.shape[-1]] = content
        return rows

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Convert rows (n, nbytes) uint8 to keys and values (n_kv_heads, n, head_dim)."""
        shape = (-1, 2, self.n_kv_heads, self.head_dim)
        n = 2 * self.n_kv_heads * self.head_dim
        if self.is_fp8:
            n_scales = 8 * self.n_kv_heads
            scales = rows[:, :n_scales].view(torch.float32).view(-1, 2, self.n_kv_heads, 1)
            codes = rows[:, n_scales : n_scales + n].view(_FP8.torch).view(shape)
            pair = (codes.float() * scales).to(self.dtype.torch)
        else:
            pair = rows.view(self.dtype.torch)[:, :n].view(shape)
        keys, values = pair.permute(1, 2, 0, 3)
        return keys, values


@dataclass(frozen=True)
class KVShare:
    """Device rows of a cache: the first `n_resident` of `n_rows`, and trees up to `n_nodes`."""

    n_rows: int
    n_nodes: int
    n_resident: int

    @property
    def n_on_device(self) -> int:
        """Resident rows, and room for the last rows."""
        return min(self.n_resident + _TAIL_ROWS + self.n_nodes, self.n_rows)

    @property
    def n_offloaded(self) -> int:
        """Offloaded rows of a full cache."""
        return self.n_rows - self.n_nodes - self.n_resident if self.n_on_device < self.n_rows else 0


@dataclass(frozen=True)
class KVSplit:
    """Division of all sequences' keys and values between the device and off-device memory.

    n_rows       rows of all sequences
    n_on_device  rows on the device; the first rows are resident
    n_nodes      nodes of the largest tree, all on the device
    windows      attention window of each layer; None for all positions
    """

    n_rows: int
    n_on_device: int
    n_nodes: int
    block_rows: int
    format: RowFormat
    windows: tuple[int | None, ...]

    @classmethod
    def least(
        cls, model: Architecture, n_rows: int, n_nodes: int, format: RowFormat, has_card: bool
    ) -> KVSplit:
        """Keep the fewest possible rows on the device."""
        nbytes = _CARD_BLOCK_NBYTES if has_card else _BLOCK_NBYTES
        rows = min(nbytes // format.nbytes, n_rows // 8)
        block_rows = max(-(-rows // PAGE_ROWS), 1) * PAGE_ROWS
        n_on_device = min(n_nodes + _N_SEQUENCES * _TAIL_ROWS, n_rows)
        windows = tuple(model.window(i) for i in range(model.n_layers))
        return cls(n_rows, n_on_device, n_nodes, block_rows, format, windows)

    @property
    def n_resident(self) -> int:
        """Rows that stay on the device."""
        return max(self.n_on_device - self.n_nodes - _TAIL_ROWS, 0)

    @property
    def n_offloaded(self) -> int:
        """Offloaded rows at the longest context."""
        return self.n_rows - self.n_nodes - self.n_resident

    @property
    def n_blocks(self) -> int:
        """Blocks of the offloaded rows."""
        return -(-self.n_offloaded // self.block_rows)

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block of a layer."""
        return self.block_rows * self.format.nbytes

    def device_nbytes(self, model: Architecture, longest: int, has_card: bool) -> int:
        """Return the bytes on the device.

        The device stores its rows, the slots, a block under conversion, scores, and a layer's rows
        of a prompt of `longest` rows with a copy being written; on a GPU, two copies.
        """
        itemsize = self.format.dtype.itemsize
        row_nbytes = model.kv_nbytes(itemsize) // model.n_layers
        converted = 2 * self.block_rows * row_nbytes if self.format.is_fp8 else 0
        staged = longest * (row_nbytes + (1 + has_card) * self.format.nbytes)
        n_heads = model.hidden_size // model.head_dim
        scores = 3 * 4 * min(MAX_SCORES, min(longest, CHUNK_ROWS) * n_heads * self.n_rows)
        rows = self.n_on_device * model.kv_nbytes(itemsize)
        return rows + N_SLOTS * self.block_nbytes + converted + scores + staged

    def host_nbytes(self, model: Architecture) -> int:
        """Return the bytes on the host of a GPU, with slots if the driver refuses to pin."""
        return (self.n_blocks * model.n_layers + N_SLOTS) * self.block_nbytes

    def streamed(self, tier: str) -> StreamedRows:
        """Return the rows read per pass over the link of a tier."""
        return StreamedRows(tier, self.n_resident, self.format.nbytes, self.windows, CHUNK_ROWS)

    def share(self, n_rows: int, n_nodes: int, is_alone: bool = False) -> KVShare:
        """Return the proportional share of a cache of `n_rows` rows; nearly all if alone."""
        n_near = n_rows * self.n_on_device // self.n_rows
        if is_alone:
            n_others = (_N_SEQUENCES - 1) * (_TAIL_ROWS + n_nodes // 2)
            n_near = max(n_near, self.n_on_device - n_others)
        return KVShare(n_rows, n_nodes, max(n_near - _TAIL_ROWS - n_nodes, 0))

    def fits(self, shares: Sequence[KVShare]) -> bool:
        """Return whether these caches fit together; a single cache always fits."""
        n_near = sum(share.n_on_device for share in shares)
        n_blocks = sum(-(-share.n_offloaded // self.block_rows) for share in shares)
        return len(shares) == 1 or (n_near <= self.n_on_device and n_blocks <= self.n_blocks)


def state_rows(model: Architecture, itemsize: int) -> int:
    """Return the rows of keys and values with the memory size of a sequence's states."""
    nbytes = (1 + N_KEPT) * sum(shape.nbytes(itemsize) for shape in model.state_shapes)
    return -(-nbytes // model.kv_nbytes(itemsize)) if nbytes else 0
