"""Quantise unquantised blocks while they are loaded, for draft models and copies of layers.

Rounding changes the draft's distribution only. Verification uses the changed distribution, so the
output of the target is unaffected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from offload_rt.dtypes import DType
from offload_rt.packing import Packing
from offload_rt.weights import int4
from offload_rt.weights.formats import Matrix, StoredTensor
from offload_rt.weights.layout import Layout, PackedLayer, host_block, packed_layout
from offload_rt.weights.matrix import QuantizedMatrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Largest value of the codes; int4 has zero points instead.
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_CODES = {"int8": DType.INT8, "fp8": DType.FLOAT8_E4M3FN}
ROUNDINGS = ("int4", *_LARGEST)
# Embeddings are read by rows and stay unquantised.
_TABLE = "embed_tokens.weight"
# Rows quantised at a time: a multiple of int4's interleaving, few enough to bound temporary memory.
_N_ROWS = 512


def rounded_layout(
    tensors: Iterable[tuple[str, tuple[int, ...], DType]], rounding: str, on_card: bool = False
) -> Layout:
    """Return the layout of a quantised block.

    tensors  (name, shape, dtype) of the unquantised block
    on_card  whether a GPU reads the block
    """
    stored: list[tuple[str, tuple[int, ...], DType]] = []
    matrices = {}
    for name, shape, dtype in tensors:
        matrix = _matrix(name, shape, rounding, on_card)
        if matrix is None:
            stored.append((name, shape, dtype))
            continue
        matrices[name.removesuffix(".weight")] = matrix
        stored += [(part.name, part.shape, part.dtype or dtype) for part in matrix.tensors]
    return packed_layout(stored, matrices)


def rounded(layer: PackedLayer, rounding: str, device: torch.device) -> PackedLayer:
    """Copy a block to the device with quantised matrices; all further tensors stay unchanged."""
    import torch  # not at the top: a plan asks for the layout alone

    on_card = device.type == "cuda"
    layout = rounded_layout(layer.layout.tensors, rounding, on_card)
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
            weight = tensor[rows].to(device)
            if rounding == "int4":
                int4.write(weight, rows, codes, scales)
            else:
                codes[rows], scales[rows] = _scaled(weight, rounding)
    return PackedLayer(block, layout)


def _matrix(name: str, shape: tuple[int, ...], rounding: str, on_card: bool) -> Matrix | None:
    """Return the quantised storage of a tensor; None for vectors, tables and odd widths."""
    if len(shape) != 2 or not name.endswith(".weight") or name.endswith(_TABLE):
        return None
    if rounding == "int4":
        return int4.matrix_of(name, shape, on_card)
    codes = StoredTensor(f"{name}.codes", shape, _CODES[rounding])
    scales = StoredTensor(f"{name}.scales", (shape[0], 1), DType.FLOAT32)
    packing = Packing("plain", 8, (1, shape[1]))
    return QuantizedMatrix((shape[0], shape[1]), codes, packing, scales, product=DType.FLOAT32)


def _scaled(weight: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Return codes (n, k) and float32 scales (n, 1) of rows of a matrix."""
    import torch

    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True) / _LARGEST[rounding]
    steps = wide / scales.clamp_min(torch.finfo(torch.float32).tiny)
    return (steps.round_() if rounding == "int8" else steps).to(_CODES[rounding].torch), scales
