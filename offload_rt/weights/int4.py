"""Layers with 4-bit matrices, in about a third of the bytes, for self-drafting.

Products are torch's tinygemm, fast for few rows. Rounding errors only affect the draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_rt.dtypes import DType
from offload_rt.weights.formats import Matrix, StoredTensor, dense
from offload_rt.weights.layout import Layout, PackedLayer, host_block, packed_layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt.ops.dequantize import TinygemmMatrix

# Input and output dtype of torch's products on every device.
DTYPE = DType.BFLOAT16
# Weights per scale and zero point: the first divisor of a row's length.
_GROUPS = (64, 32)
# Rows packed at a time: a multiple of torch's interleaving, few enough to bound temporary memory.
_N_ROWS = 512


@dataclass(frozen=True)
class Int4Matrix(Matrix):
    """Codes interleaved for torch's product, and (n_groups, n_out, 2) scales and zero points."""

    codes: StoredTensor
    scales: StoredTensor

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """See `Matrix.tensors`."""
        return self.codes, self.scales

    def weight(self, tensors: Mapping[str, Tensor]) -> TinygemmMatrix:
        """See `Matrix.weight`."""
        from offload_rt.ops.dequantize import (
            TinygemmMatrix,  # not at the top: a plan has no products
        )

        return TinygemmMatrix(self.shape, tensors[self.codes.name], tensors[self.scales.name])


class Format(dense.Format):
    """Layers of which some matrices are `Int4Matrix`; further weights are converted to DTYPE."""

    name = "int4"


def packed(layer: PackedLayer, device: torch.device) -> PackedLayer:
    """Copy a layer to the device with 4-bit matrices; vectors and odd widths stay unchanged."""
    import torch  # not at the top: a plan asks for the layout alone

    on_card = device.type == "cuda"
    layout = copy_layout(layer.layout, on_card)
    block = (
        torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        if on_card
        else host_block(layout.nbytes)
    )
    targets = layout.views(block)
    for name, tensor in layer.layout.views(layer.block).items():
        if name in targets:
            targets[name].copy_(tensor)
            continue
        matrix = layout.matrices[name.removesuffix(".weight")]
        codes, scales = (targets[part.name] for part in matrix.tensors)
        for first in range(0, len(tensor), _N_ROWS):
            rows = slice(first, min(first + _N_ROWS, len(tensor)))
            rounded, scales[:, rows] = _quantized(tensor[rows].to(device), len(scales))
            part = codes[rows] if not on_card else codes[rows.start // 8 : rows.stop // 8]
            part.copy_(_interleaved(rounded, len(scales)))
    return PackedLayer(block, layout)


def copy_layout(layout: Layout, on_card: bool) -> Layout:
    """Return the layout of a layer's copy; on_card for a GPU."""
    tensors: list[tuple[str, tuple[int, ...], DType]] = []
    matrices = {}
    for entry in layout.entries:
        group = _group(entry.shape)
        if group is None:
            tensors.append((entry.name, entry.shape, entry.dtype))
            continue
        n, k = entry.shape
        # on a card tiles of 8 rows and a group's columns
        codes = StoredTensor(
            f"{entry.name}.codes",
            (n // 8, k // group, 32, group // 32) if on_card else (n, k // 2),
            DType.INT32 if on_card else DType.UINT8,
        )
        scales = StoredTensor(f"{entry.name}.scales", (k // group, n, 2), DTYPE)
        matrices[entry.name.removesuffix(".weight")] = Int4Matrix((n, k), codes, scales)
        tensors += [(part.name, part.shape, part.dtype or DTYPE) for part in (codes, scales)]
    return packed_layout(tensors, matrices)


def _group(shape: tuple[int, ...]) -> int | None:
    """Return the weights per scale, or None if a tensor is not packed."""
    if len(shape) != 2 or shape[0] % 16:
        return None
    return next((group for group in _GROUPS if shape[1] % group == 0), None)


def _quantized(weight: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """Return codes (n, k) int32 in [0, 15], and scales and zero points (n_groups, n, 2).

    A weight is scale * (code - 8) + zero.
    """
    import torch

    groups = weight.float().view(len(weight), n_groups, -1)
    least = groups.amin(-1)
    largest = groups.amax(-1)
    dtype = DTYPE.torch
    scale = ((largest - least) / 15).to(dtype)
    zero = (least + 8 * scale.float()).to(dtype)
    positive_scale = scale.float().clamp_min(torch.finfo(dtype).tiny)
    steps = (groups - zero.float()[..., None]) / positive_scale[..., None]
    codes = (steps.round() + 8).clamp_(0, 15).int()
    return codes.flatten(1), torch.stack((scale, zero), -1).transpose(0, 1)


def _interleaved(codes: Tensor, n_groups: int) -> Tensor:
    """Reorder codes (n, k) for torch's product."""
    import torch

    pack = torch.ops.aten
    if codes.is_cuda:
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        tiles: Tensor = pack._convert_weight_to_int4pack(pairs, codes.shape[1] // n_groups // 16)
        return tiles
    rows: Tensor = pack._convert_weight_to_int4pack_for_cpu(codes, 1)
    return rows
