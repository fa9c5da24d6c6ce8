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
from offload_rt.packing import LOSSLESS_BLOCK as BLOCK
from offload_rt.packing import LOSSLESS_GROUP as GROUP

CHUNK = 1 << 19
RAW, BFLOAT16, HALF, FLOAT = range(4)
KIND_OF = {DType.BFLOAT16: BFLOAT16, DType.FLOAT16: HALF, DType.FLOAT32: FLOAT}

# A chunk: byte offsets in the encoded and the decoded block, number of weights (bytes if RAW).
CHUNKS = np.dtype("<i8, <i8, <i4, <i4, <i8")
CHUNKS.names = ("source", "target", "n", "nbytes", "kind")
# Lanes and multipliers of digests.
_LANES = 64
_PRIME = np.uint32(0x9E3779B1)
_PRIME64 = 0x9E3779B97F4A7C15


def chunk_nbytes(n: int, n_escapes: int) -> int:
    """Return the bytes of an encoded chunk of n weights."""
    return 8 - (-(4 * (-(-n // BLOCK) + 1) + n_escapes) // 8) * 8 + 88 * -(-n // GROUP)


def decode_by_numpy(chunk: np.ndarray, kind: int, n: int, out: np.ndarray) -> bool:
    """Compute `decode` for all kinds except RAW."""
    n_groups = -(-n // GROUP)
    n_blocks = -(-n // BLOCK)
    starts = chunk[8 : 12 + 4 * n_blocks].view("<u4")
    signs, planes = np.split(chunk[len(chunk) - 88 * n_groups :], [GROUP * n_groups])
    escapes = chunk[12 + 4 * n_blocks : len(chunk) - 88 * n_groups]
    bits = np.unpackbits(planes.reshape(n_groups, 3, 8), axis=2, bitorder="little")
    codes = (bits * np.array([[1], [2], [4]], np.uint8)).sum(1, dtype=np.uint8).ravel()
    is_escape = codes == 0
    n_before = np.cumsum(np.concatenate(([0], is_escape)))[[*range(0, len(codes), BLOCK), -1]]
    if not np.array_equal(n_before, starts) or n_before[-1] > len(escapes):
        return False
    others = chunk[codes & 7].astype(np.uint16)  # the table is at the start of the chunk
    others[is_escape] = escapes[: n_before[-1]]
    low = signs.astype(np.uint16)
    words = (low & 0x80) << 8
    if kind == HALF:
        words |= (others & 0xF8) << 7 | (low & 0x7F) << 3 | others & 7
    else:
        words |= others << 7 | low & 0x7F
    wide = words[:n].astype(np.uint32) << 16 if kind == FLOAT else words[:n]
    out[: wide.nbytes] = wide.view(np.uint8)
    return True


def digest_by_numpy(part: np.ndarray) -> int:
    """Compute `digest`."""
    words = np.zeros(-(-len(part) // (4 * _LANES)) * _LANES, np.uint32)
    words.view(np.uint8)[: len(part)] = part
    lanes = _PRIME * np.arange(1, _LANES + 1, dtype=np.uint32)
    for row in words.reshape(-1, _LANES):
        mixed = lanes ^ row
        lanes = (mixed << np.uint32(13) | mixed >> np.uint32(19)) * _PRIME
    total = len(part)
    for lane in lanes.tolist():
        total = (total ^ lane) * _PRIME64 % (1 << 64)
        total ^= total >> 29
    return total


def words_of(part: np.ndarray, kind: int) -> np.ndarray | None:
    """Return the 16-bit words of tensor bytes; None if RAW or with nonzero float32 low halves."""
    if kind != FLOAT:
        return None if kind == RAW else part.view(np.uint16)
    wide = part.view(np.uint32)
    return None if (wide & 0xFFFF).any() else (wide >> 16).astype(np.uint16)


def _count_others(words: np.ndarray, kind: int) -> np.ndarray:
    from offload_rt.ops import lossless_kernels  # numba takes a second to import

    counts: np.ndarray = lossless_kernels.count_others(words, kind == HALF)
    return counts


def n_escapes(words: np.ndarray, kind: int) -> int:
    """Return the number of words (n,) uint16 without one of the seven most frequent high bytes."""
    return int(np.sort(_count_others(words, kind))[:-7].sum())


def encode(words: np.ndarray, kind: int, out: np.ndarray) -> None:
    """Encode words (n,) uint16 into zeroed `out` (chunk_nbytes(n, escapes),) uint8."""
    from offload_rt.ops import lossless_kernels

    out[1:8] = np.argsort(_count_others(words, kind))[-7:]
    lossless_kernels.encode(words, kind == HALF, out)


def digest(part: np.ndarray) -> int:
    """Compute a 64-bit checksum of dense (n,) uint8; detects any change within four bytes."""
    if (library := cpu.library()) is not None:
        return int(library.offload_rt_digest(part.ctypes.data, len(part)))
    return digest_by_numpy(part)


def decode(chunk: np.ndarray, kind: int, n: int, out: np.ndarray) -> bool:
    """Decode n weights, or n bytes of a RAW chunk. Returns False for an inconsistent chunk.

    chunk  (nbytes,) uint8, at least `chunk_nbytes(n, 0)`, or n if RAW
    out    (bytes of the weights,) uint8, both dense
    """
    if kind == RAW:
        out[:n] = chunk[:n]
        return True
    if (library := cpu.library()) is not None:
        arguments = chunk.ctypes.data, len(chunk), kind, n, out.ctypes.data, False
        return bool(library.offload_rt_decode(*arguments))
    return decode_by_numpy(chunk, kind, n, out)


def decode_block(block: Tensor, n_chunks: int, out: Tensor) -> None:
    """Decode an encoded block on the current CUDA stream.

    block  (nbytes,) uint8, starts with `n_chunks` records of CHUNKS
    out    (nbytes,) uint8
    """
    extension.kernels().lossless_decode(block, n_chunks, out)
