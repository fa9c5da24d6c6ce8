"""Quantise unquantised blocks while they are loaded, for draft models and copies of layers.

Rounding changes the draft's distribution only. Verification uses the changed distribution, so the
output of the target is unaffected.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from offload_rt.dtypes import DType
from offload_rt.packing import Packing
from offload_rt.weights.formats import Matrix, StoredTensor
from offload_rt.weights.layout import Layout, PackedLayer, host_block, packed_layout
from offload_rt.weights.matrix import QuantizedMatrix, ZeroPoints

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from offload_rt.lazy import torch

# Name of the 4-bit copies of a self-drafting target's layers, and dtype of their further weights.
COPIES = "int4"
COPY_DTYPE = DType.BFLOAT16
# Weights per int4 scale and zero point: the first divisor of a row's length.
_GROUPS = (64, 32)
# int4 codes of a word.
_PER_WORD = 8
# Largest value of the codes; int4 has zero points instead.
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_CODES = {"int8": DType.INT8, "fp8": DType.FLOAT8_E4M3FN}
ROUNDINGS = ("int4", *_LARGEST)
# Embeddings are read by rows and stay unquantised.
_TABLE = "embed_tokens.weight"
# Rows quantised at a time: whole words of zero points, few enough to bound temporary memory.
_N_ROWS = 512


def rounded_layout(tensors: Iterable[tuple[str, tuple[int, ...], DType]], rounding: str) -> Layout:
    """Return the layout of a quantised block, given (name, shape, dtype) of its tensors."""
    stored: list[tuple[str, tuple[int, ...], DType]] = []
    matrices = {}
    for name, shape, dtype in tensors:
        matrix = _matrix(name, shape, rounding)
        if matrix is None:
            stored.append((name, shape, dtype))
            continue
        matrices[name.removesuffix(".weight")] = matrix
        stored += [(part.name, part.shape, part.dtype or dtype) for part in matrix.tensors]
    return packed_layout(stored, matrices)


def rounded(layer: PackedLayer, rounding: str, device: torch.device) -> PackedLayer:
    """Copy a block to the device with quantised matrices; all further tensors stay unchanged."""
    layout = rounded_layout(layer.layout.tensors, rounding)
    if device.type == "cuda":
        block = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
    else:
        block = host_block(layout.nbytes)
    targets = layout.views(block)
    for name, tensor in layer.layout.views(layer.block).items():
        if name in targets:
            targets[name].copy_(tensor)
            continue
        matrix = layout.matrices[name.removesuffix(".weight")]
        codes, scales, *zeros = (targets[part.name] for part in matrix.tensors)
        for first in range(0, len(tensor), _N_ROWS):
            rows = slice(first, min(first + _N_ROWS, len(tensor)))
            weight = tensor[rows].to(device)
            if rounding == "int4":
                words = slice(rows.start // _PER_WORD, -(-rows.stop // _PER_WORD))
                codes[rows], scales[rows], zeros[0][words] = _int4(weight, scales.shape[1])
            else:
                codes[rows], scales[rows] = _scaled(weight, rounding)
    return PackedLayer(block, layout)


def _matrix(name: str, shape: tuple[int, ...], rounding: str) -> Matrix | None:
    """Return the quantised storage of a tensor; None for vectors, tables and odd widths."""
    if len(shape) != 2 or not name.endswith(".weight") or name.endswith(_TABLE):
        return None
    n, k = shape
    if rounding != "int4":
        codes = StoredTensor(f"{name}.codes", shape, _CODES[rounding])
        scales = StoredTensor(f"{name}.scales", (n, 1), DType.FLOAT32)
        packing = Packing("plain", 8, (1, k))
        return QuantizedMatrix((n, k), codes, packing, scales, product=DType.FLOAT32)
    group = next((group for group in _GROUPS if k % group == 0), None)
    if group is None:
        return None
    packing = Packing("rows", 4, (1, group))
    codes = StoredTensor(f"{name}.codes", packing.code_shape(n, k), DType.INT32)
    scales = StoredTensor(f"{name}.scales", (n, k // group), COPY_DTYPE)
    points = StoredTensor(f"{name}.zeros", (-(-n // _PER_WORD), k // group), DType.INT32)
    return QuantizedMatrix((n, k), codes, packing, scales, ZeroPoints(points, "columns"))


def _int4(weight: Tensor, n_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes (n, k / 8), scales (n, groups) and packed zero points (n / 8, groups)."""
    groups = weight.float().view(len(weight), n_groups, -1)
    least = groups.amin(-1).clamp_max(0)
    largest = groups.amax(-1).clamp_min(0)
    scales = ((largest - least) / 15).to(COPY_DTYPE.torch)
    steps = scales.float().clamp_min(torch.finfo(COPY_DTYPE.torch).tiny)
    zeros = (-least / steps).round_().clamp_(0, 15)
    codes = ((groups / steps[..., None]).round_() + zeros[..., None]).clamp_(0, 15)
    padding = -len(weight) % _PER_WORD
    points = torch.nn.functional.pad(zeros.T, (0, padding))
    return _words(codes.flatten(1)), scales, _words(points).T


def _words(codes: Tensor) -> Tensor:
    """Pack 4-bit codes (n, 8 m) into int32 words (n, m), low bits first."""
    shifts = 4 * torch.arange(_PER_WORD, dtype=torch.int32, device=codes.device)
    eights = codes.int().view(len(codes), -1, _PER_WORD)
    words: Tensor = (eights << shifts).sum(-1, dtype=torch.int32)
    return words


def _scaled(weight: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Return codes (n, k) and float32 scales (n, 1) of rows of a matrix."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True) / _LARGEST[rounding]
    steps = wide / scales.clamp_min(torch.finfo(torch.float32).tiny)
    return (steps.round_() if rounding == "int8" else steps).to(_CODES[rounding].torch), scales
