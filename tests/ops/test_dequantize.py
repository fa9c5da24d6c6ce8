"""Dequantising: CUDA kernels equal the torch reference bit for bit, and that its formula."""

import numpy as np
import pytest
import torch
from support.coded_matrices import FLOATS, KINDS, assert_equal, case, random_blocks, values_of
from transformers.integrations.gguf.dequant import GGML_BLOCK, GGML_NAME

from offload_rt.ops import extension
from offload_rt.ops.dequantize import (
    BLOCKS,
    KERNEL_BLOCKS,
    ZERO_ORDERS,
    ZeroCodes,
    dequantize_codes,
)


def arguments(kind: str, seed: int, dtype: torch.dtype, device: str) -> list:
    """Arguments of the op, `out` last."""
    matrix = case(kind, seed)
    zeros, packing = matrix.zeros, matrix.packing
    codes = matrix.codes.view(torch.uint8) if kind == "float8" else matrix.codes
    parts = codes, matrix.scales, zeros and zeros.codes, matrix.groups
    tensors = [x if x is None else x.to(device) for x in parts]
    offset = zeros.plus if zeros else packing.offset
    shape = matrix.shape[::-1] if matrix.packing.is_transposed else matrix.shape
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    return [*tensors, KINDS.index(kind), packing.bits, *packing.block, offset, out]


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_equals_the_reference_bit_for_bit(kernels, kind):
    for seed in range(24):
        matrix = case(kind, seed)
        for dtype in FLOATS:
            *given, out = arguments(kind, seed, dtype, kernels.device)
            kernels.dequantize(*given, out)
            out = out.cpu().T.contiguous() if matrix.packing.is_transposed else out.cpu()
            assert_equal(out, values_of(matrix, dtype))


@pytest.mark.parametrize("kind", ZERO_ORDERS)
def test_kernel_decodes_packed_zero_points(kernels, monkeypatch, kind):
    """Nothing unpacks them before each product."""
    matrix = case(kind, 3)
    expected = values_of(matrix)
    monkeypatch.setattr(extension, "serves", lambda _: True)
    monkeypatch.setattr(extension, "kernels", lambda: kernels)
    monkeypatch.setattr(ZeroCodes, "unpacked", None)
    codes, scales, points, groups, *_, plus, out = arguments(kind, 3, torch.float32, kernels.device)
    zeros = ZeroCodes(points, ZERO_ORDERS[kind], plus)
    dequantize_codes(codes, scales, zeros, groups, matrix.packing, out)
    assert_equal(out.cpu().T.contiguous() if matrix.packing.is_transposed else out.cpu(), expected)


def test_supported_types_are_those_of_transformers():
    theirs = {GGML_NAME[number]: (number, *GGML_BLOCK[number]) for number in GGML_BLOCK}
    ours = {name: (block.number, block.n, block.size) for name, block in BLOCKS.items()}
    assert {name: block for name, block in ours.items() if name not in ("Q5_0", "Q5_1")} == theirs


@pytest.mark.parametrize("name", KERNEL_BLOCKS)
def test_block_kernel_equals_the_reference_bit_for_bit(kernels, name):
    kind = list(KERNEL_BLOCKS).index(name)
    for seed in range(4):
        matrix = random_blocks(name, seed)
        for dtype in FLOATS:
            mine = torch.full(matrix.shape, torch.nan, dtype=dtype, device=kernels.device)
            kernels.dequantize_blocks(matrix.blocks.to(kernels.device), kind, mine)
            assert_equal(mine.cpu(), values_of(matrix, dtype))


@pytest.mark.parametrize("name", BLOCKS)
def test_gguf_package_gives_the_same_values(name):
    gguf = pytest.importorskip("gguf")
    matrix = random_blocks(name, 3)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(matrix.blocks.numpy(), gguf.GGMLQuantizationType[name])
    assert torch.equal(values_of(matrix).nan_to_num(), torch.from_numpy(expected).nan_to_num())
