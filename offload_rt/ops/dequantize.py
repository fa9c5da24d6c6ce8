"""Dequantisation: (code - zero) * scale in the dtype of the scales, rounded once, then cast."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from offload_rt.ops import extension
from offload_rt.packing import (
    BLOCKS,
    KERNEL_BLOCKS,
    NF4,
    ORDERS,
    REFERENCE_WEIGHTS,
    ZERO_ORDERS,
    Order,
    Packing,
)

# Nibble of column i in an AWQ word of eight columns.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
# The values of e2m1, the 4-bit float of MXFP4.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Dtypes of power-of-two scales.
POWERS_OF_TWO = (torch.uint8, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class ZeroCodes:
    """Packed zero points, in the grid of the scales.

    plus  added to each zero point, modulo 2^bits
    """

    codes: Tensor
    order: Order
    plus: int = 0

    def unpacked(self, bits: int, scales: Tensor) -> Tensor:
        """Return int32 zero points in the shape of the scales."""
        zeros = unpack(self.codes, self.order, bits, *scales.shape).int().contiguous()
        return (zeros + self.plus) & (1 << bits) - 1 if self.plus else zeros


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix (n_out, n_in) as codes with scales. Orders `columns` and `awq` store its transpose.

    codes    packing.code_shape of the stored shape
    scales   (rows / block, columns / block) of the stored shape, float, or uint8 and float8_e8m0fnu
             for powers of two
    A stack of matrices has a further, first dimension in codes, scales and zeros.
    groups   (n_in,) int32, group of each input; None: position // block
    product  dtype of (code - zero) * scale, rounded once
    rounds_inputs  products on a CPU round inputs of int8 codes to 8 bits, see csrc/rounded_cpu.h
    """

    shape: tuple[int, int]
    packing: Packing
    codes: Tensor
    scales: Tensor
    zeros: ZeroCodes | None
    groups: Tensor | None
    product: torch.dtype
    rounds_inputs: bool = False

    def float_scales(self) -> Tensor:
        """Return the scales in the dtype of the product."""
        if self.scales.dtype in POWERS_OF_TWO:
            return torch.exp2(self.scales.view(torch.uint8).float() - 127).to(self.product)
        return self.scales.to(self.product)

    def int_zeros(self) -> Tensor | None:
        """Unpack the zero points: int32 in the shape of the scales."""
        zeros = self.zeros
        return None if zeros is None else zeros.unpacked(self.packing.bits, self.scales)


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix (n_out, n_in) in GGUF blocks.

    blocks  (n_out, bytes of a row) uint8
    type    key of BLOCKS
    rounds_inputs  products on a CPU round inputs to 8 bits, see csrc/rounded_cpu.h
    """

    shape: tuple[int, int]
    blocks: Tensor
    type: str
    rounds_inputs: bool = False


Weight = Tensor | CodedMatrix | BlockMatrix


def kernel_codes(codes: Tensor, packing: Packing) -> tuple[int, Tensor]:
    """Return the kind of codes and their words as arguments of the kernels."""
    if codes.dtype == torch.float8_e4m3fn:
        return len(ORDERS), codes.view(torch.uint8)
    return ORDERS.index(packing.order), codes


def dequantize_codes(
    codes: Tensor,
    scales: Tensor,
    zeros: ZeroCodes | Tensor | None,
    groups: Tensor | None,
    packing: Packing,
    out: Tensor,
) -> None:
    """Dequantise codes by the CUDA kernel, which decodes packed zero points, or the reference.

    codes   packing.code_shape(rows, columns)
    scales  (rows / block, columns / block) in the dtype of the product, float32 for nf4; with
            `groups` (rows / block, n_groups) or the transpose
    zeros   packed, or int32 in the shape of scales
    groups  (columns,) or (rows,) int32: scale index; None: position // block
    out     (rows, columns), dense, any dtype
    """
    packed = zeros if isinstance(zeros, ZeroCodes) else None
    order = packed.order if packed else None
    has_kernel = zeros is None or order == ZERO_ORDERS.get(packing.order, "")
    if extension.serves(out) and has_kernel and {scales.dtype, out.dtype} <= {*KERNEL_DTYPES}:
        kind, words = kernel_codes(codes, packing)
        offset = packed.plus if packed else packing.offset
        numbers = kind, packing.bits, *packing.block, offset
        points = packed and packed.codes
        extension.kernels().dequantize(words, scales, points, groups, *numbers, out)
    else:
        if isinstance(zeros, ZeroCodes):
            zeros = zeros.unpacked(packing.bits, scales)
        reference_dequantize(codes, scales, zeros, groups, packing, out)


def dequantize_blocks(blocks: Tensor, name: str, out: Tensor) -> None:
    """Dequantise GGUF blocks by the CUDA kernel or the reference, in float32, rounded once.

    blocks  (rows, bytes of a row) uint8
    name    key of BLOCKS
    out     (rows, columns), dense, any dtype
    """
    if extension.serves(out) and name in KERNEL_BLOCKS and out.dtype in KERNEL_DTYPES:
        extension.kernels().dequantize_blocks(blocks, list(KERNEL_BLOCKS).index(name), out)
    else:
        reference_dequantize_blocks(blocks, name, out)


def unpack(codes: Tensor, order: Order, bits: int, n_rows: int, n_columns: int) -> Tensor:
    """Unpack codes to (n_rows, n_columns), int32 or float, without zero points and scales."""
    if order == "plain":
        return codes
    if order in ("e2m1", "nf4"):
        halves = (codes & 15, codes >> 4) if order == "e2m1" else (codes >> 4, codes & 15)
        nibbles = torch.stack(halves, -1).view(n_rows, -1)[:, :n_columns]
        return table(E2M1 if order == "e2m1" else NF4, codes.device)[nibbles.int()]
    if order == "awq":
        shifts = table(tuple(4 * nibble for nibble in AWQ_NIBBLES), codes.device)
        return ((codes[:, :, None] >> shifts) & 15).view(n_rows, -1)[:, :n_columns]
    if order == "columns":
        return unpack(codes.T, "rows", bits, n_columns, n_rows).T
    at = bits * torch.arange(n_columns, device=codes.device)
    word = at // 32
    shift = (at % 32).int()
    # A code may continue in the next word, so append a word.
    words = torch.cat((codes, codes.new_zeros(n_rows, 1)), 1)
    low = words[:, word] >> shift & ~(-1 << (32 - shift).clamp(max=bits))
    high = words[:, word + 1] << (32 - shift).clamp(max=31) & (1 << bits) - 1
    return low | high & -(shift > 32 - bits).int()


@cache
def table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return constants on a device, int32 or float32.

    Cached: the copy synchronizes, and CUDA graph capture rejects it.
    """
    dtype = torch.int32 if isinstance(values[0], int) else torch.float32
    return torch.tensor(values, dtype=dtype, device=device)


def reference_dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor | None,
    packing: Packing,
    out: Tensor,
) -> None:
    """Compute `dequantize_codes` in chunks of rows, to bound temporary memory."""
    n_rows, n_columns = out.shape
    row_scale = torch.arange(n_rows, device=out.device) // packing.block[0]
    column_scale = torch.arange(n_columns, device=out.device) // packing.block[1]
    if groups is not None and packing.is_transposed:
        row_scale = groups
    elif groups is not None:
        column_scale = groups
    step = max(REFERENCE_WEIGHTS // max(n_columns, 1) // 32, 1) * 32
    for first in range(0, n_rows, step):
        last = min(first + step, n_rows)
        part = codes[first:last]
        if packing.order == "columns":
            part = codes[first * packing.bits // 32 : -(-last * packing.bits // 32)]
        values = unpack(part, packing.order, packing.bits, last - first, n_columns).to(scales.dtype)
        at = row_scale[first:last, None], column_scale[None]
        zero = packing.offset if zeros is None else zeros[at].to(scales.dtype)
        out[first:last] = (values - zero) * scales[at]


def reference_dequantize_blocks(blocks: Tensor, name: str, out: Tensor) -> None:
    """Compute `dequantize_blocks` in chunks of rows by transformers' code.

    That code copies tables to the GPU at each call and therefore cannot be captured.
    """
    if blocks.is_cuda and torch.cuda.is_current_stream_capturing():
        raise extension.NotCapturable
    step = max(REFERENCE_WEIGHTS // max(out.shape[1], 1), 1)
    for first in range(0, len(out), step):
        part = blocks[first : first + step].contiguous().view(-1, BLOCKS[name].size)
        if name in ("Q5_0", "Q5_1"):
            values = _five_bits(part, name)
        else:
            from transformers.integrations.gguf import dequant  # imports in 0.3 s

            values = dequant.dequantize(part, BLOCKS[name].number, torch.float32)
        out[first : first + step] = values.view(-1, out.shape[1])


def _five_bits(blocks: Tensor, name: str) -> Tensor:
    """Dequantise Q5_0 and Q5_1, missing in transformers: low bits in nibbles, fifth bits apart."""
    scale = blocks[:, :2].view(torch.float16).float()
    code = blocks[:, -16:]
    fifth = blocks[:, -20:-16, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
    codes = torch.cat((code & 15, code >> 4), 1) | fifth.view(-1, 32) << 4
    if name == "Q5_0":
        return scale * (codes.float() - 16)
    return scale * codes.float() + blocks[:, 2:4].view(torch.float16).float()
