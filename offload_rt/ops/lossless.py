"""Lossless encoding of weights: entry points; see `ops.lossless_reference` for the format."""

import numpy as np
from torch import Tensor

from offload_rt.ops import cpu, extension, lossless_reference
from offload_rt.ops.lossless_reference import FLOAT, HALF, RAW


def words_of(part: np.ndarray, kind: int) -> np.ndarray | None:
    """Return the 16-bit words of tensor bytes; None if RAW or with nonzero float32 low halves."""
    if kind != FLOAT:
        return None if kind == RAW else part.view(np.uint16)
    wide = part.view(np.uint32)
    return None if (wide & 0xFFFF).any() else (wide >> 16).astype(np.uint16)


def count_others(words: np.ndarray, kind: int) -> np.ndarray:
    """Count the high bytes: (256,) int64."""
    from offload_rt.ops import lossless_kernels  # numba takes a second to import

    counts: np.ndarray = lossless_kernels.count_others(words, kind == HALF)
    return counts


def n_escapes(counts: np.ndarray) -> int:
    """Return the number of weights without one of the seven most frequent high bytes."""
    return int(np.sort(counts)[:-7].sum())


def encode(words: np.ndarray, kind: int, out: np.ndarray) -> None:
    """Encode words (n,) uint16 into zeroed `out` (chunk_nbytes(n, escapes),) uint8."""
    from offload_rt.ops import lossless_kernels

    out[1:8] = np.argsort(count_others(words, kind))[-7:]
    lossless_kernels.encode(words, kind == HALF, out)


def digest(part: np.ndarray) -> int:
    """Compute a 64-bit checksum of dense (n,) uint8; detects any change within four bytes."""
    if (library := cpu.library()) is not None:
        return int(library.offload_rt_digest(part.ctypes.data, len(part)))
    return lossless_reference.digest(part)


def decode(chunk: np.ndarray, kind: int, n: int, out: np.ndarray) -> bool:
    """Decode n weights, or n bytes of a RAW chunk. Returns False for an inconsistent chunk.

    chunk  (nbytes,) uint8, at least `chunk_nbytes(n, 0)`, or n if RAW
    out    (bytes of the weights,) uint8, both dense
    """
    if kind == RAW:
        out[:n] = chunk[:n]
        return True
    if (library := cpu.library()) is not None:
        return bool(
            library.offload_rt_decode(
                chunk.ctypes.data, len(chunk), kind, n, out.ctypes.data, False
            )
        )
    return lossless_reference.decode(chunk, kind, n, out)


def decode_block(block: Tensor, n_chunks: int, out: Tensor) -> None:
    """Decode an encoded block on the current CUDA stream.

    block  (nbytes,) uint8, starts with `n_chunks` records of CHUNKS
    out    (nbytes,) uint8
    """
    extension.kernels().lossless_decode(block, n_chunks, out)


def is_compiled() -> bool:
    """Whether the C++ library decodes on a CPU, instead of numpy."""
    return cpu.library() is not None
