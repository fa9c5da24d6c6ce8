"""The CPU library's products: values of every format, the order of sums, all instruction sets."""

from dataclasses import replace

import pytest
import torch
from support.coded_matrices import (
    FLOAT8_BLOCK,
    KINDS,
    assert_equal,
    case,
    random_blocks,
    random_matrix,
    relative_error,
    values_of,
)
from torch import Tensor

from offload_rt.ops import cpu, linear_cpu
from offload_rt.ops import linear as linear_module
from offload_rt.ops.dequantize import (
    BLOCKS,
    BlockMatrix,
    CodedMatrix,
    Packing,
)
from offload_rt.ops.linear import dequantize, linear

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(cpu.library() is None, reason="needs a C++ compiler"),
]


def coded(kind: str, seed: int) -> tuple[CodedMatrix, Tensor]:
    """A random coded matrix with scales of about 1, and its values by the reference."""
    matrix = case(kind, seed)
    codes = matrix.codes
    if kind == "float8":
        codes = (codes.view(torch.uint8) & 0xBF).view(torch.float8_e4m3fn)  # finite
    draw = torch.Generator().manual_seed(seed)
    scales = torch.randn(matrix.scales.shape, generator=draw).to(matrix.scales.dtype)
    matrix = replace(matrix, codes=codes, scales=scales)
    return matrix, values_of(matrix)


def block_matrix(name: str, seed: int) -> tuple[BlockMatrix, Tensor]:
    """Random blocks with scales below 1, and their values by the reference."""
    return masked(random_blocks(name, seed), 0xBB)


def masked(matrix: BlockMatrix, mask: int) -> tuple[BlockMatrix, Tensor]:
    """Mask the upper byte of float16 scales; return the matrix and its values."""
    kind = BLOCKS[matrix.type]
    for offset in (kind.scale, kind.minimum):
        if offset is not None:
            matrix.blocks.view(-1, kind.size)[:, offset + 1] &= mask
    return matrix, values_of(matrix)


def large_matrix(name: str, n_out: int, n_in: int, dtype: torch.dtype) -> tuple:
    """Random codes in groups that the library decodes in registers, and their values.

    n_in   a multiple of the block
    dtype  of the scales, where the format leaves a choice
    """
    if name in BLOCKS:
        n_bytes = n_in // BLOCKS[name].n * BLOCKS[name].size
        blocks = torch.randint(0, 256, (n_out, n_bytes)).byte()
        return masked(BlockMatrix((n_out, n_in), blocks, name), 0x3B)
    order, group = name.split("-")
    size = int(group)
    packing, zeros = {
        "int8": (Packing("plain", 8, (1, size)), None),
        "float8": (Packing("plain", 8, FLOAT8_BLOCK), None),
        "rows8": (Packing("rows", 8, (1, size), 128), None),
        "rows": (Packing("rows", 4, (1, size), 8), None),
        "columns": (Packing("columns", 4, (size, 1)), "rows"),
        "awq": (Packing("awq", 4, (size, 1)), "awq"),
    }.get(order) or (Packing(order, 4, (1, size)), None)
    matrix, values = random_matrix(packing, (n_out, n_in), dtype, zeros)
    if order == "e2m1":
        matrix = replace(matrix, scales=torch.randint(0, 250, matrix.scales.shape).byte())
        values = values_of(matrix)
    return matrix, values


# Orders with group sizes, and types of GGUF.
LARGE = (
    *("rows-64", "rows-128", "columns-128", "columns-64", "awq-128", "awq-256", "nf4-64"),
    *("nf4-256", "e2m1-32", "int8-4096", "int8-64", "float8-128", "rows8-128", *BLOCKS),
)
# Those with blocks of 32 inputs, of which a product may end within a chunk of codes.
SHORT_BLOCKS = ("e2m1-32", *(name for name, kind in BLOCKS.items() if kind.n == 32))


@pytest.mark.parametrize("name", [*KINDS, *BLOCKS])
def test_unpacked_weights_equal_the_reference_bit_for_bit(level, name):
    for seed in range(6 if name in BLOCKS else 15):
        matrix = random_blocks(name, seed) if name in BLOCKS else case(name, seed)
        for dtype in FLOATS:
            expected = values_of(matrix, dtype)
            assert_equal(dequantize(matrix, torch.empty(matrix.shape, dtype=dtype)), expected)
            rows = torch.tensor([len(expected) - 1, 0])
            out = torch.empty(2, matrix.shape[1], dtype=dtype)
            assert_equal(dequantize(matrix, out, rows), expected[rows])


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_of_codes_equal_products_of_their_values(level, dtype):
    n_compared = 0
    made = [coded(kind, seed) for kind in KINDS for seed in range(6)]
    made += [block_matrix(name, seed) for name in BLOCKS for seed in range(3)]
    for matrix, values in made:
        x = torch.randn(5, matrix.shape[1]).to(dtype)
        bias = torch.randn(matrix.shape[0]).to(dtype)
        if dtype == torch.float16 and float((x.double() @ values.double().T).abs().max()) > 6e4:
            continue
        # Where a bfloat16 instruction multiplies, weights are rounded to bfloat16 once.
        assert relative_error(x, values, linear(x, matrix, bias), bias) < TOLERANCES[dtype]
        n_compared += 1
    assert n_compared > 50


def assert_weights_are_exact(name: str, n_out: int, n_whole: int, dtype: torch.dtype) -> None:
    """Decoding in registers and into a panel gives the exact weights, for few and for many rows."""
    n_in = n_whole + 32 * (name in SHORT_BLOCKS)
    matrix, values = large_matrix(name, n_out, n_in, dtype)
    x = torch.eye(n_in)
    expected = values.T.contiguous()
    # The instruction for bfloat16 reads subnormal numbers as 0.
    rounded = expected.masked_fill(expected.abs() < 2**-126, 0).bfloat16()
    for n_rows in (1, 2, 3, 5, n_in):
        rows = slice(n_in - n_rows, n_in)
        assert torch.equal(linear(x[rows], matrix), expected[rows])
        y = linear(x[rows].bfloat16(), matrix)
        assert torch.equal(y.masked_fill(y.abs() < 2**-126, 0), rounded[rows])


@pytest.mark.parametrize("name", LARGE)
def test_products_with_unit_vectors_equal_the_reference(level: int, name: str) -> None:
    assert_weights_are_exact(name, 200, 1536, torch.bfloat16)
    assert_weights_are_exact(name, 136, 256, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("name", "n_out", "n_in"),
    [
        *((name, 168, 1280 + 32 * (name in SHORT_BLOCKS)) for name in LARGE),
        # Few rows of a wide transposed matrix read more outputs at a time.
        *((name, 2200, 256) for name in ("awq-128", "columns-128")),
    ],
)
def test_a_row_of_a_large_matrix_has_the_same_bits_in_any_company(level, name, n_out, n_in, dtype):
    matrix, _ = large_matrix(name, n_out, n_in, torch.bfloat16)
    x = torch.randn(64, n_in).to(dtype)
    full = linear(x, matrix)
    for first, last in ((0, 1), (3, 5), (2, 5), (1, 5), (2, 9), (8, 9), (40, 56)):
        assert_equal(linear(x[first:last], matrix), full[first:last])


# Weights that are integer codes times scales.
INTEGERS = ("int8-4096", "int8-64", "rows8-128", *BLOCKS)


@pytest.mark.parametrize("name", INTEGERS)
def test_rounded_inputs_are_products_of_8_bits_with_the_same_bits_in_any_company(level, name):
    n_in = 1280 + 32 * (name in SHORT_BLOCKS)
    matrix, values = large_matrix(name, 70, n_in, torch.float32)
    matrix = replace(matrix, rounds_inputs=True)
    for dtype in FLOATS:
        x = (torch.randn(64, n_in) / 256).to(dtype)  # sums fit into float16
        x[3, :64] = 0
        blocks = x.float().view(64, -1, 32)
        scales = blocks.abs().amax(-1, keepdim=True) / 127
        codes = (blocks * torch.where(scales > 0, 1 / scales, 0)).round()
        rounded = (codes.double() * scales).view(64, n_in)
        y = linear(x, matrix)
        assert relative_error(rounded, values, y) < TOLERANCES[dtype]
        for first, last in ((0, 1), (2, 4), (0, 7), (40, 56)):
            assert_equal(linear(x[first:last], matrix), y[first:last])
        x[5, 7] = torch.inf  # a row that is not finite
        assert linear(x, matrix)[5].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("stored", FLOATS)
def test_dense_products_equal_float64_products(level, dtype, stored):
    for n_out, n_in in ((1, 1), (7, 3), (33, 1000), (100, 2048), (257, 1544)):
        weight = torch.randn(n_out, n_in).to(stored)
        x = torch.randn(29, n_in).to(dtype)
        assert relative_error(x, weight, linear(x, weight)) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", FLOATS)
def test_row_bits_do_not_depend_on_the_batch(level, dtype):
    """Independent of other rows, of threads and of the division of outputs."""
    weights: list = [
        torch.randn(n_out, n_in).to(dtype) for n_out, n_in in ((7, 3), (50, 1000), (300, 1536))
    ]
    weights += [coded("rows", 2)[0], coded("awq", 1)[0], block_matrix("Q4_K", 2)[0]]
    before = torch.get_num_threads()
    for weight in weights:
        x = torch.randn(401, weight.shape[1]).to(dtype)
        full = linear(x, weight)
        for first, last in ((0, 1), (3, 5), (1, 4), (2, 6), (1, 6), (0, 13), (7, 47), (390, 401)):
            for n_threads in (1, 2):
                torch.set_num_threads(n_threads)
                assert_equal(linear(x[first:last], weight), full[first:last])
        torch.set_num_threads(before)
        if isinstance(weight, Tensor) and len(weight) > 9:
            assert_equal(linear(x[:3], weight[5:9]), full[:3, 5:9].contiguous())


@pytest.mark.parametrize("dtype", FLOATS)
def test_groups_equal_separate_products_bit_for_bit(level, dtype):
    """Groups of any number of rows, a shared row, and several matrices side by side."""
    matrices = [large_matrix("Q4_0", 40, 96, dtype)[0] for _ in range(3)]
    pairs = [[matrix, torch.randn(24, 96).to(dtype)] for matrix in matrices]
    stack = linear_cpu.MatrixStack.of([pairs[0], pairs[2], pairs[1]])
    x = torch.randn(395, 192).to(dtype)[:, 96:]
    shared = x[:1]
    for rows, ends in ((x, [1, 390, 395]), (x[:9], [4, 5, 9]), (shared, [1, 2, 3])):
        expected = []
        for first, end, pair in zip([0, *ends[:-1]], ends, pairs, strict=True):
            part = shared if rows is shared else rows[first:end]
            expected.append(torch.cat([linear(part, matrix) for matrix in pair], 1))
        assert_equal(linear_cpu.linear_groups(rows, ends, stack, [0, 2, 1]), torch.cat(expected))
    with pytest.raises(RuntimeError, match="95 columns"):
        linear_cpu.linear_groups(x[:, :95], [1, 390, 395], stack, [0, 2, 1])


def test_inputs_can_be_strided_and_have_more_dimensions(level):
    weight = torch.randn(10, 24)
    x = torch.randn(4, 6, 48)
    torch.testing.assert_close(linear(x[..., 24:], weight), x[..., 24:] @ weight.T)
    torch.testing.assert_close(linear(x[0, :, ::2], weight), x[0, :, ::2] @ weight.T)
    assert linear(x[:0, 0, :24], weight).shape == (0, 10)


def test_gradients_flow_if_required():
    weight = torch.randn(10, 24)
    x = torch.randn(4, 24, requires_grad=True)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, -1))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_products_without_the_library_differ_only_by_rounding(dtype, monkeypatch):
    monkeypatch.setattr(linear_cpu, "serves", lambda x, weight: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    tolerance = TOLERANCES.get(dtype, 1e-12)
    dense = torch.randn(600, 64).to(dtype)
    for matrix, values in (
        (dense, dense), coded("rows", 5), coded("columns", 2),
        large_matrix("columns-64", 520, 256, torch.float32),
        large_matrix("awq-128", 520, 256, torch.float32), block_matrix("Q6_K", 1),
    ):  # fmt: skip
        x = torch.randn(3, matrix.shape[1]).to(dtype)
        bias = torch.randn(matrix.shape[0]).to(dtype)
        assert relative_error(x, values, linear(x, matrix, bias), bias) < tolerance


def test_torch_multiplies_many_rows_of_16_bits_only_if_allowed(monkeypatch):
    rows: list[int] = []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(len(x))
        return x @ weight.T

    monkeypatch.setattr(linear_module.F, "linear", multiply)
    weight = torch.randn(10, 32)
    for dtype in FLOATS:
        for n in (1, 15, 16, 300):
            linear(torch.randn(n, 32).to(dtype), weight.to(dtype))
            linear(torch.randn(n, 32).to(dtype), weight.to(dtype), allows_torch=True)
    assert rows == [16, 300] * 2
