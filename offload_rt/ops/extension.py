"""The kernels of csrc/, where they are built and a card can run them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offload_rt.ops import build
from offload_rt.packing import ORDERS


class NotCapturable(RuntimeError):
    """What is computed cannot be part of a CUDA graph."""


@cache
def missing() -> str:
    """Load the kernels, which may build them, and launch one. Return why they cannot serve, or an
    empty string.
    """
    if not torch.cuda.is_available():
        return "torch sees no card"
    cards = filter(_is_able, range(torch.cuda.device_count()))
    offered = build.architectures()
    known = {max(one for one in offered if one <= _capability(card)) for card in cards}
    if not known:
        return f"they need compute capability {build.ARCHITECTURES[0] / 10}"
    try:
        library = build.find(
            *map(build.kernels, (build.ALL_ARCHITECTURES, build.ARCHITECTURES, known))
        )
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # torch gives it no types
    except (build.NotBuilt, OSError) as error:
        return str(error)
    describe("offload_rt")
    return _launch_failure() if _is_able(torch.cuda.current_device()) else ""


def _launch_failure() -> str:
    """Launch one kernel on the current card. Return why it failed, or an empty string.

    A loadable library may lack code for the card, or may need a newer driver than the installed
    one.
    """
    row = torch.ones(1, 8, dtype=torch.float16, device="cuda")
    try:
        kernels().silu_mul(row, row)
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return (
            f"a first launch failed: {reason}; update the driver, or set CUDA_HOME to a toolkit"
            " that it supports"
        )
    return ""


def _capability(device: torch.device | int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _is_able(device: torch.device | int) -> bool:
    return _capability(device) >= build.ARCHITECTURES[0]


def notice(device: torch.device) -> str:
    """What is lost where a card computes without the kernels; empty elsewhere."""
    if device.type == "cpu" or serves(torch.empty(0, device=device)):
        return ""
    why = missing() or f"they need compute capability {build.ARCHITECTURES[0] / 10}"
    return (
        f"no kernels ({why}): plain torch gives the same tokens more slowly, and layers cross the"
        " link unencoded"
    )


def serves(x: Tensor) -> bool:
    """Whether the kernels run on the device of `x`."""
    return x.is_cuda and not missing() and _is_able(x.device)


def kernels() -> Any:
    """The ops of the library, by name."""
    return torch.ops.offload_rt


def _few_rows_output(x: Tensor, codes: Tensor, *rest: Any) -> Tensor:
    kind = rest[3]  # behind scales, zero points and bias
    return x.new_empty(len(x), codes.shape[1 if ORDERS[kind : kind + 1] == ("columns",) else 0])


def describe(library: str) -> None:
    """Tell torch what the ops of a library return, without computing it."""
    like_first = "rms_norm", "add_rms_norm", "rotate_and_store", "silu_mul"
    nothing = "transfer", "commit_rows", "dequantize", "dequantize_blocks", "lossless_decode"
    fakes: dict[str, Callable[..., object]] = {
        **dict.fromkeys(like_first, lambda x, *_: x.new_empty(x.shape)),
        **dict.fromkeys(nothing, lambda *_: None),
        "tree_attention": lambda q, *_: (
            q.new_empty(q.shape),
            q.new_empty(q.shape[:2], dtype=torch.float32),
        ),
        "verify": lambda starts, *_: starts.new_empty((2,)),
        "few_rows": _few_rows_output,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"{library}::{name}", fake)
