"""4-bit matrices in about a third of the bytes, for drafts.

Products are torch's tinygemm, fast for few rows. Rounding errors only affect the draft.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_rt.dtypes import DType
from offload_rt.weights.formats import Matrix, StoredTensor, dense

if TYPE_CHECKING:
    from torch import Tensor

    from offload_rt.ops.dequantize import TinygemmMatrix

# Input and output dtype of torch's products on every device.
DTYPE = DType.BFLOAT16
# Weights per scale and zero point: the first divisor of a row's length.
_GROUPS = (64, 32)


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

    def scratch_nbytes(self, dtype: DType, has_card: bool) -> int:
        """Return 0: products read the codes."""
        return 0

    def n_coded_rows(self, dtype: DType) -> float:
        """Return infinity: all products read the codes."""
        return math.inf


class Format(dense.Format):
    """Layers of which some matrices are `Int4Matrix`; further weights are converted to DTYPE."""

    name = "int4"


def matrix_of(name: str, shape: tuple[int, ...], on_card: bool) -> Int4Matrix | None:
    """Return the storage of a matrix, or None if its shape does not suit torch's product.

    on_card  whether a GPU reads the matrix
    """
    group = _group(shape)
    if group is None:
        return None
    n, k = shape
    # on a card tiles of 8 rows and a group's columns
    codes = StoredTensor(
        f"{name}.codes",
        (n // 8, k // group, 32, group // 32) if on_card else (n, k // 2),
        DType.INT32 if on_card else DType.UINT8,
    )
    return Int4Matrix((n, k), codes, StoredTensor(f"{name}.scales", (k // group, n, 2), DTYPE))


def write(weight: Tensor, rows: slice, codes: Tensor, scales: Tensor) -> None:
    """Quantise rows of a matrix, and write them to the tensors of an `Int4Matrix`."""
    rounded, scales[:, rows] = _quantized(weight, len(scales))
    part = codes[rows.start // 8 : rows.stop // 8] if weight.is_cuda else codes[rows]
    part.copy_(_interleaved(rounded, len(scales)))


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
