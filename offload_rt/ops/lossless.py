"""Lossless weights: 16 bits in about 11.3, at a fixed rate and the speed of a copy (as TCA-TBE of
ZipServ, arXiv 2603.17435).

A tensor is cut into chunks of CHUNK weights. A word of 16 bits is one byte of sign and kept
mantissa, and one of the others:

  bfloat16  the exponent
  float16   the exponent and the last three bits of the mantissa, which are zero where it was
            converted from bfloat16
  float32   the upper half as bfloat16; the lower halves are zero, else the tensor is not encoded

The others are coded in three bits: 1 to 7 stand for the seven most frequent, 0 for an escape, whose
byte follows in a stream. A chunk of n weights, little-endian:

  table      8 bytes: what each code stands for, the first is 0
  starts     (n / BLOCK + 1,) uint32, rounded up: the escapes before each BLOCK weights, and all of
             them
  escapes    bytes in the order of the weights, zeros up to a multiple of 8
  signs      64 bytes for each 64 weights: sign, and the upper 7 bits of the mantissa
  planes     3 x uint64 for each 64 weights: bit i of the codes of all of them

So any BLOCK weights start on their own, and no chunk makes its reader leave it: what follows the
escapes is longer than there can be escapes. Chunks of tensors that are not encoded hold their
bytes, zeros up to a multiple of 8.
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

# A chunk: where it lies in an encoded block and where its bytes go, in bytes, and how many weights
# it has (bytes if RAW).
CHUNKS = np.dtype("<i8, <i8, <i4, <i4, <i8")
CHUNKS.names = ("source", "target", "n", "nbytes", "kind")


def chunk_nbytes(n: int, n_escapes: int) -> int:
    """Bytes of an encoded chunk of n weights."""
    return 8 - (-(4 * (-(-n // BLOCK) + 1) + n_escapes) // 8) * 8 + 88 * -(-n // GROUP)


def words_of(part: np.ndarray, kind: int) -> np.ndarray | None:
    """The words of some bytes of a tensor, of 16 bits each; None if RAW, or where the lower halves
    of float32 are not zero.
    """
    if kind != FLOAT:
        return None if kind == RAW else part.view(np.uint16)
    wide = part.view(np.uint32)
    return None if (wide & 0xFFFF).any() else (wide >> 16).astype(np.uint16)


def count_others(words: np.ndarray, kind: int) -> np.ndarray:
    """How often each byte of other bits occurs: (256,) int64."""
    from offload_rt.ops import lossless_kernels  # numba takes a second to import

    counts: np.ndarray = lossless_kernels.count_others(words, kind == HALF)
    return counts


def n_escapes(counts: np.ndarray) -> int:
    """How many weights are left by the seven others that are most frequent, of such counts."""
    return int(np.sort(counts)[:-7].sum())


def encode(words: np.ndarray, kind: int, out: np.ndarray) -> None:
    """Write the chunk of these words (n,) uint16; out: (chunk_nbytes(n, escapes),) uint8 of
    zeros.
    """
    from offload_rt.ops import lossless_kernels

    out[1:8] = np.argsort(count_others(words, kind))[-7:]
    lossless_kernels.encode(words, kind == HALF, out)


def digest(part: np.ndarray) -> int:
    """A checksum of 64 bits of (n,) uint8, dense; any change within four bytes gives another."""
    if (library := cpu.library()) is not None:
        return int(library.offload_rt_digest(part.ctypes.data, len(part)))
    from offload_rt.ops import lossless_kernels

    return int(lossless_kernels.digest(part))


def decode(chunk: np.ndarray, kind: int, n: int, out: np.ndarray) -> bool:
    """Write n weights, or n bytes of a RAW chunk; False where the chunk contradicts itself.

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
    """Decode a whole encoded block on a card, behind what its compute stream was given before.

    block  (nbytes,) uint8, which begins with `n_chunks` of CHUNKS
    out    (nbytes,) uint8
    """
    extension.kernels().lossless_decode(block, n_chunks, out)


def is_compiled() -> bool:
    """Whether the C++ library decodes on a CPU, not numba."""
    return cpu.library() is not None
