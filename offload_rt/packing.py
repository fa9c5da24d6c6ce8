"""How the codes of quantised matrices lie in memory, as plain values."""

from dataclasses import dataclass
from typing import Literal

# The values of bitsandbytes' nf4: quantiles of the normal distribution.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Rows that the reference computes at a time have about so many weights; each takes some 32 bytes
# meanwhile.
REFERENCE_WEIGHTS = 1 << 19
REFERENCE_NBYTES = 16 << 20
ORDERS = ("rows", "columns", "awq", "plain", "e2m1", "nf4")

Order = Literal["rows", "columns", "awq", "plain", "e2m1", "nf4"]


@dataclass(frozen=True)
class BlockType:
    """A type of GGUF: rows of blocks, in which codes and their scales lie together.

    number   in the files
    n, size  weights and bytes of a block
    group    weights that share a scale; 0: there is no kernel
    scale    offset in a block of its float16, minimum: of that of its minimum, if there is one
    """

    number: int
    n: int
    size: int
    group: int = 0
    scale: int = 0
    minimum: int | None = None


# Those with a kernel, in the order that the kernels know; transformers' reader decodes all but Q5_0
# and Q5_1.
KERNEL_BLOCKS = {
    "Q4_0": BlockType(2, 32, 18, 32), "Q4_1": BlockType(3, 32, 20, 32, 0, 2),
    "Q5_0": BlockType(6, 32, 22, 32),
    "Q5_1": BlockType(7, 32, 24, 32, 0, 2), "Q8_0": BlockType(8, 32, 34, 32),
    "Q2_K": BlockType(10, 256, 84, 16, 80, 82),
    "Q3_K": BlockType(11, 256, 110, 16, 108), "Q4_K": BlockType(12, 256, 144, 32, 0, 2),
    "Q5_K": BlockType(13, 256, 176, 32, 0, 2), "Q6_K": BlockType(14, 256, 210, 16, 208),
    "IQ4_NL": BlockType(20, 32, 18, 32), "IQ4_XS": BlockType(23, 256, 136, 32),
}  # fmt: skip
BLOCKS = KERNEL_BLOCKS | {
    "IQ2_XXS": BlockType(16, 256, 66), "IQ2_XS": BlockType(17, 256, 74),
    "IQ3_XXS": BlockType(18, 256, 98),
    "IQ1_S": BlockType(19, 256, 50), "IQ3_S": BlockType(21, 256, 110),
    "IQ2_S": BlockType(22, 256, 82),
    "IQ1_M": BlockType(29, 256, 56),
}  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """How the codes of a matrix lie, and which of them share a scale.

    order   rows, columns: `bits` bits each, densely in the int32 words of a row or column, low bits
            first
            awq: 4 bits each, eight columns in an int32 word in the order of AutoAWQ plain: int8 or
            float8_e4m3fn, each its own value e2m1, nf4: 4 bits each, two columns in a uint8, the
            first in the low nibble of e2m1, in the high one of nf4
    block   rows and columns of the matrix that share a scale
    offset  subtracted from the codes where there are no zero points
    """

    order: Order
    bits: int
    block: tuple[int, int]
    offset: int = 0

    @property
    def groups_rows(self) -> bool:
        """Whether a list of groups is one of rows; else it is one of columns."""
        return self.order in ("columns", "awq")

    def words(self, n_rows: int, n_columns: int) -> tuple[int, int]:
        """The shape of the codes of a matrix."""
        if self.order == "columns":
            return -(-n_rows * self.bits // 32), n_columns
        if self.order == "plain":
            return n_rows, n_columns
        per_word = 8 if self.order in ("e2m1", "nf4") else 32
        return n_rows, -(-n_columns * self.bits // per_word)
