"""Layers in about a third of their bytes: matrices at four bits, for a draft that is the target
itself.

The products are torch's own (tinygemm): they are fast for few rows, and what they round is of no
matter to a draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload_rt.dtypes import DType
from offload_rt.models.architecture import LayerWeights
from offload_rt.weights.formats import dense
from offload_rt.weights.layout import Layout, PackedLayer, host_block, packed_layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# What torch's products take and give on every device.
DTYPE = DType.BFLOAT16
# Weights of a row that share scale and zero point: the first of these numbers that divides it.
_GROUPS = (64, 32)
# Rows that are packed together: a multiple of what torch interleaves, and few enough that little
# memory is taken on the way.
_N_ROWS = 512
_CODES = "codes"
_SCALES = "scales"


def packed(layer: PackedLayer, device: torch.device) -> PackedLayer:
    """A copy of a layer of original weights, on the device; vectors and matrices of odd widths stay
    as they are.
    """
    import torch  # not at the top: a plan asks for the layout alone

    on_card = device.type == "cuda"
    layout = copy_layout(layer.layout, on_card)
    views = layer.layout.views(layer.block)
    block = (
        torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        if on_card
        else host_block(layout.nbytes)
    )
    into = layout.views(block)
    for name, tensor in views.items():
        if name in into:
            into[name].copy_(tensor)
            continue
        codes = into[f"{name}.{_CODES}"]
        scales = into[f"{name}.{_SCALES}"]
        for first in range(0, len(tensor), _N_ROWS):
            rows = slice(first, min(first + _N_ROWS, len(tensor)))
            found, scales[:, rows] = _rounded(tensor[rows].to(device), len(scales))
            part = codes[rows] if not on_card else codes[rows.start // 8 : rows.stop // 8]
            part.copy_(_interleaved(found, len(scales)))
    return PackedLayer(block, layout)


def copy_layout(layout: Layout, on_card: bool) -> Layout:
    """How the copy of a layer lies in its block."""
    tensors: list[tuple[str, tuple[int, ...], DType]] = []
    for entry in layout.entries:
        group = _group(entry.shape)
        if group is None:
            tensors.append((entry.name, entry.shape, entry.dtype))
            continue
        n, k = entry.shape
        if on_card:  # tiles of 8 rows and a group's columns
            tensors.append(
                (f"{entry.name}.{_CODES}", (n // 8, k // group, 32, group // 32), DType.INT32)
            )
        else:
            tensors.append((f"{entry.name}.{_CODES}", (n, k // 2), DType.UINT8))
        tensors.append((f"{entry.name}.{_SCALES}", (k // group, n, 2), DTYPE))
    return packed_layout(tensors)


def _group(shape: tuple[int, ...]) -> int | None:
    """Weights that share a scale; None where a tensor is not packed."""
    if len(shape) != 2 or shape[0] % 16:
        return None
    return next((group for group in _GROUPS if shape[1] % group == 0), None)


def _rounded(weight: Tensor, n_groups: int) -> tuple[Tensor, Tensor]:
    """Codes (n, k) int32 of 0 to 15, and scales and zero points (n_groups, n, 2): scale * (code -
    8) + zero.
    """
    import torch

    groups = weight.float().view(len(weight), n_groups, -1)
    least = groups.amin(-1)
    largest = groups.amax(-1)
    dtype = DTYPE.torch
    scale = ((largest - least) / 15).to(dtype)
    zero = (least + 8 * scale.float()).to(dtype)
    steps = (groups - zero.float()[..., None]) / scale.float().clamp_min(torch.finfo(dtype).tiny)[
        ..., None
    ]
    codes = (steps.round() + 8).clamp_(0, 15).int()
    return codes.flatten(1), torch.stack((scale, zero), -1).transpose(0, 1)


def _interleaved(codes: Tensor, n_groups: int) -> Tensor:
    """In the order that torch's product reads."""
    import torch

    pack = torch.ops.aten
    if codes.is_cuda:
        bytes_of = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
        of_card: Tensor = pack._convert_weight_to_int4pack(
            bytes_of, codes.shape[1] // n_groups // 16
        )
        return of_card
    of_host: Tensor = pack._convert_weight_to_int4pack_for_cpu(codes, 1)
    return of_host


class Format(dense.Format):
    """Of layers of which some are copies and others the original."""

    name = "int4"

    def view(self, layout: Layout, block: Tensor, dtype: torch.dtype) -> View:
        """Weights that are not packed are converted to DTYPE at each use."""
        return View(layout, block, dtype)


class View(dense.View):
    """The weights of a layer."""

    linears = LayerWeights.linears  # each by itself

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `LayerWeights.linear`."""
        import torch

        codes = self._tensors.get(f"{name}.weight.{_CODES}")
        if codes is None:
            return super().linear(x, name)
        scales = self._tensors[f"{name}.weight.{_SCALES}"]
        product = (
            torch.ops.aten._weight_int4pack_mm
            if x.is_cuda
            else torch.ops.aten._weight_int4pack_mm_for_cpu
        )
        out: Tensor = product(x, codes, x.shape[1] // len(scales), scales)
        bias = self._tensors.get(f"{name}.bias")
        return out if bias is None else out.add_(bias)
