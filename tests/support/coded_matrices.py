"""Random coded matrices and blocks of GGUF types, for tests of dequantisation and of products."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from offload_rt.ops.dequantize import (
    BLOCKS,
    ORDERS,
    ZERO_ORDERS,
    BlockMatrix,
    CodedMatrix,
    Order,
    Packing,
    ZeroCodes,
    reference_dequantize,
    reference_dequantize_blocks,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KINDS = (*ORDERS, "float8")
WORDS = {"plain": torch.int8, "e2m1": torch.uint8, "nf4": torch.uint8, "float8": torch.uint8}
FLOAT8_BLOCK = (128, 128)


def case(kind: str, seed: int) -> CodedMatrix:
    """Return a small matrix of random codes; scales reach beyond float16 on both sides."""
    draw = random.Random(f"{kind}{seed}")
    generator = torch.Generator().manual_seed(seed)
    shape = draw.choice([(1, 8), (65, 99), (40, 64), (33, 7)])
    is_byte = kind in ("plain", "float8")
    bits = 8 if is_byte else 4
    if kind in ("rows", "columns"):
        bits = draw.choice([2, 3, 4, 5, 6, 7, 8])
    by_rows = kind in ("columns", "awq")
    size = draw.choice([1, 8, 13, 32, 200])
    block = (size, 1) if by_rows else (draw.choice([1, 1, 4, 300]) if is_byte else 1, size)
    is_float = kind in ("e2m1", "nf4", "float8")
    offset = 0 if is_float or kind == "plain" else 1 << bits - 1
    packing = Packing("plain" if kind == "float8" else kind, bits, block, offset)
    grid = tuple(-(-n // size) for n, size in zip(shape, block, strict=True))
    codes = random_words(kind, generator, *packing.code_shape(*shape))
    codes = codes.view(torch.float8_e4m3fn) if kind == "float8" else codes
    scales = torch.randn(grid, generator=generator)
    scales = scales * torch.exp(5 * torch.randn(grid, generator=generator))
    zeros = groups = None
    if not is_float and seed % 2:
        plus = seed // 2 % 2 if kind != "plain" else 0
        zeros = random_zeros(ZERO_ORDERS[kind], bits, grid, plus, generator)
    if kind != "float8" and seed % 3 == 0:
        n, n_groups = (shape[0], grid[0]) if by_rows else (shape[1], grid[1])
        groups = torch.randint(n_groups, (n,), generator=generator, dtype=torch.int32)
    scales = scales if kind == "nf4" else scales.to(FLOATS[seed % 5 % 3])
    shape = shape[::-1] if by_rows else shape
    return CodedMatrix(shape, packing, codes, scales, zeros, groups, scales.dtype)


def random_words(order: str, generator: torch.Generator | None, *shape: int) -> Tensor:
    """Integers of any bits."""
    dtype = WORDS.get(order, torch.int32)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, generator=generator).to(dtype)


def random_zeros(
    order: Order, bits: int, grid: Sequence[int], plus: int, generator: torch.Generator | None
) -> ZeroCodes:
    words = Packing(order, bits, (1, 1)).code_shape(*grid)
    return ZeroCodes(random_words(order, generator, *words), order, plus)


def random_matrix(
    packing: Packing, shape: tuple[int, int], dtype: torch.dtype, zeros: Order | None = None
) -> tuple[CodedMatrix, Tensor]:
    """Return random codes with scales of about 1, and their values by the reference.

    Plain codes in blocks of FLOAT8_BLOCK are float8.
    shape  outputs and inputs, multiples of the block
    dtype  of the scales, where the format leaves a choice
    zeros  order of random zero points
    """
    order = packing.order
    stored = shape[::-1] if packing.is_transposed else shape
    codes = random_words(order, None, *packing.code_shape(*stored))
    if packing.block == FLOAT8_BLOCK:
        codes = (codes & ~0x40).view(torch.float8_e4m3fn)  # finite
    grid = [-(-n // size) for n, size in zip(stored, packing.block, strict=True)]
    product = torch.float32 if order in ("e2m1", "nf4") else dtype
    scales = torch.randn(grid).to(product)
    if order == "e2m1":
        scales = torch.randint(118, 128, grid).byte()
    plus = int(packing.bits == 4 and zeros != "awq")
    points = zeros and random_zeros(zeros, packing.bits, grid, plus, None)
    matrix = CodedMatrix(shape, packing, codes, scales, points, None, product)
    return matrix, values_of(matrix)


def values_of(matrix: CodedMatrix | BlockMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of a matrix by the reference, (outputs, inputs)."""
    if isinstance(matrix, BlockMatrix):
        values = torch.empty(matrix.shape, dtype=dtype)
        reference_dequantize_blocks(matrix.blocks, matrix.type, values)
        return values
    shape = matrix.shape[::-1] if matrix.packing.is_transposed else matrix.shape
    stored = torch.empty(shape, dtype=dtype)
    scales, zeros = matrix.float_scales(), matrix.int_zeros()
    reference_dequantize(matrix.codes, scales, zeros, matrix.groups, matrix.packing, stored)
    return stored.T.contiguous() if matrix.packing.is_transposed else stored


def assert_equal(mine: Tensor, expected: Tensor) -> None:
    """Compare bits; all NaN are equal."""
    dtype = torch.int16 if mine.itemsize == 2 else torch.int32
    assert torch.equal(mine.isnan(), expected.isnan())
    assert torch.equal(*(x.view(dtype).masked_fill(x.isnan(), 0) for x in (mine, expected)))


def relative_error(x: Tensor, values: Tensor, y: Tensor, bias: Tensor | None = None) -> float:
    """Return the largest error of products y, relative to the sum of the absolute terms."""
    x, values, y = (part.double() for part in (x, values, y))
    offset = torch.zeros(len(values)) if bias is None else bias.double()
    size = x.abs() @ values.abs().T + offset.abs()
    return float(((y - x @ values.T - offset).abs() / size).max())


def random_blocks(name: str, seed: int) -> BlockMatrix:
    """Blocks of any bytes, also with infinite scales and NaN."""
    block = BLOCKS[name]
    n_rows, n_blocks = 3 + 4 * seed, 1 + seed % 3
    generator = torch.Generator().manual_seed(seed)
    size = n_rows, n_blocks * block.size
    blocks = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    return BlockMatrix((n_rows, n_blocks * block.n), blocks, name)
