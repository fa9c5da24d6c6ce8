"""The fused CUDA product of few rows and quantised codes, emulated on a CPU and on a card."""

from typing import Any

import pytest
import torch
from support import emulated

from offload_rt.ops import extension
from offload_rt.ops.dequantize import (
    CodedMatrix,
    multiply_few_rows,
    reference_dequantize,
    serves_few_rows,
)
from offload_rt.packing import Packing

KINDS = ("rows", "columns", "plain", "e2m1", "float8")


@pytest.fixture(scope="module", params=["emulated", "card"])
def kernels(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """The ops by name, and the device of their tensors."""
    if request.param == "emulated":
        return getattr(torch.ops, emulated.load()), "cpu"
    if extension.missing():
        pytest.skip("no card, or the kernels are not built for one")
    return extension.kernels(), "cuda"


def random_matrix(kind: str, n_out: int, n_in: int, dtype: torch.dtype) -> CodedMatrix:
    """Codes with scales below 1; float8 in blocks of 128 x 128, as in block fp8."""
    generator = torch.Generator().manual_seed(n_in)
    order: Any = "plain" if kind == "float8" else kind
    block = {"columns": (32, 1), "plain": (1, n_in), "float8": (128, 128)}.get(kind, (1, 32))
    bits = 8 if order == "plain" else 4
    stored = (n_in, n_out) if kind == "columns" else (n_out, n_in)
    packing = Packing(order, bits, block, 8 if kind in ("rows", "columns") else 0)
    integer = {"rows": torch.int32, "columns": torch.int32, "plain": torch.int8}.get(
        kind, torch.uint8
    )
    limits = torch.iinfo(integer)
    codes = torch.randint(
        limits.min, limits.max + 1, packing.code_shape(*stored), generator=generator
    ).to(integer)
    grid = [-(-n // size) for n, size in zip(stored, block, strict=True)]
    scales = torch.rand(grid, generator=generator).to(dtype)
    if kind == "float8":
        codes = (codes & 0xBF).view(torch.float8_e4m3fn)  # finite
    if kind == "e2m1":
        scales = torch.randint(118, 128, grid, generator=generator).byte()
    product = torch.float32 if kind == "e2m1" else dtype
    return CodedMatrix((n_out, n_in), packing, codes, scales, None, None, product)


def values_of(matrix: CodedMatrix) -> torch.Tensor:
    stored = torch.empty(matrix.shape[::-1] if matrix.is_transposed else matrix.shape)
    scales = matrix.float_scales()
    reference_dequantize(matrix.codes, scales, None, None, matrix.packing, stored)
    return stored.T if matrix.is_transposed else stored


def moved(matrix: CodedMatrix, device: str) -> CodedMatrix:
    return CodedMatrix(
        matrix.shape, matrix.packing, matrix.codes.to(device), matrix.scales.to(device), None,
        None, matrix.product,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_those_of_the_reference_values(
    kernels: tuple[Any, str], kind: str, dtype: torch.dtype
) -> None:
    library, device = kernels
    for n_out, n_in in ((1, 32), (40, 320), (130, 288)):
        matrix = random_matrix(kind, n_out, n_in, dtype)
        values = values_of(matrix).to(dtype).double()
        for n_rows in (1, 7, 8, 9, 32):
            x = torch.randn(n_rows, n_in).to(dtype)
            bias = torch.randn(n_out).to(dtype)
            assert serves_few_rows(x, matrix)
            y = multiply_few_rows(x.to(device), moved(matrix, device), bias.to(device), library)
            exact = x.double() @ values.T + bias.double()
            size = x.double().abs() @ values.abs().T + bias.double().abs()
            limit = 8e-3 if dtype == torch.bfloat16 else 1e-3
            assert float(((y.cpu().double() - exact).abs() / size).max()) < limit


@pytest.mark.parametrize("kind", KINDS)
def test_unit_vectors_give_the_weights(kernels: tuple[Any, str], kind: str) -> None:
    library, device = kernels
    matrix = random_matrix(kind, 24, 64, torch.bfloat16)
    expected = values_of(matrix).T.bfloat16().contiguous()
    for first in (0, 32):
        x = torch.eye(64)[first : first + 32].bfloat16()
        y = multiply_few_rows(x.to(device), moved(matrix, device), None, library)
        assert torch.equal(y.cpu(), expected[first : first + 32])


def test_a_row_has_the_same_bits_in_any_company(kernels: tuple[Any, str]) -> None:
    library, device = kernels
    matrix = moved(random_matrix("rows", 48, 608, torch.bfloat16), device)
    x = torch.randn(32, 608).bfloat16().to(device)
    full = multiply_few_rows(x, matrix, None, library)
    for first, last in ((0, 1), (3, 12), (5, 25), (30, 32)):
        assert torch.equal(
            multiply_few_rows(x[first:last], matrix, None, library), full[first:last]
        )


def test_other_shapes_are_left_to_dequantising() -> None:
    matrix = random_matrix("rows", 16, 64, torch.bfloat16)
    assert not serves_few_rows(torch.zeros(33, 64).bfloat16(), matrix)
    assert not serves_few_rows(torch.zeros(1, 64), matrix)
    narrow = random_matrix("plain", 16, 33, torch.bfloat16)
    assert not serves_few_rows(torch.zeros(1, 33).bfloat16(), narrow)


def test_the_op_has_a_schema_and_a_fake(kernels: tuple[Any, str]) -> None:
    library, device = kernels
    for kind in ("rows", "columns"):
        matrix = moved(random_matrix(kind, 24, 64, torch.bfloat16), device)
        x = torch.randn(3, 64).bfloat16().to(device)
        block = matrix.packing.block[::-1] if matrix.is_transposed else matrix.packing.block
        arguments = (
            x, matrix.codes, matrix.float_scales(), None, None, KINDS.index(kind), *block, 8,
        )  # fmt: skip
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(library.few_rows.default, arguments, test_utils=checks)
