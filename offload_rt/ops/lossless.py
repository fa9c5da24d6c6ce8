"""Lossless weights: 16 bits in about 11.3, decoded at the speed of a copy.

The format follows TCA-TBE of ZipServ (arXiv 2603.17435). A tensor is divided into chunks of CHUNK
weights. A word of 16 bits consists of a low byte (sign and kept mantissa) and a high byte:

  bfloat16  the exponent
  float16   the exponent and the last three bits of the mantissa, zero after a conversion from
            bfloat16
  float32   the upper half as bfloat16; a tensor with a nonzero lower half is not encoded

A 3-bit code replaces the high byte. Codes 1 to 7 select the seven most frequent bytes. Code 0 is an
escape, and the byte follows in a stream. A chunk of n weights, little-endian:

  table      8 bytes: value of each code, the first is 0
  starts     (n / BLOCK + 1,) uint32, rounded up: number of escapes before each block, and the total
  escapes    bytes in weight order, zeros up to a multiple of 8
  signs      64 bytes for each 64 weights: sign, and the upper 7 bits of the mantissa
  planes     3 x uint64 for each 64 weights: bit i of all codes

Blocks of BLOCK weights are decoded independently. A damaged chunk cannot cause reads outside the
chunk, because the data after the escapes exceeds the maximum number of escapes. Chunks of tensors
without encoding contain the raw bytes, zeros up to a multiple of 8.
"""

import numpy as np
from torch import Tensor

from offload_rt.dtypes import DType
from offload_rt.ops import cpu, extension

CHUNK = 1 << 19
BLOCK = 1 << 12
GROUP = 64
RAW, BFLOAT16, HALF, FLOAT = range(4)
KIND_OF = {DType.BFLOAT16: BFLOAT16, DType.FLOAT16: HALF, DType.FLOAT32: FLOAT}

# A chunk: byte offsets in the encoded and the decoded block, number of weights (bytes if RAW).
CHUNKS = np.dtype("<i8, <i8, <i4, <i4, <i8")
CHUNKS.names = ("source", "target", "n", "nbytes", "kind")


def chunk_nbytes(n: int, n_escapes: int) -> int:
    """Return the bytes of an encoded chunk of n weights."""
    return 8 - (-(4 * (-(-n // BLOCK) + 1) + n_escapes) // 8) * 8 + 88 * -(-n // GROUP)


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
    from offload_rt.ops import lossless_kernels

    return int(lossless_kernels.digest(part))


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
    from offload_rt.ops import lossless_kernels

    return bool(lossless_kernels.decode(chunk, kind, n, out))


def decode_block(block: Tensor, n_chunks: int, out: Tensor) -> None:
    """Decode an encoded block on the current CUDA stream.

    block  (nbytes,) uint8, starts with `n_chunks` records of CHUNKS
    out    (nbytes,) uint8
    """
    extension.kernels().lossless_decode(block, n_chunks, out)


def is_compiled() -> bool:
    """Whether the C++ library decodes on a CPU, instead of numba."""
    return cpu.library() is not None
