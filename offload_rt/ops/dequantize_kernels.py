"""Dequantising on a CPU: bit for bit what `reference_dequantize` computes, one row at a time in float32, rows dealt to threads.

A product of a code of at most 8 bits and a scale of 16 is exact in float32, so rounding it to the dtype of the scales gives
what a product in that dtype gives. numba knows neither float16 nor bfloat16: both are made of bits here.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from offload_rt.ops.dequantize import AWQ_NIBBLES, E2M1, IQ4, KERNEL_BLOCKS, NF4, ORDERS, Packing
from offload_rt.system.numba_cache import compiled

_ROWS, _COLUMNS, _AWQ, _INT8, _E2M1, _NF4, _FLOAT8 = range(7)  # as ORDERS
_NOTHING, _HALF, _BFLOAT16 = range(3)
_ROUNDING = {torch.float32: _NOTHING, torch.float16: _HALF, torch.bfloat16: _BFLOAT16}
# Starting a thread takes as long as a tenth of so many weights.
_LEAST_PER_THREAD = 1 << 20
_TABLES = np.array((E2M1, NF4), np.float32)
_NIBBLES = np.array(AWQ_NIBBLES, np.int64)
_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0, _Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K, _IQ4_NL, _IQ4_XS = range(12)  # as KERNEL_BLOCKS
_LEVELS = np.array(IQ4, np.float32)


def dequantize_on_cpu(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, packing: Packing, out: Tensor
) -> None:
    """See `dequantize`; scales and out of float16, bfloat16 or float32."""
    kind = _FLOAT8 if codes.dtype == torch.float8_e4m3fn else ORDERS.index(packing.order)
    written, narrow, wide = _target(out)
    scale = scales.float().contiguous().numpy()
    zero = np.full_like(scale, packing.offset) if zeros is None else zeros.float().contiguous().numpy()
    places = np.empty(0, np.int32) if groups is None else groups.numpy()
    rounded = _ROUNDING[scales.dtype]
    numbers = (kind, packing.bits, *packing.block, rounded if rounded != written else _NOTHING, written)
    bytes = codes.contiguous().view(torch.uint8).view(-1).numpy()
    row_nbytes = len(bytes) // max(len(codes), 1)

    def compute(first: int, last: int) -> None:
        rows = first, last, out.shape[1]
        _dequantize(rows, bytes, row_nbytes, scale, zero, places, numbers, narrow, wide)

    _deal_rows(compute, out)


def dequantize_blocks_on_cpu(blocks: Tensor, name: str, out: Tensor) -> None:
    """See `dequantize_blocks`; a type with a kernel, out of float16, bfloat16 or float32."""
    written, narrow, wide = _target(out)
    kind, own = list(KERNEL_BLOCKS).index(name), KERNEL_BLOCKS[name]
    minimum = own.scale if own.minimum is None else own.minimum  # one that is not used
    numbers = (kind, own.n, own.size, own.group, own.scale, minimum, written)
    bytes = blocks.contiguous().numpy()

    def compute(first: int, last: int) -> None:
        _dequantize_blocks((first, last, out.shape[1]), bytes, numbers, narrow, wide)

    _deal_rows(compute, out)


def _target(out: Tensor) -> tuple[int, np.ndarray, np.ndarray]:
    """How to round to `out`, and where to write it in 16 bits, and in 32; one of them is empty."""
    written = _ROUNDING[out.dtype]
    if written == _NOTHING:
        return written, np.empty((0, 0), np.uint16), out.numpy()
    return written, out.view(torch.int16).numpy().view(np.uint16), np.empty((0, 0), np.float32)


def _deal_rows(compute: Callable[[int, int], None], out: Tensor) -> None:
    """Let threads compute rows from the first to before the last."""
    n_threads = max(min(torch.get_num_threads(), out.numel() // _LEAST_PER_THREAD), 1)
    if n_threads == 1:
        compute(0, len(out))
        return
    bounds = [len(out) * i // n_threads for i in range(n_threads + 1)]
    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(compute, bounds[:-1], bounds[1:]))


@compiled(nogil=True)
def _dequantize(rows, codes, row_nbytes, scales, zeros, groups, numbers, narrow, wide):  # type: ignore[no-untyped-def]  # numba infers the types
    kind, bits, block_rows, block_columns, rounded, written = numbers
    first, last, n_columns = rows
    groups_rows = kind in (_COLUMNS, _AWQ)
    values, spare = np.empty(n_columns, np.float32), np.empty(n_columns, np.float32)
    halves, places = np.empty(n_columns, np.uint16), groups[: 0 if groups_rows else len(groups)]
    for row in range(first, last):
        own = codes if kind == _COLUMNS else codes[row * row_nbytes : (row + 1) * row_nbytes]
        if kind == _ROWS:
            _unpack_row(own, bits, values)
        elif groups_rows:
            _unpack_columns(own.view(np.uint32), row, bits, kind == _AWQ, values)
        else:
            _unpack_bytes(own, kind, values)
        at = groups[row] if groups_rows and len(groups) else row // block_rows
        _scale(values, zeros[at], scales[at], places, block_columns)
        if rounded == _BFLOAT16:
            _to_bfloat16(values, halves)
            _from_bfloat16(halves, values)
        elif rounded == _HALF:
            _to_half(values, spare, halves)
            _from_half(halves, values)
        _write(values, spare, row, written, narrow, wide)


@compiled()
def _write(values, spare, row, written, narrow, wide):  # type: ignore[no-untyped-def]  # numba infers the types
    if written == _BFLOAT16:
        _to_bfloat16(values, narrow[row])
    elif written == _HALF:
        _to_half(values, spare, narrow[row])
    else:
        wide[row] = values


@compiled()
def _scale(values, zeros, scales, places, block):  # type: ignore[no-untyped-def]  # numba infers the types
    """values <- (value - zero) * scale; places (n,) says which of them, or else each serves `block` values."""
    n = len(values)
    if len(places):
        for i in range(n):
            values[i] = (values[i] - zeros[places[i]]) * scales[places[i]]
    elif block == 1:
        for i in range(n):
            values[i] = (values[i] - zeros[i]) * scales[i]
    else:
        for j in range(0, n, block):
            zero, scale = zeros[j // block], scales[j // block]
            for i in range(j, min(j + block, n)):
                values[i] = (values[i] - zero) * scale


@compiled()
def _unpack_row(codes, bits, values):  # type: ignore[no-untyped-def]  # numba infers the types
    n = len(values)
    if bits == 4:
        for i in range(n // 2):
            values[2 * i] = np.float32(codes[i] & np.uint8(15))
            values[2 * i + 1] = np.float32(codes[i] >> np.uint8(4))
        if n % 2:
            values[n - 1] = np.float32(codes[n // 2] & np.uint8(15))
    elif bits == 8:
        for i in range(n):
            values[i] = np.float32(codes[i])
    else:
        words = codes.view(np.uint32)
        for i in range(n):
            word, shift = i * bits // 32, i * bits % 32
            code = words[word] >> np.uint32(shift)
            if shift + bits > 32:  # the code ends in the next word
                code |= words[word + 1] << np.uint32(32 - shift)
            values[i] = np.float32(code & np.uint32((1 << bits) - 1))


@compiled()
def _unpack_bytes(codes, kind, values):  # type: ignore[no-untyped-def]  # numba infers the types
    n = len(values)
    if kind == _INT8:
        signed = codes.view(np.int8)
        for i in range(n):
            values[i] = np.float32(signed[i])
    elif kind in (_E2M1, _NF4):
        table, first = kind - _E2M1, 4 * (kind - _E2M1)  # the shift of the first of two columns
        for i in range(n):
            values[i] = _TABLES[table, codes[i // 2] >> np.uint8(first ^ 4 * (i % 2)) & np.uint8(15)]
    else:
        _unpack_float8(codes, values)


@compiled()
def _unpack_columns(words, row, bits, is_awq, values):  # type: ignore[no-untyped-def]  # numba infers the types
    n = len(values)
    if is_awq:  # these words are those of the row alone
        for i in range(n):
            values[i] = np.float32(words[i // 8] >> np.uint32(4 * _NIBBLES[i % 8]) & np.uint32(15))
        return
    first, shift = row * bits // 32 * n, np.uint32(row * bits % 32)
    mask = np.uint32((1 << bits) - 1)
    for i in range(n):
        values[i] = np.float32((words[first + i] >> shift) & mask)
    if shift + bits > 32:  # the code ends in the next word
        above = np.uint32(32) - shift
        for i in range(n):
            code = (words[first + i] >> shift) | (words[first + n + i] << above)
            values[i] = np.float32(code & mask)


@compiled()
def _unpack_float8(codes, values):  # type: ignore[no-untyped-def]  # numba infers the types
    """e4m3fn: moved to where float32 has exponent and mantissa, and scaled by the difference of the biases; exact."""
    bits = values.view(np.uint32)
    for i in range(len(values)):
        code = np.uint32(codes[i])
        size = code & np.uint32(0x7F)
        moved = (code & np.uint32(0x80)) << np.uint32(24) | size << np.uint32(20)
        bits[i] = np.uint32(0x7FC00000) if size == np.uint32(0x7F) else moved
    for i in range(len(values)):
        values[i] *= np.float32(2.0**120)


@compiled()
def _to_bfloat16(values, halves):  # type: ignore[no-untyped-def]  # numba infers the types
    """The bits of `values` as bfloat16, rounded to even."""
    bits = values.view(np.uint32)
    for i in range(len(values)):
        odd = bits[i] >> np.uint32(16) & np.uint32(1)
        halves[i] = np.uint16((bits[i] + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@compiled()
def _from_bfloat16(halves, values):  # type: ignore[no-untyped-def]  # numba infers the types
    bits = values.view(np.uint32)
    for i in range(len(values)):
        bits[i] = np.uint32(halves[i]) << np.uint32(16)


@compiled()
def _to_half(values, spare, halves):  # type: ignore[no-untyped-def]  # numba infers the types
    """The bits of `values` as float16, rounded to even; `spare` is written."""
    bits, sums = values.view(np.uint32), spare.view(np.uint32)
    for i in range(len(values)):
        # The last bit of 0.5 and more is 2^-24, as that of the subnormal numbers of float16.
        spare[i] = abs(values[i]) + np.float32(0.5)
    for i in range(len(values)):
        size = bits[i] & np.uint32(0x7FFFFFFF)
        odd = size >> np.uint32(13) & np.uint32(1)
        half = ((size + np.uint32(0xFFF) + odd) >> np.uint32(13)) - np.uint32(112 << 10)
        half = sums[i] - np.uint32(0x3F000000) if size < np.uint32(0x38800000) else half
        half = np.uint32(0x7C00) if size >= np.uint32(0x477FF000) else half
        half = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else half
        halves[i] = np.uint16(half | bits[i] >> np.uint32(16) & np.uint32(0x8000))


@compiled()
def _from_half(halves, values):  # type: ignore[no-untyped-def]  # numba infers the types
    bits = values.view(np.uint32)
    for i in range(len(values)):
        half = np.uint32(halves[i])
        size = half & np.uint32(0x7FFF)
        moved = size << np.uint32(13)
        # Infinity and NaN: an exponent that stays one when it is scaled.
        moved = moved | np.uint32(0x7F800000) if size >= np.uint32(0x7C00) else moved
        bits[i] = moved | (half & np.uint32(0x8000)) << np.uint32(16)
    for i in range(len(values)):
        values[i] *= np.float32(2.0**112)


@compiled(nogil=True)
def _dequantize_blocks(rows, blocks, numbers, narrow, wide):  # type: ignore[no-untyped-def]  # numba infers the types
    first, last, n_columns = rows
    kind, n, size, group, scale_at, minimum_at, written = numbers
    n_blocks, n_groups = n_columns // n, n_columns // group
    values, spare = np.empty(n_columns, np.float32), np.empty(n_columns, np.float32)
    halves, heads = np.empty(2 * n_blocks, np.uint16), np.empty(2 * n_blocks, np.float32)
    scales, minima = np.empty(n_groups, np.float32), np.zeros(n_groups, np.float32)
    codes, groups = values.reshape(n_blocks, n), values.reshape(n_groups, group)
    of_block = scales.reshape(n_blocks, n // group), minima.reshape(n_blocks, n // group)
    for row in range(first, last):
        own = blocks[row].reshape(n_blocks, size)
        for i in range(n_blocks):
            halves[2 * i] = np.uint16(own[i, scale_at]) | np.uint16(own[i, scale_at + 1]) << np.uint16(8)
            halves[2 * i + 1] = np.uint16(own[i, minimum_at]) | np.uint16(own[i, minimum_at + 1]) << np.uint16(8)
        _from_half(halves, heads)
        _block_codes(own, kind, codes)
        _block_scales(own, kind, heads, *of_block)
        for j in range(n_groups):
            # The product is exact in float32; the difference is rounded once.
            for k in range(group):
                groups[j, k] = groups[j, k] * scales[j] - minima[j]
        _write(values, spare, row, written, narrow, wide)


@compiled()
def _block_codes(own, kind, values):  # type: ignore[no-untyped-def]  # noqa: PLR0912 # numba infers the types
    """The codes of each block, less what is subtracted from all; own (blocks, bytes), values (blocks, weights)."""
    if kind == _Q8_0:
        signed = own[:, 2:]
        for i in range(len(own)):
            for k in range(32):
                values[i, k] = np.float32(np.int8(signed[i, k]))
    elif kind in (_Q2_K, _Q3_K):
        values[:] = np.float32(0 if kind == _Q2_K else -4)
        _add_pairs(own[:, 16:80] if kind == _Q2_K else own[:, 32:96], np.float32(1), values)
        if kind == _Q3_K:
            _add_bits(own[:, :32], np.float32(4), values)
    elif kind in (_Q4_K, _Q5_K):
        _nibbles(own[:, own.shape[1] - 128 :], 32, np.float32(0), values)
        if kind == _Q5_K:
            _add_bits(own[:, 16:48], np.float32(16), values)
    elif kind == _Q6_K:
        _nibbles(own[:, :128], 64, np.float32(32), values)
        _add_pairs(own[:, 128:192], np.float32(16), values)
    else:
        less = np.float32(8 if kind == _Q4_0 else 16 if kind == _Q5_0 else 0)
        _nibbles(own[:, 8:] if kind == _IQ4_XS else own[:, own.shape[1] - 16 :], 16, less, values)
        if kind in (_Q5_0, _Q5_1):
            _add_fifth(own[:, own.shape[1] - 20 :], values)
        elif kind in (_IQ4_NL, _IQ4_XS):
            for i in range(len(own)):
                for k in range(values.shape[1]):
                    values[i, k] = _LEVELS[int(values[i, k])]


@compiled()
def _block_scales(own, kind, heads, scales, minima):  # type: ignore[no-untyped-def]  # noqa: PLR0912 # numba infers the types
    """What the codes of each group are multiplied with, and what is then subtracted; minima are zeros beforehand.

    heads (2 * blocks,): each block's scale and minimum; scales, minima (blocks, groups)
    """
    for b in range(len(own)):
        scale, minimum = heads[2 * b], heads[2 * b + 1]
        if kind in (_Q4_K, _Q5_K):
            for i in range(4):
                low, middle, high = own[b, 4 + i], own[b, 8 + i], own[b, 12 + i]
                scales[b, i], minima[b, i] = scale * np.float32(low & 63), minimum * np.float32(middle & 63)
                scales[b, i + 4] = scale * np.float32(high & 15 | low >> 6 << 4)
                minima[b, i + 4] = minimum * np.float32(high >> 4 | middle >> 6 << 4)
        elif kind == _Q2_K:
            for i in range(16):
                scales[b, i], minima[b, i] = scale * np.float32(own[b, i] & 15), minimum * np.float32(own[b, i] >> 4)
        elif kind == _Q3_K:
            for i in range(16):
                low = own[b, 96 + i % 8] >> (i // 8 * 4) & 15
                scales[b, i] = scale * np.float32((low | (own[b, 104 + i % 4] >> (i // 4 * 2) & 3) << 4) - 32)
        elif kind == _Q6_K:
            for i in range(16):
                scales[b, i] = scale * np.float32(np.int8(own[b, 192 + i]))
        elif kind == _IQ4_XS:
            for i in range(8):
                low, high = own[b, 4 + i // 2] >> (i % 2 * 4) & 15, own[b, 2 + i // 4] >> (i % 4 * 2) & 3
                scales[b, i] = scale * np.float32((low | high << 4) - 32)
        else:
            scales[b, 0] = scale
            if kind in (_Q4_1, _Q5_1):
                minima[b, 0] = -minimum


@compiled()
def _nibbles(own, width, less, values):  # type: ignore[no-untyped-def]  # numba infers the types
    """The low nibbles of `width` bytes, then their high ones, and so on; each less `less`."""
    for i in range(len(own)):
        for first in range(0, values.shape[1] // 2, width):
            for k in range(width):
                code = own[i, first + k]
                values[i, 2 * first + k] = np.float32(code & np.uint8(15)) - less
                values[i, 2 * first + width + k] = np.float32(code >> np.uint8(4)) - less


@compiled()
def _add_pairs(own, factor, values):  # type: ignore[no-untyped-def]  # numba infers the types
    """The four pairs of bits of 32 bytes, low ones first, and so on."""
    for i in range(len(own)):
        for j in range(8):
            shift = np.uint8(j % 4 * 2)
            for k in range(32):
                values[i, 32 * j + k] += factor * np.float32(own[i, j // 4 * 32 + k] >> shift & np.uint8(3))


@compiled()
def _add_bits(own, factor, values):  # type: ignore[no-untyped-def]  # numba infers the types
    """The eight bits of 32 bytes, low ones first."""
    for i in range(len(own)):
        for j in range(8):
            for k in range(32):
                values[i, 32 * j + k] += factor * np.float32(own[i, k] >> np.uint8(j) & np.uint8(1))


@compiled()
def _add_fifth(own, values):  # type: ignore[no-untyped-def]  # numba infers the types
    """The bits of four bytes, each byte's low ones first."""
    for i in range(len(own)):
        for j in range(4):
            for k in range(8):
                values[i, 8 * j + k] += np.float32(16) * np.float32(own[i, j] >> np.uint8(k) & np.uint8(1))
