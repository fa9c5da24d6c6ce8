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
    if not (here := targets()):
        return _need()
    try:
        build.load(
            lambda path: torch.ops.load_library(str(path)),  # type: ignore[no-untyped-call]
            *map(build.kernels, (build.ALL_ARCHITECTURES, build.ARCHITECTURES, here)),
        )
    except (build.NotBuilt, OSError) as error:
        return str(error)
    return _launch_failure() if _is_supported(torch.cuda.current_device()) else ""


def _launch_failure() -> str:
    """Launch a kernel: a loadable library may lack code for the GPU or need a newer driver."""
    row = torch.ones(1, 8, dtype=torch.float16, device="cuda")
    try:
        kernels().silu_mul(row, row)
        torch.cuda.synchronize()
    except RuntimeError as error:
        change = "update the driver, or set CUDA_HOME to a toolkit supported by it"
        return f"a first launch failed: {str(error).splitlines()[0]}; {change}"
    return ""


def _need() -> str:
    return f"they need compute capability {build.ARCHITECTURES[0] / 10}"


def targets() -> set[int]:
    """Return the architectures of the kernels for the GPUs of this machine."""
    devices = filter(_is_supported, range(torch.cuda.device_count()))
    offered = build.architectures()
    return {max(target for target in offered if target <= capability(device)) for device in devices}


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
    loss = "plain torch computes the same tokens slowly, and layers cross the link unencoded"
    return f"no kernels ({missing() or _need()}): {loss}"


def serves(x: Tensor) -> bool:
    """Whether the kernels run on the device of `x`."""
    return x.is_cuda and not missing() and _is_supported(x.device)


def kernels() -> Any:
    """Return the namespace of the operations."""
    return torch.ops.offload_rt
