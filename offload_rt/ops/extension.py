"""The kernels of csrc/, where they are built and a card can run them."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Written by scripts/build_kernels.py.
LIBRARY = Path(__file__).with_name("_kernels.so")
# The compute capability that the kernels need.
LEAST_CAPABILITY = (8, 0)


class NotCapturable(RuntimeError):
    """What is computed cannot be part of a CUDA graph."""


@cache
def is_loaded() -> bool:
    """Load the kernels once; False where they are not built or torch sees no card."""
    if not LIBRARY.exists() or not torch.cuda.is_available():
        return False
    torch.ops.load_library(str(LIBRARY))  # type: ignore[no-untyped-call]  # torch gives it no types
    describe("offload_rt")
    return True


@cache
def _is_able(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def serves(x: Tensor) -> bool:
    """Whether the kernels run on the device of `x`."""
    return x.is_cuda and is_loaded() and _is_able(x.device)


def kernels() -> Any:
    """The ops of the library, by name."""
    return torch.ops.offload_rt


def describe(library: str) -> None:
    """Tell torch what the ops of a library return, without computing it."""

    def tree_attention(
        q: Tensor, k: Tensor, v: Tensor, masks: Tensor, depths: Tensor, key_depths: Tensor, extent: Tensor,
        window: int, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)

    def transfer(target: Tensor, source: Tensor) -> None:
        return None

    def commit_rows(keys: Tensor, values: Tensor, rows: Tensor, first: int) -> None:
        return None

    def verify(
        starts: Tensor, children: Tensor, tokens: Tensor, is_sampled: Tensor, row_of: Tensor, draft_probs: Tensor,
        target: Tensor, uniforms: Tensor, n_levels: int, independent: bool, leaf_to_root: bool,
    ) -> Tensor:  # fmt: skip
        return starts.new_empty((2,))

    def dequantize(
        codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, kind: int, bits: int, block_rows: int,
        block_columns: int, offset: int, out: Tensor,
    ) -> None:  # fmt: skip
        return None

    def lossless_decode(block: Tensor, n_chunks: int, out: Tensor) -> None:
        return None

    def dequantize_blocks(blocks: Tensor, kind: int, out: Tensor) -> None:
        return None

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.new_empty(x.shape)

    def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.new_empty(x.shape)

    def rotate_and_store(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
        rows: Tensor | None, first: int,
    ) -> Tensor:  # fmt: skip
        return q.new_empty(q.shape)

    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        return gate.new_empty(gate.shape)

    layer = (rms_norm, add_rms_norm, rotate_and_store, silu_mul, dequantize, dequantize_blocks, lossless_decode)
    for fake in (tree_attention, transfer, commit_rows, verify, *layer):
        torch.library.register_fake(f"{library}::{fake.__name__}", fake)
