"""Memory order of the codes of quantised matrices, without torch."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

# Values of bitsandbytes' nf4: quantiles of the normal distribution.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Weights that the reference dequantises at a time, with about 32 temporary bytes each.
REFERENCE_WEIGHTS = 1 << 19
REFERENCE_NBYTES = 16 << 20
# Outputs that a product widens to float32 at a time on a CPU without the library.
PRODUCT_OUTPUTS = 256
# Rows that the CUDA product of codes multiplies at a time, maximum rows of a product with 4-bit
# integers, and divisor of their inputs (csrc/kernels.h).
CODED_ROWS = 32
_INT4_ROWS = 128
_CODED_INPUTS = 32
# Remaining share of 16-bit layers after lossless encoding (docs/formats.md: 0.70 for two models).
LOSSLESS_SHARE = 0.70
# Rows that the CPU library multiplies at a time (kMostRows in csrc/linear_cpu.h).
PRODUCT_ROWS = 384
# Weights in a block and in a group of the lossless encoding, see `ops.lossless`.
LOSSLESS_BLOCK = 1 << 12
LOSSLESS_GROUP = 64


def coded_reads(n_rows: float) -> int:
    """Return how often the CUDA product of codes reads them."""
    return max(math.ceil(n_rows / CODED_ROWS), 1)


def product_nbytes(n_out: int, n_in: int, itemsize: int, has_card: bool) -> int:
    """Return the temporary bytes of a product with a quantised matrix (n_out, n_in).

    A card may dequantise the matrix to numbers of `itemsize` bytes. A CPU widens the rows and some
    outputs to float32.
    """
    nbytes = n_out * n_in * itemsize
    if not has_card:
        nbytes = min(nbytes, (PRODUCT_ROWS + PRODUCT_OUTPUTS) * n_in * 4)
    return nbytes + REFERENCE_NBYTES


Order = Literal["rows", "columns", "awq", "plain", "e2m1", "nf4"]
ORDERS: tuple[Order, ...] = get_args(Order)
# Orders of zero points with a kernel, by the order of the codes: packed along the outputs.
ZERO_ORDERS = {"columns": "rows", "rows": "columns", "awq": "awq", "plain": "plain"}


@dataclass(frozen=True)
class BlockType:
    """GGUF type: rows of blocks with codes and scales.

    number   number of the type in files
    n, size  weights and bytes of a block
    group    weights per scale; 0 without a CUDA kernel
    scale    offset of the float16 scale in a block; of its highest four bits in IQ1_M
    minimum  offset of the float16 minimum in a block, or None
    """

    number: int
    n: int
    size: int
    group: int = 0
    scale: int = 0
    minimum: int | None = None


# Types with a CUDA kernel, in the order of the kernels; transformers' reader lacks Q5_0 and Q5_1.
KERNEL_BLOCKS = {
    "Q4_0": BlockType(2, 32, 18, 32), "Q4_1": BlockType(3, 32, 20, 32, 0, 2),
    "Q5_0": BlockType(6, 32, 22, 32), "Q5_1": BlockType(7, 32, 24, 32, 0, 2),
    "Q8_0": BlockType(8, 32, 34, 32), "Q2_K": BlockType(10, 256, 84, 16, 80, 82),
    "Q3_K": BlockType(11, 256, 110, 16, 108), "Q4_K": BlockType(12, 256, 144, 32, 0, 2),
    "Q5_K": BlockType(13, 256, 176, 32, 0, 2), "Q6_K": BlockType(14, 256, 210, 16, 208),
    "IQ4_NL": BlockType(20, 32, 18, 32), "IQ4_XS": BlockType(23, 256, 136, 32),
}  # fmt: skip
# All types have a CPU kernel.
BLOCKS = KERNEL_BLOCKS | {
    "IQ2_XXS": BlockType(16, 256, 66), "IQ2_XS": BlockType(17, 256, 74),
    "IQ3_XXS": BlockType(18, 256, 98), "IQ1_S": BlockType(19, 256, 50),
    "IQ3_S": BlockType(21, 256, 110), "IQ2_S": BlockType(22, 256, 82),
    "IQ1_M": BlockType(29, 256, 56, 0, 54),
}  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """Memory order of a matrix's codes, and size of its groups.

    order   rows, columns: `bits` bits each, dense in int32 words of a row or column, low bits first
            awq: 4 bits each, eight columns per int32 word in the order of AutoAWQ
            plain: int8 or float8_e4m3fn, each a value
            e2m1, nf4: 4 bits each, two columns per uint8; the first column is the low nibble in
            e2m1, the high nibble in nf4
    block   rows and columns per scale
    offset  subtracted from codes without zero points
    """

    order: Order
    bits: int
    block: tuple[int, int]
    offset: int = 0

    @property
    def is_transposed(self) -> bool:
        """Whether the codes are of the transpose, so that group indices refer to rows."""
        return self.order in ("columns", "awq")

    def n_coded_rows(self, n_in: int, zeros: Order | None) -> int:
        """Return how many rows a CUDA kernel multiplies by these codes without decoding them.

        n_in   inputs of the matrix
        zeros  order of the zero points; None without
        """
        block_out, block_in = self.block[::-1] if self.is_transposed else self.block
        has_kernel = (
            self.order not in ("awq", "nf4")
            and self.bits == (8 if self.order == "plain" else 4)
            and zeros in (None, ZERO_ORDERS.get(self.order))
            and n_in % _CODED_INPUTS == 0
            and (block_in % 8 == 0 or block_in >= n_in)
        )
        if not has_kernel:
            return 0
        is_int4 = self.order in ("rows", "columns") and block_out == 1
        has_groups = block_in % _CODED_INPUTS == 0 or block_in >= n_in
        return _INT4_ROWS if is_int4 and has_groups else CODED_ROWS

    def code_shape(self, n_rows: int, n_columns: int) -> tuple[int, int]:
        """Return the shape of the codes of a matrix."""
        if self.order == "columns":
            return -(-n_rows * self.bits // 32), n_columns
        if self.order == "plain":
            return n_rows, n_columns
        per_word = 8 if self.order in ("e2m1", "nf4") else 32
        return n_rows, -(-n_columns * self.bits // per_word)
