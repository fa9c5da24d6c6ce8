"""CUDA products that decode weights in registers: few rows, or rows sorted by matrix."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offload_rt.ops import extension
from offload_rt.ops.dequantize import KERNEL_DTYPES, POWERS_OF_TWO, CodedMatrix, kernel_codes
from offload_rt.packing import ORDERS

_HALVES = (torch.float16, torch.bfloat16)
_DENSE = len(ORDERS) + 1

# Matrices (n, n_out, n_in), or a `CodedMatrix` with a further, first dimension.
Stack = Tensor | CodedMatrix


def serves_few_rows(x: Tensor, weight: CodedMatrix) -> bool:
    """Whether the kernel multiplies the rows x (n, n_in) by these codes directly."""
    has_codes = weight.codes.is_contiguous() and weight.codes.data_ptr() % 8 == 0
    return has_codes and 0 < len(x) <= _most_rows(x.dtype, weight)


def _most_rows(dtype: torch.dtype, weight: CodedMatrix) -> int:
    """Return the rows of a product with a kernel; 0 without."""
    if dtype not in _HALVES or weight.groups is not None or weight.product not in KERNEL_DTYPES:
        return 0
    zeros = None if weight.zeros is None else weight.zeros.order
    return weight.packing.n_coded_rows(weight.shape[1], zeros)


def serves_stack(dtype: torch.dtype, stack: Stack) -> bool:
    """Whether the kernel multiplies rows of this dtype by the matrices of a stack."""
    if isinstance(stack, Tensor):
        is_aligned = stack.data_ptr() % 16 == 0 and stack[0].is_contiguous()
        is_whole = stack.shape[2] % 32 == 0  # as in csrc/kernels.h
        return dtype in _HALVES and stack.dtype == dtype and is_aligned and is_whole
    has_scales = stack.scales.dtype == stack.product or _has_exponents(stack)
    return has_scales and _most_rows(dtype, stack) > 0


def _has_exponents(weight: CodedMatrix) -> bool:
    """Whether the kernel decodes scales that are powers of two, without another rounding."""
    return weight.scales.dtype in POWERS_OF_TWO and weight.product != torch.float16


def multiply_few_rows(
    x: Tensor, weight: CodedMatrix, bias: Tensor | None, library: Any = None
) -> Tensor:
    """Multiply x (n, n_in) by the transposed weight and add bias: (n, n_out).

    library  ops of the kernels, by name; None: those of the GPU
    """
    zeros = weight.zeros and replace(weight.zeros, codes=weight.zeros.codes[None])
    scales = weight.scales.contiguous()[None]
    stack = replace(weight, codes=weight.codes[None], scales=scales, zeros=zeros)
    return multiply_stack(x, None, None, stack, None if bias is None else bias[None], library)


def multiply_stack(
    x: Tensor,
    rows: Tensor | None,
    ends: Tensor | None,
    stack: Stack,
    bias: Tensor | None = None,
    library: Any = None,
) -> Tensor:
    """Multiply rows, sorted by matrix, by the transposed matrices of a stack: (n, n_out).

    x     (rows, n_in)
    rows  (n,) int64 row of x of each result; None: the same row
    ends  (matrices,) int32 end of the results of each matrix; results past the last are zeros.
          None: a single matrix and few rows
    bias  (matrices, n_out)
    """
    if isinstance(stack, Tensor):
        return _product(library, x, rows, ends, stack, None, None, bias, _DENSE, 1, 8, 0)
    kind, codes = kernel_codes(stack.codes, stack.packing)
    scales = stack.scales.view(torch.uint8) if _has_exponents(stack) else stack.float_scales()
    zeros = stack.zeros and stack.zeros.codes
    offset = stack.zeros.plus if stack.zeros else stack.packing.offset
    block = stack.packing.block[::-1] if stack.packing.is_transposed else stack.packing.block
    return _product(library, x, rows, ends, codes, scales, zeros, bias, kind, *block, offset)


def _product(library: Any, x: Tensor, *arguments: Any) -> Tensor:
    is_aligned = x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    x = x if is_aligned else x.clone(memory_format=torch.contiguous_format)
    product: Tensor = (library or extension.kernels()).few_rows(x, *arguments)
    return product
