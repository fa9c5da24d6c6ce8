"""Dequantising: CUDA kernels equal the torch reference bit for bit, and that its formula."""

import numpy as np
import pytest
import torch
from support.coded_matrices import FLOATS, KINDS, assert_equal, case, packed_zeros, random_blocks
from transformers.integrations.gguf.dequant import GGML_BLOCK, GGML_NAME

from offload_rt.ops import extension
from offload_rt.ops.dequantize import (
    BLOCKS,
    KERNEL_BLOCKS,
    ZERO_ORDERS,
    Packing,
    ZeroCodes,
    dequantize_blocks,
    dequantize_codes,
    reference_dequantize,
    reference_dequantize_blocks,
)


def arguments(kind: str, seed: int, dtype: torch.dtype, device: str) -> list:
    """Arguments of the op, `out` last."""
    codes, scales, zeros, groups, packing, shape = case(kind, seed)
    codes = codes.view(torch.uint8) if kind == "float8" else codes
    offset = packing.offset
    if zeros is not None:
        offset = seed // 2 % 2 if packing.order != "plain" else 0
        stored = (zeros - offset) % (1 << packing.bits) if offset else zeros
        zeros = packed_zeros(stored, ZERO_ORDERS[packing.order], packing.bits)
        words = Packing(ZERO_ORDERS[packing.order], packing.bits, (1, 1)).code_shape(*scales.shape)
        zeros = zeros[tuple(map(slice, words))].contiguous()
    tensors = [x if x is None else x.to(device) for x in (codes, scales, zeros, groups)]
    numbers = [KINDS.index(kind), packing.bits, *packing.block, offset]
    return [*tensors, *numbers, torch.full(shape, torch.nan, dtype=dtype, device=device)]


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_equals_the_reference_bit_for_bit(kernels, kind):
    for seed in range(24):
        *args, packing, shape = case(kind, seed)
        for dtype in FLOATS:
            given = arguments(kind, seed, dtype, kernels.device)
            expected = torch.empty(shape, dtype=dtype)
            kernels.dequantize(*given)
            reference_dequantize(*args, packing, expected)
            assert_equal(given[-1].cpu(), expected)
    if kind == "columns":
        kernels.check_schema("dequantize", arguments(kind, 3, torch.bfloat16, kernels.device))


@pytest.mark.parametrize("kind", ZERO_ORDERS)
def test_kernel_decodes_packed_zero_points(kernels, monkeypatch, kind):
    """Nothing unpacks them before each product."""
    monkeypatch.setattr(extension, "serves", lambda _: True)
    monkeypatch.setattr(extension, "kernels", lambda: kernels)
    monkeypatch.setattr(ZeroCodes, "unpacked", None)
    codes, scales, points, groups, *_, plus, out = arguments(kind, 3, torch.float32, kernels.device)
    *expected, packing, shape = case(kind, 3)
    zeros = ZeroCodes(points, ZERO_ORDERS[kind], plus)
    dequantize_codes(codes, scales, zeros, groups, packing, out)
    reference = torch.empty(shape)
    reference_dequantize(*expected, packing, reference)
    assert_equal(out.cpu(), reference)


@pytest.mark.parametrize(("op", "place", "change", "message"), [
    ("dequantize", 0, lambda x: x[1:], "codes must have"),
    ("dequantize", 0, lambda x: x.short(), "codes has the wrong dtype"),
    ("dequantize", 1, lambda x: x[:, 1:].contiguous(), "scales must have"),
    ("dequantize", 1, lambda x: x.double(), "scales must be float32"),
    ("dequantize", 2, lambda x: x[:, 1:].contiguous(), "zeros must have"),
    ("dequantize", 3, lambda x: x[1:], "groups must have"),
    ("dequantize", 4, lambda _: 7, "unknown kind"),
    ("dequantize", 5, lambda _: 9, "1 to 8 bits"),
    ("dequantize", 6, lambda _: 0, "blocks must not be empty"),
    ("dequantize", 9, lambda x: x.int(), "out must be float32"),
    ("dequantize", 9, lambda x: x.T, "out must be contiguous"),
    ("dequantize_blocks", 0, lambda x: x[1:], "blocks must have"),
    ("dequantize_blocks", 0, lambda x: x[:, 1:].contiguous(), "blocks must have"),
    ("dequantize_blocks", 0, lambda x: x.int(), "blocks has the wrong dtype"),
    ("dequantize_blocks", 1, lambda _: 12, "unknown kind"),
    ("dequantize_blocks", 2, lambda x: x[:, 1:].contiguous(), "a multiple of 256"),
    ("dequantize_blocks", 2, lambda x: x.double(), "out must be float32"),
])  # fmt: skip
def test_invalid_arguments_are_refused_with_a_reason(kernels, op, place, change, message):
    if op == "dequantize":
        args = arguments("columns", 3, torch.bfloat16, kernels.device)
    else:
        blocks, shape = random_blocks("Q4_K", 1)
        out = torch.empty(shape, device=kernels.device)
        args = [blocks.to(kernels.device), list(KERNEL_BLOCKS).index("Q4_K"), out]
    args[place] = change(args[place])
    with pytest.raises(RuntimeError, match=message):
        getattr(kernels, op)(*args)


# The blocks of GGUF


def test_supported_types_are_those_of_transformers():
    theirs = {GGML_NAME[number]: (number, *GGML_BLOCK[number]) for number in GGML_BLOCK}
    ours = {name: (block.number, block.n, block.size) for name, block in BLOCKS.items()}
    assert {name: block for name, block in ours.items() if name not in ("Q5_0", "Q5_1")} == theirs


@pytest.mark.parametrize("name", KERNEL_BLOCKS)
def test_block_kernel_equals_the_reference_bit_for_bit(kernels, name):
    kind = list(KERNEL_BLOCKS).index(name)
    for seed in range(4):
        blocks, shape = random_blocks(name, seed)
        for dtype in FLOATS:
            mine = torch.full(shape, torch.nan, dtype=dtype, device=kernels.device)
            expected = torch.empty(shape, dtype=dtype)
            args = blocks.to(kernels.device), kind, mine
            kernels.dequantize_blocks(*args)
            reference_dequantize_blocks(blocks, name, expected)
            assert_equal(mine.cpu(), expected)
    kernels.check_schema("dequantize_blocks", args)


def test_types_without_kernel_equal_transformers():
    """In any dtype, some rows at a time."""
    blocks, shape = random_blocks("IQ2_XS", 2)
    for dtype in (*FLOATS, torch.float64):
        mine, expected = (torch.empty(shape, dtype=dtype) for _ in range(2))
        dequantize_blocks(blocks, "IQ2_XS", mine)
        reference_dequantize_blocks(blocks, "IQ2_XS", expected)
        assert torch.equal(mine.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("name", BLOCKS)
def test_gguf_package_gives_the_same_values(name):
    gguf = pytest.importorskip("gguf")
    blocks, shape = random_blocks(name, 3)
    out = torch.empty(shape)
    reference_dequantize_blocks(blocks, name, out)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name])
    assert torch.equal(out.nan_to_num(), torch.from_numpy(expected).nan_to_num())
