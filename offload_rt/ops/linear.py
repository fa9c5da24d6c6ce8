"""Products with weights in any stored form, and their dequantisation."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_rt.ops import extension, linear_cpu
from offload_rt.ops.dequantize import (
    BlockMatrix,
    CodedMatrix,
    Weight,
    ZeroCodes,
    dequantize_blocks,
    dequantize_codes,
)
from offload_rt.ops.few_rows import multiply_few_rows, serves_few_rows
from offload_rt.packing import PRODUCT_OUTPUTS

_HALVES = (torch.float16, torch.bfloat16)


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, allows_torch: bool = False
) -> Tensor:
    """Multiply x (..., n_in) by the transposed weight (n_out, n_in) and add bias (n_out,).

    Returns (..., n_out) in x's dtype. Accumulates in float32 or better. Encoded weights have the
    exact values of their format. On a CPU with the library, a row does not depend on other rows.

    allows_torch  let torch multiply many rows of 16 bits; results may depend on other rows
    """
    if x.dim() != 2:
        rows = linear(x.reshape(-1, x.shape[-1]), weight, bias, allows_torch)
        return rows.view(*x.shape[:-1], -1)
    if _uses_library(weight, x, allows_torch):
        return linear_cpu.linear(x, (weight,), (bias,))[0]
    needs_gradient = torch.is_grad_enabled() and x.requires_grad
    if x.device.type == "cpu" and not needs_gradient and not _has_fast_product(x, weight):
        return _linear_by_parts(x, weight, bias)
    if (
        isinstance(weight, CodedMatrix)
        and not needs_gradient
        and extension.serves(x)
        and len(x) <= _undecoded_rows(x.device)
        and serves_few_rows(x, weight)
    ):
        return multiply_few_rows(x, weight, bias)
    if not isinstance(weight, Tensor):
        weight = dequantize(weight, x.new_empty(math.prod(weight.shape)))
    return F.linear(x, weight.to(x.dtype), bias)


@cache
def _undecoded_rows(device: torch.device) -> int:
    """Return the rows up to which the kernel beats decoding and torch's product.

    Measured on an H200 (`bench.gpu` section products); GPUs with less bandwidth decode later.
    """
    return 64 if extension.capability(device) >= 90 else sys.maxsize


def linears(
    x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None], allows_torch: bool
) -> list[Tensor]:
    """Apply `linear` with several weights; in one call of the CPU library where it serves all."""
    if x.dim() == 2 and all(_uses_library(weight, x, allows_torch) for weight in weights):
        return linear_cpu.linear(x, weights, biases)
    return [linear(x, *pair, allows_torch) for pair in zip(weights, biases, strict=True)]


def stack(x: Tensor, weights: Sequence[Sequence[Weight]]) -> linear_cpu.MatrixStack | None:
    """Return groups of weights as a stack, for all products of rows like x.

    None if the CPU library may not multiply all of them.
    """
    if not all(linear_cpu.serves(x, weight) for group in weights for weight in group):
        return None
    return linear_cpu.MatrixStack.of(weights)


def _uses_library(weight: Weight, x: Tensor, allows_torch: bool) -> bool:
    if (x.requires_grad and torch.is_grad_enabled()) or not linear_cpu.serves(x, weight):
        return False
    is_same = isinstance(weight, Tensor) and weight.dtype == x.dtype and x.dtype in _HALVES
    return not (allows_torch and is_same and x.shape[0] >= 16)  # torch may be faster, with AMX


def _has_fast_product(x: Tensor, weight: Weight) -> bool:
    """Whether torch multiplies these tensors at the rate of float32, or has to convert nothing."""
    is_same = isinstance(weight, Tensor) and weight.dtype == x.dtype
    return is_same and (x.dtype not in _HALVES or torch.cpu._is_avx512_bf16_supported())


def _linear_by_parts(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """`linear` by torch in float32 or better, with some outputs of the weight widened at a time."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    n_out = weight.shape[0]
    wide = x.to(dtype)
    y = x.new_empty(len(x), n_out)
    part = torch.empty(PRODUCT_OUTPUTS, weight.shape[1], dtype=dtype)
    for first in range(0, n_out, PRODUCT_OUTPUTS):
        outputs = slice(first, min(first + PRODUCT_OUTPUTS, n_out))
        target = part[: outputs.stop - first]
        if isinstance(weight, Tensor):
            target.copy_(weight[outputs])
        else:
            target = dequantize(weight, target, torch.arange(outputs.start, outputs.stop))
        y[:, outputs] = F.linear(wide, target, None if bias is None else bias[outputs].to(dtype))
    return y


def dequantize(
    weight: CodedMatrix | BlockMatrix, out: Tensor, rows: Tensor | None = None
) -> Tensor:
    """Write a weight, or its rows (n,) int64, to `out` and return it as (n_out, n_in) or (n, n_in).

    rows  of AWQ, in groups of eight consecutive rows from a multiple of eight
    out   dense, any dtype, as many numbers as the result; values are rounded to this dtype at last
    """
    if linear_cpu.serves(out, weight):
        return linear_cpu.unpack(weight, out.view(-1, weight.shape[1]), rows)
    if isinstance(weight, BlockMatrix):
        target = out.view(-1, weight.shape[1])
        blocks = weight.blocks if rows is None else weight.blocks[rows]
        dequantize_blocks(blocks, weight.type, target)
        return target
    packing = weight.packing
    codes = weight.codes
    scales = weight.float_scales()
    zeros: ZeroCodes | Tensor | None = weight.zeros if rows is None else weight.int_zeros()
    n_rows = weight.shape[0]
    if rows is not None and packing.is_transposed:
        n_rows = len(rows)
        codes = codes[:, rows[::8] // 8 if packing.order == "awq" else rows]
        scales = scales[:, rows]
        zeros = zeros[:, rows] if isinstance(zeros, Tensor) else None
    elif rows is not None:
        groups_of_rows = rows // packing.block[0]
        codes = codes.view(torch.uint8)[rows].view(codes.dtype)  # torch does not index float8
        scales = scales[groups_of_rows]
        zeros = zeros[groups_of_rows] if isinstance(zeros, Tensor) else None
        packing = replace(packing, block=(1, packing.block[1]))
    target = out.view(-1, n_rows if packing.is_transposed else weight.shape[1])
    dequantize_codes(codes, scales, zeros, weight.groups, packing, target)
    return target.T if packing.is_transposed else target
