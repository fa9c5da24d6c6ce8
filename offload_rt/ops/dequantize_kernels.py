"""Dequantising on a CPU: bit for bit what `reference_dequantize` computes, one row at a time in float32, rows dealt to threads.

A product of a code of at most 8 bits and a scale of 16 is exact in float32, so rounding it to the dtype of the scales gives
what a product in that dtype gives. numba knows neither float16 nor bfloat16: both are made of bits here.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from offload_rt.ops.dequantize import AWQ_NIBBLES, E2M1, IQ4
from offload_rt.packing import KERNEL_BLOCKS, NF4, ORDERS, Packing
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
    scale = scales.float().contiguous().numpy()
    zero = np.full_like(scale, packing.offset) if zeros is None else zeros.float().contiguous().numpy()
    places = np.empty(0, np.int32) if groups is None else groups.numpy()
    rounded, written = _ROUNDING[scales.dtype], _ROUNDING[out.dtype]
    rounded = rounded if rounded != written else _NOTHING
    bytes, target = codes.contiguous().view(torch.uint8).view(-1).numpy(), _target(out)
    n_groups, size = scale.shape[-1], packing.block[1]
    is_plain = packing.block[0] == 1 and size % 8 == 0 and n_groups * size == out.shape[1] and groups is None
    has_pairs = kind == _E2M1 or (kind, packing.bits) == (_ROWS, 4)
    if is_plain and has_pairs and rounded == _NOTHING and written != _NOTHING:
        pairs, halves = (one.reshape(-1, size // 2) for one in (bytes, target.view(np.uint32)))
        form = kind == _E2M1, written == _HALF

        def compute(first: int, last: int) -> None:
            own = slice(first * n_groups, last * n_groups)
            _dequantize_pairs(pairs[own], scale.reshape(-1)[own], zero.reshape(-1)[own], form, halves[own])
    else:
        numbers, row_nbytes = (kind, packing.bits, *packing.block, rounded, written), len(bytes) // max(len(codes), 1)

        def compute(first: int, last: int) -> None:
            _dequantize((first, last), bytes, row_nbytes, scale, zero, places, numbers, target)

    _deal_rows(compute, out)


def dequantize_blocks_on_cpu(blocks: Tensor, name: str, out: Tensor) -> None:
    """See `dequantize_blocks`; a type with a kernel, out of float16, bfloat16 or float32."""
    kind, own = list(KERNEL_BLOCKS).index(name), KERNEL_BLOCKS[name]
    minimum = own.scale if own.minimum is None else own.minimum  # one that is not used
    numbers = (kind, own.n, own.size, own.group, own.scale, minimum, _ROUNDING[out.dtype])
    bytes, target = blocks.contiguous().numpy(), _target(out)
    _deal_rows(lambda first, last: _dequantize_blocks((first, last), bytes, numbers, target), out)


def _target(out: Tensor) -> np.ndarray:
    """Where numbers are written: as they are, or as uint16."""
    return out.numpy() if out.dtype == torch.float32 else out.view(torch.int16).numpy().view(np.uint16)


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
def _dequantize_pairs(codes, scales, zeros, form, out):  # type: ignore[no-untyped-def]  # numba infers the types
    """Codes of 4 bits, two in a byte, to two numbers of 16 bits in a word; codes, out (groups, n / 2)."""
    is_e2m1, is_half = form
    for g in range(len(codes)):
        scale, zero = scales[g], zeros[g]
        for i in range(codes.shape[1]):
            first, second = codes[g, i] & np.uint8(15), codes[g, i] >> np.uint8(4)
            if is_e2m1:
                low, high = _e2m1(first) * scale, _e2m1(second) * scale
            else:
                low, high = (np.float32(np.int32(first)) - zero) * scale, (np.float32(np.int32(second)) - zero) * scale
            if is_half:
                out[g, i] = _half(low) | _half(high) << np.uint32(16)
            else:
                out[g, i] = _bfloat16(low) | _bfloat16(high) << np.uint32(16)


@compiled()
def _e2m1(code):  # type: ignore[no-untyped-def]  # numba infers the types
    """Exponent and mantissa where float32 has them, and its bias; the two below 1 are halves."""
    size, sign = np.uint32(code & np.uint8(7)), np.uint32(code >> np.uint8(3)) << np.uint32(31)
    moved = np.uint32(np.uint32(size << np.uint32(22)) + np.uint32(126 << 23))
    moved = np.uint32(size * np.uint32(0x3F000000)) if size < np.uint32(2) else moved  # 0 or 0.5
    return np.uint32(moved | sign).view(np.float32)


@compiled(nogil=True)
def _dequantize(rows, codes, row_nbytes, scales, zeros, groups, numbers, out):  # type: ignore[no-untyped-def]  # numba infers the types
    kind, bits, block_rows, block_columns, rounded, written = numbers
    groups_rows = kind in (_COLUMNS, _AWQ)
    values, places = np.empty(out.shape[1], np.float32), groups[: 0 if groups_rows else len(groups)]
    for row in range(*rows):
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
            for i in range(len(values)):
                values[i] = np.uint32(_bfloat16(values[i]) << np.uint32(16)).view(np.float32)
        elif rounded == _HALF:
            for i in range(len(values)):
                values[i] = _from_half(_half(values[i]))
        _write(values, written, out[row])


@compiled()
def _write(values, written, out):  # type: ignore[no-untyped-def]  # numba infers the types
    for i in range(len(values)):
        if written == _BFLOAT16:
            out[i] = _bfloat16(values[i])
        elif written == _HALF:
            out[i] = _half(values[i])
        else:
            out[i] = values[i]


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
        for j in range(len(scales)):
            zero, scale, own = zeros[j], scales[j], values[j * block : (j + 1) * block]
            for i in range(len(own)):
                own[i] = (own[i] - zero) * scale


@compiled()
def _unpack_row(codes, bits, values):  # type: ignore[no-untyped-def]  # numba infers the types
    n = len(values)
    if bits == 8:
        for i in range(n):
            values[i] = np.float32(codes[i])
        return
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
        for i in range(n):
            # e4m3fn: exponent and mantissa where float32 has them, and its bias; subnormal numbers are whole ones of 2^-9.
            size = np.uint32(codes[i] & np.uint8(0x7F))
            moved = np.uint32(np.uint32(size << np.uint32(20)) + np.uint32(120 << 23))
            moved = np.uint32(0x7FC00000) if size == np.uint32(0x7F) else moved
            value = np.uint32(moved).view(np.float32)
            value = np.float32(np.int32(size)) * np.float32(2.0**-9) if size < np.uint32(8) else value
            values[i] = -value if codes[i] >= np.uint8(0x80) else value


@compiled()
def _unpack_columns(words, row, bits, is_awq, values):  # type: ignore[no-untyped-def]  # numba infers the types
    n = len(values)
    if is_awq:  # these words are those of the row alone
        for i in range(n):
            values[i] = np.float32(np.int32(words[i // 8] >> np.uint32(4 * _NIBBLES[i % 8]) & np.uint32(15)))
        return
    at, shift, mask = row * bits // 32 * n, np.uint32(row * bits % 32), np.uint32((1 << bits) - 1)
    own, above = words[at : at + n], np.uint32(32) - shift
    for i in range(n):
        values[i] = np.float32(np.int32(np.uint32(own[i] >> shift) & mask))
    if shift + bits > 32:  # the code ends in the next word
        more = words[at + n : at + 2 * n]
        for i in range(n):
            code = np.uint32(own[i] >> shift) | np.uint32(more[i] << above)
            values[i] = np.float32(np.int32(code & mask))


@compiled()
def _bfloat16(x):  # type: ignore[no-untyped-def]  # numba infers the types
    """The bits of a float32 as bfloat16, rounded to even; what is not said to be of 32 bits here is of 64."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(bits >> np.uint32(16) & np.uint32(1))
    return np.uint32(np.uint32(bits + odd + np.uint32(0x7FFF)) >> np.uint32(16))


@compiled()
def _half(x):  # type: ignore[no-untyped-def]  # numba infers the types
    """The bits of a float32 as float16, rounded to even."""
    bits = np.float32(x).view(np.uint32)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32(size >> np.uint32(13) & np.uint32(1))
    half = np.uint32(np.uint32(np.uint32(size + odd + np.uint32(0xFFF)) >> np.uint32(13)) - np.uint32(112 << 10))
    # The last bit of 0.5 and more is 2^-24, as that of the subnormal numbers of float16.
    small = np.uint32(np.float32(abs(x) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000))
    half = small if size < np.uint32(0x38800000) else half
    half = np.uint32(0x7C00) if size >= np.uint32(0x477FF000) else half
    half = np.uint32(0x7E00) if size > np.uint32(0x7F800000) else half
    return np.uint32(half | bits >> np.uint32(16) & np.uint32(0x8000))


@compiled()
def _from_half(half):  # type: ignore[no-untyped-def]  # numba infers the types
    size = np.uint32(half & np.uint32(0x7FFF))
    moved = np.uint32(size << np.uint32(13))
    # Infinity and NaN: an exponent that stays one when it is scaled.
    moved = np.uint32(moved | np.uint32(0x7F800000)) if size >= np.uint32(0x7C00) else moved
    sign = np.uint32(half & np.uint32(0x8000)) << np.uint32(16)
    return np.uint32(moved | sign).view(np.float32) * np.float32(2.0**112)


@compiled(nogil=True)
def _dequantize_blocks(rows, blocks, numbers, out):  # type: ignore[no-untyped-def]  # numba infers the types
    kind, n, size, group, scale_at, minimum_at, written = numbers
    n_blocks, n_groups = out.shape[1] // n, out.shape[1] // group
    values, heads = np.empty(out.shape[1], np.float32), np.empty(2 * n_blocks, np.float32)
    scales, minima = np.empty(n_groups, np.float32), np.zeros(n_groups, np.float32)
    codes, groups = values.reshape(n_blocks, n), values.reshape(n_groups, group)
    of_block = scales.reshape(n_blocks, n // group), minima.reshape(n_blocks, n // group)
    for row in range(*rows):
        own = blocks[row].reshape(n_blocks, size)
        for i in range(n_blocks):
            for k, at in enumerate((scale_at, minimum_at)):
                heads[2 * i + k] = _from_half(np.uint32(own[i, at]) | np.uint32(own[i, at + 1]) << np.uint32(8))
        _block_codes(own, kind, codes)
        _block_scales(own, kind, heads, *of_block)
        for j in range(n_groups):
            # The product is exact in float32; the difference is rounded once.
            for k in range(group):
                groups[j, k] = groups[j, k] * scales[j] - minima[j]
        _write(values, written, out[row])


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
            codes, pair = own[i, first : first + width], values[i, 2 * first : 2 * first + 2 * width]
            low, high = pair[:width], pair[width:]
            for k in range(width):
                low[k] = np.float32(np.int32(codes[k] & np.uint8(15))) - less
                high[k] = np.float32(np.int32(codes[k] >> np.uint8(4))) - less


@compiled()
def _add_pairs(own, factor, values):  # type: ignore[no-untyped-def]  # numba infers the types
    """The four pairs of bits of 32 bytes, low ones first, and so on."""
    for i in range(len(own)):
        for j in range(8):
            shift, codes, sums = np.uint8(j % 4 * 2), own[i, j // 4 * 32 :], values[i, 32 * j :]
            for k in range(32):
                sums[k] += factor * np.float32(np.int32(codes[k] >> shift & np.uint8(3)))


@compiled()
def _add_bits(own, factor, values):  # type: ignore[no-untyped-def]  # numba infers the types
    """The eight bits of 32 bytes, low ones first."""
    for i in range(len(own)):
        for j in range(8):
            sums = values[i, 32 * j :]
            for k in range(32):
                sums[k] += factor * np.float32(np.int32(own[i, k] >> np.uint8(j) & np.uint8(1)))


@compiled()
def _add_fifth(own, values):  # type: ignore[no-untyped-def]  # numba infers the types
    """The bits of four bytes, each byte's low ones first."""
    for i in range(len(own)):
        for j in range(4):
            for k in range(8):
                values[i, 8 * j + k] += np.float32(16) * np.float32(own[i, j] >> np.uint8(k) & np.uint8(1))
