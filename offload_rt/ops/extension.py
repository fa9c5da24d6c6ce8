"""CUDA kernels of csrc/: loading and availability."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from offload_rt.ops import build


class NotCapturable(RuntimeError):
    """An operation that CUDA graphs cannot capture."""


@cache
def missing() -> str:
    """Load or build the kernels and launch a kernel. Return the reason of a failure, or ""."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    here = targets()
    if not here:
        return f"they need compute capability {build.ARCHITECTURES[0] / 10}"
    try:
        build.load(
            lambda path: torch.ops.load_library(str(path)),  # type: ignore[no-untyped-call]
            *map(build.kernels, (build.ALL_ARCHITECTURES, build.ARCHITECTURES, here)),
        )
    except (build.NotBuilt, OSError) as error:
        return str(error)
    return _launch_failure() if _is_supported(torch.cuda.current_device()) else ""


def targets() -> set[int]:
    """Return the architectures of the kernels for the GPUs of this machine."""
    devices = filter(_is_supported, range(torch.cuda.device_count()))
    offered = build.architectures()
    return {max(target for target in offered if target <= capability(device)) for device in devices}


def _launch_failure() -> str:
    """Launch a kernel on the current GPU. Return the reason of a failure, or "".

    A loadable library may lack code for the GPU or need a newer driver.
    """
    row = torch.ones(1, 8, dtype=torch.float16, device="cuda")
    try:
        kernels().silu_mul(row, row)
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return (
            f"a first launch failed: {reason}; update the driver, or set CUDA_HOME to a toolkit"
            " supported by it"
        )
    return ""


def capability(device: torch.device | int) -> int:
    """Return the compute capability of a GPU times ten."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _is_supported(device: torch.device | int) -> bool:
    return capability(device) >= build.ARCHITECTURES[0]


def notice(device: torch.device) -> str:
    """Describe the loss if a GPU computes without the kernels; "" otherwise."""
    if device.type == "cpu" or serves(torch.empty(0, device=device)):
        return ""
    reason = missing() or f"they need compute capability {build.ARCHITECTURES[0] / 10}"
    return (
        f"no kernels ({reason}): plain torch computes the same tokens slowly, and layers cross the"
        " link unencoded"
    )


def serves(x: Tensor) -> bool:
    """Whether the kernels run on the device of `x`."""
    return x.is_cuda and not missing() and _is_supported(x.device)


def kernels() -> Any:
    """Return the namespace of the operations."""
    return torch.ops.offload_rt
