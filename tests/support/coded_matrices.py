"""Random coded matrices and blocks of GGUF types, for tests of dequantisation and of products."""

import random

import numpy as np
import torch
from torch import Tensor

from offload_rt.ops.dequantize import (
    BLOCKS,
    ORDERS,
    CodedMatrix,
    Order,
    Packing,
    ZeroCodes,
    reference_dequantize,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
KINDS = (*ORDERS, "float8")
WORDS = {"plain": torch.int8, "e2m1": torch.uint8, "nf4": torch.uint8, "float8": torch.uint8}
FLOAT8_BLOCK = (128, 128)


def case(
    kind: str, seed: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Packing, tuple[int, int]]:
    """Random codes, scales, zero points, groups, packing and shape; scales reach beyond float16 on
    both sides.
    """
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
    dtype = WORDS.get(kind, torch.int32)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1
    codes = torch.randint(least, most, packing.code_shape(*shape), generator=generator).to(dtype)
    codes = codes.view(torch.float8_e4m3fn) if kind == "float8" else codes
    scales = torch.randn(grid, generator=generator)
    scales = scales * torch.exp(5 * torch.randn(grid, generator=generator))
    zeros = groups = None
    if not is_float and seed % 2:
        low, high = (-128, 128) if kind == "plain" else (0, 1 << bits)
        zeros = torch.randint(low, high, grid, generator=generator, dtype=torch.int32)
    if kind != "float8" and seed % 3 == 0:
        n, n_groups = (shape[0], grid[0]) if by_rows else (shape[1], grid[1])
        groups = torch.randint(n_groups, (n,), generator=generator, dtype=torch.int32)
    scales = scales if kind == "nf4" else scales.to(FLOATS[seed % 5 % 3])
    return codes, scales, zeros, groups, packing, shape


def random_words(dtype: torch.dtype, *shape: int) -> Tensor:
    """Integers of any bits."""
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape).to(dtype)


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
    codes = random_words(WORDS.get(order, torch.int32), *packing.code_shape(*stored))
    if packing.block == FLOAT8_BLOCK:
        codes = (codes & ~0x40).view(torch.float8_e4m3fn)  # finite
    grid = [-(-n // size) for n, size in zip(stored, packing.block, strict=True)]
    product = torch.float32 if order in ("e2m1", "nf4") else dtype
    scales = torch.randn(grid).to(product)
    if order == "e2m1":
        scales = torch.randint(118, 128, grid).byte()
    points = None
    if zeros is not None:
        words = Packing(zeros, packing.bits, (1, 1)).code_shape(*grid)
        plus_one = int(packing.bits == 4 and zeros != "awq")
        points = ZeroCodes(random_words(WORDS.get(zeros, torch.int32), *words), zeros, plus_one)
    matrix = CodedMatrix(shape, packing, codes, scales, points, None, product)
    return matrix, values_of(matrix)


def values_of(matrix: CodedMatrix) -> Tensor:
    """Return the values of a matrix without groups by the reference, (outputs, inputs) float32."""
    stored = torch.empty(matrix.shape[::-1] if matrix.is_transposed else matrix.shape)
    scales, zeros = matrix.float_scales(), matrix.int_zeros()
    reference_dequantize(matrix.codes, scales, zeros, None, matrix.packing, stored)
    return stored.T if matrix.is_transposed else stored


def packed_zeros(zeros: Tensor, order: Order, bits: int) -> Tensor:
    """Pack zero points (n, m) as the codes of a matrix are packed."""
    if order == "plain":
        return zeros.to(torch.int8)
    if order == "columns":
        return packed_zeros(zeros.T, "rows", bits).T.contiguous()
    n_padding = -zeros.shape[1] % (8 if order == "awq" else 32)
    zeros = torch.nn.functional.pad(zeros, (0, n_padding))
    if order == "awq":
        zeros = zeros.view(len(zeros), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)
    digits = (zeros[..., None] >> torch.arange(bits)) & 1
    words = np.packbits(digits.flatten(1).numpy().astype(bool), axis=1, bitorder="little")
    return torch.from_numpy(words.view(np.int32))


def bits_of(x: Tensor) -> Tensor:
    bits = x.view(torch.int16 if x.itemsize == 2 else torch.int32)
    return bits.masked_fill(x.isnan(), 0)


def assert_equal(mine: Tensor, expected: Tensor) -> None:
    assert torch.equal(mine.isnan(), expected.isnan())
    assert torch.equal(bits_of(mine), bits_of(expected))


def random_blocks(name: str, seed: int) -> tuple[Tensor, tuple[int, int]]:
    """Blocks of any bytes, so also of infinite scales and scales that are no numbers, and the shape
    of their matrix.
    """
    block = BLOCKS[name]
    n_rows, n_blocks = 3 + 4 * seed, 1 + seed % 3
    generator = torch.Generator().manual_seed(seed)
    size = n_rows, n_blocks * block.size
    blocks = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    return blocks, (n_rows, n_blocks * block.n)
