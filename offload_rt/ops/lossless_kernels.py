"""Numba kernels of `offload_rt.ops.lossless`: encoding."""

import numpy as np

from offload_rt.packing import LOSSLESS_BLOCK as BLOCK
from offload_rt.packing import LOSSLESS_GROUP as GROUP
from offload_rt.system.numba_cache import compiled


@compiled()
def _other(word, is_half):  # type: ignore[no-untyped-def]  # numba infers the types
    if is_half:
        return (word >> 7 & 0xF8) | (word & 7)
    return word >> 7 & 0xFF


@compiled(nogil=True)
def count_others(words, is_half):  # type: ignore[no-untyped-def]  # numba infers the types
    """Count the high bytes: (256,) int64."""
    # Four tables: consecutive additions to the same address wait for each other.
    counts = np.zeros((4, 256), np.int64)
    for i in range(len(words)):
        counts[i & 3, _other(np.int64(words[i]), is_half)] += 1
    return counts.sum(axis=0)


@compiled(nogil=True)
def encode(words, is_half, out):  # type: ignore[no-untyped-def]  # numba infers the types
    """Compute `lossless.encode`."""
    n = len(words)
    n_groups = -(-n // GROUP)
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
            high = _other(word, is_half)
            code = codes[high] if first + i < n else np.uint8(1)
            if code == 0:
                escapes[n_escapes] = high
                n_escapes += 1
            a |= np.uint64(code & 1) << np.uint64(i)
            b |= np.uint64(code >> 1 & 1) << np.uint64(i)
            c |= np.uint64(code >> 2) << np.uint64(i)
        planes[3 * g] = a
        planes[3 * g + 1] = b
        planes[3 * g + 2] = c
    starts[n_blocks] = n_escapes
