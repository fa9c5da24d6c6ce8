"""Products and dequantisation by the CPU library (csrc/linear_cpu.h), for every weight format.

The library reads stored weights and unpacks a panel at a time. The order of summation is
independent of the number of rows, so tree passes and plain decoding agree bit for bit.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from offload_rt.ops import cpu
from offload_rt.ops.cpu import ADDRESS, INT, SIZE
from offload_rt.ops.dequantize import POWERS_OF_TWO, BlockMatrix, CodedMatrix, Weight
from offload_rt.packing import BLOCKS, KERNEL_BLOCKS, ORDERS

# As `Kind` in csrc/linear_cpu.cpp. Dense kinds are the dtypes; int8 is the order `plain`.
_FIRST_ORDER = len(cpu.DTYPES)
_FLOAT8 = _FIRST_ORDER + len(ORDERS)


class MatrixStruct(ctypes.Structure):
    """As `Matrix` in csrc/linear_cpu.cpp."""

    _fields_ = cpu.fields(
        (ADDRESS, "x y"), (SIZE, "n_rows ldx ldy"), (ADDRESS, "codes scales zeros groups bias"),
        (SIZE, "row_nbytes n_out n_in block_out block_in grid_columns"),
        (INT, "kind bits offset scale_dtype product_dtype zero_order"),
        (INT, "zero_plus bias_dtype rounds_inputs"),
    )  # fmt: skip


def serves(x: Tensor, weight: Weight) -> bool:
    """Whether the library multiplies x (or writes to x, when dequantising) and this weight."""
    if x.device.type != "cpu" or x.dtype not in cpu.DTYPES:
        return False
    is_known = True
    if isinstance(weight, Tensor):
        is_known = weight.dtype in cpu.DTYPES and weight.stride(-1) == 1
    elif isinstance(weight, CodedMatrix):
        has_scales = weight.scales.dtype in (*cpu.DTYPES, *POWERS_OF_TWO)
        is_known = weight.product in cpu.DTYPES and has_scales
    return is_known and cpu.library() is not None


def linear(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """Multiply x (n, n_in) by each transposed weight (n_out, n_in) and add its bias (n_out,).

    Returns per weight (n, n_out) in x's dtype.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    outputs = [torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype) for weight in weights]
    array = (MatrixStruct * len(weights))(*map(describe, weights, biases))
    for matrix, y in zip(array, outputs, strict=True):
        if x.shape[1] != matrix.n_in:  # the kernel would read other memory
            raise RuntimeError(f"x has {x.shape[1]} columns, its weight {matrix.n_in}")
        matrix.x, matrix.y = cpu.addresses(x, y)
        matrix.n_rows = len(x)
        matrix.ldx, matrix.ldy = x.stride(0), y.stride(0)
    cpu.call("offload_rt_linear", array, len(array), cpu.DTYPES[x.dtype])
    return outputs


class MatrixStack(NamedTuple):
    """Groups of matrices for `linear_groups`, valid as long as their tensors.

    words     (n_groups, n_matrices, words of `MatrixStruct`) int64
    n_in      inputs of all matrices
    columns   first output column of each matrix of a group, and the number of columns, int64
    n_out     the number of columns
    """

    words: np.ndarray
    n_in: int
    columns: np.ndarray
    n_out: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[Weight]]) -> "MatrixStack":
        """Describe groups of matrices with equal shapes in all groups."""
        described = [[describe(weight) for weight in group] for group in groups]
        n_in = described[0][0].n_in
        assert all(matrix.n_in == n_in for group in described for matrix in group)
        content = bytearray().join(bytes(matrix) for group in described for matrix in group)
        words = np.frombuffer(content, np.int64).reshape(len(groups), len(groups[0]), -1)
        columns = np.append(0, np.cumsum([matrix.n_out for matrix in described[0]]))
        return cls(words, n_in, columns, int(columns[-1]))


def linear_groups(
    x: Tensor, ends: Sequence[int], stack: MatrixStack, groups: Sequence[int]
) -> Tensor:
    """Multiply ranges of rows, each by the transposed matrices of a group, in one call.

    x       (n, n_in), or a single row for all ranges, which then have one row each
    ends    end of each range
    groups  group of each range; the outputs of its matrices lie side by side
    Returns (n, n_out).
    """
    if x.shape[1] != stack.n_in:  # the kernel would read other memory
        raise RuntimeError(f"x has {x.shape[1]} columns, its weights {stack.n_in}")
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty(ends[-1], stack.n_out, dtype=x.dtype)
    n = len(groups)
    ranges = (ctypes.c_int64 * (2 * n))(*groups, *ends)
    address = ctypes.addressof(ranges)
    cpu.call(
        "offload_rt_linear_groups",
        stack.words.ctypes.data, stack.words.shape[1], stack.columns.ctypes.data, address,
        address + 8 * n, n, x.data_ptr(), x.stride(0) if x.shape[0] > 1 else 0, y.data_ptr(),
        cpu.DTYPES[x.dtype],
    )  # fmt: skip
    return y


def unpack(weight: CodedMatrix | BlockMatrix, out: Tensor, rows: Tensor | None) -> Tensor:
    """Write the rows (n,) int64 of a weight, or all of them, to out (n, n_in)."""
    address = None if rows is None else rows.contiguous().data_ptr()
    data = len(out), out.data_ptr(), cpu.DTYPES[out.dtype]
    cpu.call("offload_rt_unpack", describe(weight), address, *data)
    return out


def describe(weight: Weight, bias: Tensor | None = None) -> MatrixStruct:
    """The library's description, which holds addresses of the weight's and the bias's tensors."""
    matrix = MatrixStruct(n_out=weight.shape[0], n_in=weight.shape[1], block_out=1, block_in=1)
    if bias is not None:
        matrix.bias = bias.data_ptr()
        matrix.bias_dtype = cpu.DTYPES[bias.dtype]
    if isinstance(weight, CodedMatrix):
        _add_codes(matrix, weight)
        return matrix
    content = weight if isinstance(weight, Tensor) else weight.blocks
    matrix.codes = content.data_ptr()
    matrix.row_nbytes = content.stride(0) * content.itemsize
    if isinstance(weight, Tensor):
        matrix.kind = cpu.DTYPES[weight.dtype]
        return matrix
    matrix.kind = _FLOAT8 + 1 + list(BLOCKS).index(weight.type)
    (matrix.scales,) = cpu.addresses(_grid(weight.type))
    matrix.rounds_inputs = weight.rounds_inputs
    return matrix


@cache
def _grid(type: str) -> Tensor | None:
    """Return the points (n, 4 or 8) int8 of a type with a grid, those of IQ1 in eighths."""
    if type in KERNEL_BLOCKS:
        return None
    from gguf import quants  # imports in 0.1 s

    points = getattr(quants, "IQ1_S" if type == "IQ1_M" else type)
    points.init_grid()
    factor = 8 if type.startswith("IQ1") else 1
    return torch.from_numpy(points.grid[0, 0] * factor).to(torch.int8)


def _add_codes(matrix: MatrixStruct, weight: CodedMatrix) -> None:
    packing = weight.packing
    codes = weight.codes
    scales = weight.scales
    zeros = weight.zeros
    is_float8 = codes.dtype == torch.float8_e4m3fn
    block = packing.block[::-1] if packing.is_transposed else packing.block
    matrix.codes, matrix.scales, matrix.groups = cpu.addresses(codes, scales, weight.groups)
    matrix.row_nbytes = codes.stride(0) * codes.itemsize
    matrix.block_out, matrix.block_in = block
    matrix.grid_columns = scales.shape[1]
    matrix.kind = _FLOAT8 if is_float8 else _FIRST_ORDER + ORDERS.index(packing.order)
    matrix.bits = packing.bits
    matrix.offset = packing.offset
    matrix.scale_dtype = cpu.DTYPES.get(scales.dtype, len(cpu.DTYPES))  # kExponent8
    matrix.product_dtype = cpu.DTYPES[weight.product]
    matrix.rounds_inputs = weight.rounds_inputs
    if zeros is not None:
        matrix.zeros = zeros.codes.data_ptr()
        matrix.zero_plus = zeros.plus
        matrix.zero_order = _FIRST_ORDER + ORDERS.index(zeros.order)
