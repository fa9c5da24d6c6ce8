"""CUDA products of few rows with codes, and of rows sorted by matrix: emulated and on a card."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.coded_matrices import FLOAT8_BLOCK, random_matrix, relative_error, values_of
from support.fake_gpu import record_graph

from offload_rt.executor.cuda_graphs import CudaCapture
from offload_rt.ops.dequantize import CodedMatrix
from offload_rt.ops.few_rows import multiply_few_rows, multiply_stack, serves_few_rows, serves_stack
from offload_rt.packing import Packing

KINDS = ("rows", "columns", "plain", "e2m1", "float8")
# Codes with zero points, and the order of these.
WITH_ZEROS = {"rows, zeros": "columns", "columns, zeros": "rows", "plain, zeros": "plain"}


def coded(kind: str, n_out: int, n_in: int, dtype: torch.dtype) -> tuple[CodedMatrix, torch.Tensor]:
    """Random codes and their values; float8 in blocks of 128 x 128, as in block fp8."""
    zeros: Any = WITH_ZEROS.get(kind)
    kind = kind.removesuffix(", zeros")
    order: Any = "plain" if kind == "float8" else kind
    block = {"columns": (32, 1), "plain": (1, n_in), "float8": FLOAT8_BLOCK}.get(kind, (1, 32))
    offset = 8 if kind in ("rows", "columns") else 0
    packing = Packing(order, 8 if order == "plain" else 4, block, offset)
    return random_matrix(packing, (n_out, n_in), dtype, zeros)


def moved(matrix: CodedMatrix, device: str) -> CodedMatrix:
    zeros = matrix.zeros
    codes, scales = matrix.codes.to(device), matrix.scales.to(device)
    zeros = zeros and replace(zeros, codes=zeros.codes.to(device))
    return replace(matrix, codes=codes, scales=scales, zeros=zeros)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, *WITH_ZEROS])
def test_products_equal_those_of_the_reference_values(kernels, kind, dtype):
    for n_out, n_in in ((1, 32), (40, 320), (130, 288)):
        matrix, values = coded(kind, n_out, n_in, dtype)
        for n_rows in (1, 7, 8, 9, 32):
            x = torch.randn(n_rows, n_in).to(dtype)
            bias = torch.randn(n_out).to(dtype)
            y = multiplied(kernels, x, matrix, bias)
            limit = 8e-3 if dtype == torch.bfloat16 else 1e-3
            assert relative_error(x, values.to(dtype), y, bias) < limit


def multiplied(kernels, x, matrix, bias=None):
    assert serves_few_rows(x, matrix)
    there = moved(matrix, kernels.device)
    x, bias = (part if part is None else part.to(kernels.device) for part in (x, bias))
    return multiply_few_rows(x, there, bias, kernels).cpu()


def assert_exact(kernels, matrix, dtype, *parts):
    """Products with unit vectors of some inputs are the weights."""
    expected = values_of(matrix).to(matrix.product).to(dtype).T
    for part in parts:
        x = torch.zeros(len(part), matrix.shape[1], dtype=dtype)
        x[range(len(part)), part] = 1
        assert torch.equal(multiplied(kernels, x, matrix), expected[part.start : part.stop])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("product", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, *WITH_ZEROS])
def test_weights_are_exact_at_all_steps_of_the_inputs(kernels, kind, product, dtype):
    """Scales may have the dtype of the rows or not; a step of a block has 1,024 inputs."""
    matrix, _ = coded(kind, 76, 5152, product)
    across = range(1000, 1100 if kind.startswith(("rows", "columns")) else 1032)
    assert_exact(kernels, matrix, dtype, range(32), across, range(4090, 4098), range(5140, 5152))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("offset", [8, 20])
@pytest.mark.parametrize("group", [8, 32, 24, 96])
def test_any_groups_and_offsets_of_int4_are_exact(kernels, group, offset, dtype):
    matrix, _ = coded("rows", 24, 288, torch.bfloat16)
    scales = torch.rand(24, 288 // group).bfloat16()
    packing = replace(matrix.packing, block=(1, group), offset=offset)
    matrix = replace(matrix, packing=packing, scales=scales)
    assert_exact(kernels, matrix, dtype, range(200, 232))


@pytest.mark.parametrize("kind", ["rows", "columns", "plain"])
def test_a_row_has_the_same_bits_in_any_company(kernels, kind):
    matrix, _ = coded(kind, 80, 2080, torch.bfloat16)
    n_rows = 32 if kind == "plain" else 128
    x = torch.randn(n_rows, 2080).bfloat16()
    full = multiplied(kernels, x, matrix)
    for first, last in ((0, 1), (3, 12), (5, 25), (n_rows - 2, n_rows)):
        assert torch.equal(multiplied(kernels, x[first:last], matrix), full[first:last])


def test_other_shapes_are_left_to_dequantising() -> None:
    matrix, _ = coded("rows", 16, 64, torch.bfloat16)
    narrow_groups = replace(matrix, packing=replace(matrix.packing, block=(1, 16)))
    assert not serves_few_rows(torch.zeros(1, 64), matrix)
    for n_rows, width, other in (
        (129, 64, matrix), (33, 64, narrow_groups),
        (1, 33, coded("plain", 16, 33, torch.bfloat16)[0]),
    ):  # fmt: skip
        assert not serves_few_rows(torch.zeros(n_rows, width).bfloat16(), other)


def apart(matrices: list[torch.Tensor]) -> torch.Tensor:
    """Stack tensors at a distance, as in a block with further tensors between them."""
    words = torch.stack([matrix.contiguous().view(torch.uint8).flatten() for matrix in matrices])
    store = torch.full((len(words), -(-words.shape[1] // 256) * 256 + 256), 0xFF, dtype=torch.uint8)
    store[:, : words.shape[1]] = words
    first = matrices[0]
    strides = store.shape[1] // first.element_size(), *first.contiguous().stride()
    return store.view(first.dtype).as_strided((len(words), *first.shape), strides)


def random_stack(kind: str, n: int, device: str) -> tuple[Any, list[torch.Tensor]]:
    """Matrices (24, 96) as a stack, and the values of each."""
    if kind == "dense":
        matrices = [torch.randn(24, 96).bfloat16() for _ in range(n)]
        return apart(matrices).to(device), [matrix.double() for matrix in matrices]
    matrices, values = zip(*(coded(kind, 24, 96, torch.bfloat16) for _ in range(n)), strict=True)
    zeros = [matrix.zeros.codes for matrix in matrices if matrix.zeros]
    stack = replace(
        matrices[0],
        codes=apart([matrix.codes for matrix in matrices]).to(device),
        scales=apart([matrix.scales for matrix in matrices]).to(device),
        zeros=replace(matrices[0].zeros, codes=apart(zeros).to(device)) if zeros else None,
    )
    return stack, [part.bfloat16().double() for part in values]


@pytest.mark.parametrize(("kind", "counts"), [
    *((kind, [0, 3, 20, 0, 9]) for kind in (*KINDS, *WITH_ZEROS, "dense")),
    ("dense", [0] * 31 + [5, 0, 1, 2] + [0] * 30 + [8]),
    ("dense", [70, 1]),
])  # fmt: skip
def test_rows_are_multiplied_by_their_matrix(kernels, kind, counts):
    """Rows past the last end become zeros, also where a graph is replayed with other ends."""
    device = kernels.device
    stack, values = random_stack(kind, len(counts), device)
    assert serves_stack(torch.bfloat16, stack)
    n = sum(counts) + 11
    x = torch.randn(7, 96).bfloat16().to(device)
    rows = torch.randint(7, (n,)).to(device)
    bias = torch.randn(len(counts), 24).bfloat16().to(device)
    ends = torch.zeros(len(counts), dtype=torch.int32, device=device)
    products = []

    def compute() -> None:
        products.append(multiply_stack(x, rows, ends, stack, bias, kernels))

    compute()
    replay = (record_graph if device == "cpu" else CudaCapture())(compute)
    for given in (counts[::-1], counts):
        ends.copy_(torch.tensor(given).cumsum(0))
        replay()
        y = products[1].cpu()
        numbers = torch.arange(len(given)).repeat_interleave(torch.tensor(given))
        assert not y[len(numbers) :].any()
        for out, row, number in zip(y, rows.tolist(), numbers.tolist(), strict=False):
            product = x[row, None].cpu(), values[number], out[None], bias[number].cpu()
            assert relative_error(*product) < 8e-3
        sorted_rows = multiply_stack(x[rows], None, ends, stack, bias, kernels)
        assert torch.equal(sorted_rows, products[1])
