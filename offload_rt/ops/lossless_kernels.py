"""Lossless weights by numba, see `offload_rt.ops.lossless`: encoding, and decoding where no C++ was built."""

import numpy as np

from offload_rt.ops.lossless import BLOCK, FLOAT, GROUP, HALF
from offload_rt.system.numba_cache import compiled

_LANES = 64
_PRIME, _PRIME64 = np.uint32(0x9E3779B1), np.uint64(0x9E3779B97F4A7C15)
_ONES, _BITS, _SEVENS = np.uint64(0x0101010101010101), np.uint64(0x8040201008040201), np.uint64(0x7F7F7F7F7F7F7F7F)
# The place of the lowest bit: of its product with a de Bruijn sequence, the upper six bits name it.
_SEQUENCE = np.uint64(0x03F79D71B4CB0A89)
_PLACES = np.zeros(64, np.int64)
_PLACES[[(0x03F79D71B4CB0A89 << i) % (1 << 64) >> 58 for i in range(64)]] = np.arange(64)


@compiled(nogil=True)
def digest(part):  # type: ignore[no-untyped-def]  # numba infers the types
    """See `lossless.digest`."""
    lanes = np.empty(_LANES, np.uint32)
    for i in range(_LANES):
        lanes[i] = _PRIME * np.uint32(i + 1)
    size = 4 * _LANES
    n_whole = len(part) // size * size
    last = np.zeros(size, np.uint8)
    last[: len(part) - n_whole] = part[n_whole:]
    _mix(part[:n_whole].view(np.uint32), lanes)
    if n_whole < len(part):
        _mix(last.view(np.uint32), lanes)
    total = np.uint64(len(part))
    for i in range(_LANES):
        total = (total ^ np.uint64(lanes[i])) * _PRIME64
        total ^= total >> np.uint64(29)
    return total


@compiled()
def _mix(words, lanes):  # type: ignore[no-untyped-def]  # numba infers the types
    for at in range(0, len(words), _LANES):
        for i in range(_LANES):
            mixed = lanes[i] ^ words[at + i]
            lanes[i] = (mixed << np.uint32(13) | mixed >> np.uint32(19)) * _PRIME


@compiled()
def _other(word, is_half):  # type: ignore[no-untyped-def]  # numba infers the types
    """The bits of a word that are neither sign nor kept mantissa."""
    if is_half:
        return (word >> 7 & 0xF8) | (word & 7)
    return word >> 7 & 0xFF


@compiled(nogil=True)
def count_others(words, is_half):  # type: ignore[no-untyped-def]  # numba infers the types
    """See `lossless.count_others`."""
    counts = np.zeros((4, 256), np.int64)  # four, for neighbours are often equal, and adding to one place takes turns
    for i in range(len(words)):
        counts[i & 3, _other(np.int64(words[i]), is_half)] += 1
    return counts.sum(axis=0)


@compiled(nogil=True)
def encode(words, is_half, out):  # type: ignore[no-untyped-def]  # numba infers the types
    """See `lossless.encode`."""
    n, n_groups = len(words), -(-len(words) // GROUP)
    n_blocks = -(-n // BLOCK)
    starts, escapes = out[8 : 12 + 4 * n_blocks].view(np.uint32), out[12 + 4 * n_blocks :]
    codes = np.zeros(256, np.uint8)
    for k in range(1, 8):
        codes[out[k]] = k
    signs = out[len(out) - 88 * n_groups :]
    planes = signs[GROUP * n_groups :].view(np.uint64)
    n_escapes = 0
    for g in range(n_groups):
        if g % (BLOCK // GROUP) == 0:
            starts[g // (BLOCK // GROUP)] = n_escapes
        a, b, c = np.uint64(0), np.uint64(0), np.uint64(0)
        first = g * GROUP
        for i in range(GROUP):
            word = np.int64(words[first + i]) if first + i < n else np.int64(0)
            kept = word >> 3 if is_half else word
            signs[first + i] = (word >> 8 & 0x80) | (kept & 0x7F)
            other = _other(word, is_half)
            code = codes[other] if first + i < n else np.uint8(1)
            if code == 0:
                escapes[n_escapes] = other
                n_escapes += 1
            a |= np.uint64(code & 1) << np.uint64(i)
            b |= np.uint64(code >> 1 & 1) << np.uint64(i)
            c |= np.uint64(code >> 2) << np.uint64(i)
        planes[3 * g], planes[3 * g + 1], planes[3 * g + 2] = a, b, c
    starts[n_blocks] = n_escapes


@compiled(nogil=True)
def decode(chunk, kind, n, out):  # type: ignore[no-untyped-def]  # numba infers the types
    """See `lossless.decode`; kinds but RAW."""
    n_groups, n_blocks = -(-n // GROUP), -(-n // BLOCK)
    starts, escapes = chunk[8 : 12 + 4 * n_blocks].view(np.uint32), chunk[12 + 4 * n_blocks :]
    signs = chunk[len(chunk) - 88 * n_groups :]
    planes = signs[GROUP * n_groups :].view(np.uint64)
    others, words = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint16)
    n_escapes = 0
    # A block at a time: what views and slices cost is shared by all of it, and loops over it are vectorised.
    for block in range(n_blocks):
        if starts[block] != n_escapes:
            return False
        first, last = block * BLOCK, min((block + 1) * BLOCK, n)
        own = planes[3 * (first // GROUP) : 3 * -(-last // GROUP)]
        n_escapes = _others(own, chunk[:8], escapes, n_escapes, others)
        if kind == FLOAT:
            _assemble(signs[first:last], others, False, words)
            wide = out[4 * first : 4 * last].view(np.uint32)
            for i in range(len(wide)):
                wide[i] = np.uint32(words[i]) << np.uint32(16)
        else:
            _assemble(signs[first:last], others, kind == HALF, out[2 * first : 2 * last].view(np.uint16))
    return starts[n_blocks] == n_escapes and n_escapes <= len(escapes) - 88 * n_groups


@compiled()
def _others(planes, table, escapes, n_escapes, others):  # type: ignore[no-untyped-def]  # numba infers the types
    """The other bits of the weights of these planes; returns the escapes up to here."""
    codes = np.empty(BLOCK // 8, np.uint64)
    for g in range(len(planes) // 3):
        a, b, c = planes[3 * g], planes[3 * g + 1], planes[3 * g + 2]
        for i in range(8):
            shift = np.uint64(8 * i)
            eight = _spread(a >> shift) | _spread(b >> shift) << np.uint64(1) | _spread(c >> shift) << np.uint64(2)
            codes[8 * g + i] = eight
    _look_up(codes.view(np.uint8), table, others)
    for g in range(len(planes) // 3):
        left = ~(planes[3 * g] | planes[3 * g + 1] | planes[3 * g + 2])
        while left:
            lowest = left & (~left + np.uint64(1))
            others[GROUP * g + _PLACES[lowest * _SEQUENCE >> np.uint64(58)]] = escapes[n_escapes]
            n_escapes += 1
            left ^= lowest
    return n_escapes


@compiled()
def _look_up(codes, table, others):  # type: ignore[no-untyped-def]  # numba infers the types
    """What each code stands for, by comparisons: these are vectorised, looking up is not."""
    one, two, three, four, five, six, seven = table[1], table[2], table[3], table[4], table[5], table[6], table[7]
    none = np.uint8(0)
    for i in range(len(codes)):
        code = codes[i]
        low = (one if code == 1 else none) | (two if code == 2 else none) | (three if code == 3 else none)
        high = (five if code == 5 else none) | (six if code == 6 else none) | (seven if code == 7 else none)
        others[i] = low | (four if code == 4 else none) | high


@compiled()
def _spread(bits):  # type: ignore[no-untyped-def]  # numba infers the types
    """Bit i of the lowest byte to byte i."""
    apart = (bits & np.uint64(0xFF)) * _ONES & _BITS
    return (apart + _SEVENS) >> np.uint64(7) & _ONES


@compiled()
def _assemble(kept, others, is_half, words):  # type: ignore[no-untyped-def]  # numba infers the types
    """Words of signs and mantissas, and of the other bits."""
    if is_half:
        for i in range(len(kept)):
            sign, other = np.uint16(kept[i]), np.uint16(others[i])
            top = (sign & np.uint16(0x80)) << np.uint16(8) | (other & np.uint16(0xF8)) << np.uint16(7)
            words[i] = top | (sign & np.uint16(0x7F)) << np.uint16(3) | other & np.uint16(7)
    else:
        for i in range(len(kept)):
            sign, other = np.uint16(kept[i]), np.uint16(others[i])
            words[i] = (sign & np.uint16(0x80)) << np.uint16(8) | other << np.uint16(7) | sign & np.uint16(0x7F)
