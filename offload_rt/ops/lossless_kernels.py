"""Numba kernels of `offload_rt.ops.lossless`: encoding, and decoding without the C++ library."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from offload_rt.ops.lossless import BLOCK, FLOAT, GROUP, HALF
from offload_rt.system.numba_cache import compiled

_LANES = 64
_PRIME = np.uint32(0x9E3779B1)
_PRIME64 = np.uint64(0x9E3779B97F4A7C15)
_BYTES = ir.VectorType(ir.IntType(8), GROUP)
_MASK = ir.VectorType(ir.IntType(1), GROUP)


@compiled(nogil=True)
def digest(part):  # type: ignore[no-untyped-def]  # numba infers the types
    """Compute `lossless.digest`."""
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
    """Return the high byte of a word."""
    if is_half:
        return (word >> 7 & 0xF8) | (word & 7)
    return word >> 7 & 0xFF


@compiled(nogil=True)
def count_others(words, is_half):  # type: ignore[no-untyped-def]  # numba infers the types
    """Compute `lossless.count_others`."""
    # Four tables: consecutive additions to the same address wait for each other.
    counts = np.zeros((4, 256), np.int64)
    for i in range(len(words)):
        counts[i & 3, _other(np.int64(words[i]), is_half)] += 1
    return counts.sum(axis=0)


@compiled(nogil=True)
def encode(words, is_half, out):  # type: ignore[no-untyped-def]  # numba infers the types
    """Compute `lossless.encode`."""
    n = len(words)
    n_groups = -(-len(words) // GROUP)
    n_blocks = -(-n // BLOCK)
    starts = out[8 : 12 + 4 * n_blocks].view(np.uint32)
    escapes = out[12 + 4 * n_blocks :]
    codes = np.zeros(256, np.uint8)
    for k in range(1, 8):
        codes[out[k]] = k
    signs = out[len(out) - 88 * n_groups :]
    planes = signs[GROUP * n_groups :].view(np.uint64)
    n_escapes = 0
    for g in range(n_groups):
        if g % (BLOCK // GROUP) == 0:
            starts[g // (BLOCK // GROUP)] = n_escapes
        a = np.uint64(0)
        b = np.uint64(0)
        c = np.uint64(0)
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
        planes[3 * g] = a
        planes[3 * g + 1] = b
        planes[3 * g + 2] = c
    starts[n_blocks] = n_escapes


@compiled(nogil=True)
def decode(chunk, kind, n, out):  # type: ignore[no-untyped-def]  # numba infers the types
    """Compute `lossless.decode` for all kinds except RAW."""
    n_groups = -(-n // GROUP)
    n_blocks = -(-n // BLOCK)
    starts = chunk[8 : 12 + 4 * n_blocks].view(np.uint32)
    escapes = chunk[12 + 4 * n_blocks :]
    signs = chunk[len(chunk) - 88 * n_groups :]
    planes = signs[GROUP * n_groups :].view(np.uint64)
    others = np.empty(BLOCK, np.uint8)
    words = np.empty(BLOCK, np.uint16)
    n_escapes = 0
    # Process whole blocks, to amortize slices and to vectorise loops.
    for block in range(n_blocks):
        if starts[block] != n_escapes:
            return False
        first = block * BLOCK
        last = min((block + 1) * BLOCK, n)
        part = planes[3 * (first // GROUP) : 3 * -(-last // GROUP)]
        for g in range(len(part) // 3):
            a = part[3 * g]
            b = part[3 * g + 1]
            c = part[3 * g + 2]
            n_escapes += _look_up(a, b, c, chunk, escapes, n_escapes, others, GROUP * g)  # type: ignore[call-arg]
        if kind == FLOAT:
            _assemble(signs[first:last], others, False, words)
            wide = out[4 * first : 4 * last].view(np.uint32)
            for i in range(len(wide)):
                wide[i] = np.uint32(words[i]) << np.uint32(16)
        else:
            _assemble(
                signs[first:last], others, kind == HALF, out[2 * first : 2 * last].view(np.uint16)
            )
    return starts[n_blocks] == n_escapes and n_escapes <= len(escapes) - 88 * n_groups


@intrinsic
def _look_up(typing, a, b, c, table, escapes, n_escapes, others, at):  # type: ignore[no-untyped-def]  # numba gives types
    """Decode the high bytes of 64 weights to others[at:]; returns the number of escapes.

    Uses LLVM vector instructions unavailable in numba, with a plane as a mask.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        planes = args[:3]
        n_escapes = args[5]
        at = args[7]
        table, escapes, others = (
            context.make_array(signature.args[i])(context, builder, args[i]).data for i in (3, 4, 6)
        )
        none = ir.Constant(_BYTES, ir.Undefined)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), GROUP), [0] * GROUP)
        each = [builder.load(builder.gep(table, [ir.Constant(at.type, code)])) for code in range(8)]
        selected = [builder.insert_element(none, byte, ir.Constant(at.type, 0)) for byte in each]
        selected = [builder.shuffle_vector(vector, none, zeros) for vector in selected]
        for plane in planes:
            mask = builder.bitcast(plane, _MASK)
            pairs = zip(selected[1::2], selected[::2], strict=True)
            selected = [builder.select(mask, odd, even) for odd, even in pairs]
        left = builder.not_(builder.or_(builder.or_(*planes[:2]), planes[2]))
        load = ir.FunctionType(_BYTES, [escapes.type, _MASK, _BYTES])
        name = "llvm.masked.expandload.v64i8"
        load = cgutils.get_or_insert_function(builder.module, load, name)  # type: ignore[no-untyped-call]
        all = builder.call(
            load, [builder.gep(escapes, [n_escapes]), builder.bitcast(left, _MASK), *selected]
        )
        builder.store(all, builder.bitcast(builder.gep(others, [at]), _BYTES.as_pointer()), align=1)
        return builder.ctpop(left)

    return types.int64(a, b, c, table, escapes, n_escapes, others, at), generate


@compiled()
def _assemble(kept, others, is_half, words):  # type: ignore[no-untyped-def]  # numba infers the types
    """Combine low and high bytes into words."""
    for i in range(len(kept)):
        sign = np.uint16(kept[i])
        other = np.uint16(others[i])
        top = (sign & np.uint16(0x80)) << np.uint16(8)
        low = sign & np.uint16(0x7F)
        if is_half:
            words[i] = (
                top
                | (other & np.uint16(0xF8)) << np.uint16(7)
                | low << np.uint16(3)
                | other & np.uint16(7)
            )
        else:
            words[i] = top | other << np.uint16(7) | low
