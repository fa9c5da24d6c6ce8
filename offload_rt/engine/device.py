"""Device selection, memory budgets and device-wide settings."""

import os
import platform
from contextlib import ExitStack

import torch

from offload_rt.config import EngineConfig, format_size, parse_size
from offload_rt.engine.memory_plan import DRIVER, LIBRARIES, READ_BUFFERS, less_margin
from offload_rt.errors import CapacityError, DeviceError
from offload_rt.offload.placement import MemoryBudget
from offload_rt.ops import extension
from offload_rt.system.machine import cards, memory_free, memory_limit

# Maximum host memory beside a GPU that shares it: slots for layers from disk, and buffers.
_UNIFIED_HOST = 4 << 30


def pick_device(name: str) -> torch.device:
    """Return the device of a setting. Raises DeviceError for cuda without a usable device.

    Builds the kernels: nvcc needs memory and all cores, and host memory is pinned later.
    """
    if name == "cuda" and not torch.cuda.is_available():
        need = "a CUDA device that torch can use"
        have = _cuda_problem()
        raise DeviceError("--device=cuda", need=need, have=have, change="use --device=cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # Fragmentation would count against a tight memory cap, but CUDA may have started. The driver of
    # WSL refuses expandable segments (pytorch/pytorch 192330).
    has_begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    is_set = os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
    if not (has_begun or is_set or "microsoft" in platform.release().lower()):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    extension.missing()
    return torch.device("cuda", torch.cuda.current_device())


def _cuda_problem() -> str:
    """Return torch's reason for an unusable GPU: no driver, an old driver, a build without CUDA."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # untyped in torch
    except (RuntimeError, AssertionError) as error:
        return f"none ({str(error).splitlines()[0].split('. ')[0].rstrip('.')})"
    return "none"


def device_notice(asked: str, device: torch.device) -> str:
    """Return a notice if --device auto selects the CPU although the machine has a GPU."""
    if asked != "auto" or device.type != "cpu" or not (gpus := cards()):
        return ""
    return (
        f"computing on the CPU: there is a {gpus[0]}, but torch can use {_cuda_problem()}; --device"
        " cpu if that is meant"
    )


def memory_budget(config: EngineConfig, device: torch.device, n_local: int = 1) -> MemoryBudget:
    """Return the budgets per local rank, as set or free; raises CapacityError for too much."""
    spare = less_margin(memory_free()) // n_local
    if device.type == "cpu":
        limit = memory_limit()
        nbytes = _checked(config.device_memory, "--device-memory", spare, limit)
        return MemoryBudget(nbytes, most=limit)
    torch.cuda.empty_cache()  # memory of closed engines is free as well
    is_unified = bool(torch.cuda.get_device_properties(device).is_integrated)
    if is_unified:  # the GPU of e.g. GB10 or Jetson: layers are on the device or on disk
        free_nbytes = memory_free()  # CUDA counts the page cache as used
        spare = min(spare // 8, _UNIFIED_HOST)
    else:
        free_nbytes, _ = torch.cuda.mem_get_info(device)  # excludes the context of this process
    most = max(free_nbytes - DRIVER, 0)
    available = max(less_margin(free_nbytes) - is_unified * spare, 0)
    return MemoryBudget(
        _checked(config.device_memory, "--device-memory", available, most),
        _checked(config.host_memory, "--host-memory", spare, memory_limit()),
        LIBRARIES, has_card=True, is_unified=is_unified, buffers=READ_BUFFERS, most=most,
    )  # fmt: skip


def _checked(asked: str | int | None, flag: str, default: int, limit: int) -> int:
    if asked is None:
        return default
    if (nbytes := parse_size(asked)) > limit:
        problem = f"{flag} is more than there is"
        sizes = {"need": format_size(nbytes), "have": format_size(limit)}
        raise CapacityError(problem, **sizes, change=f"lower {flag}")
    return nbytes


def prepare_cuda(nbytes: int, device: torch.device, closes: ExitStack) -> None:
    """Cap torch's memory at the budget and sum products in float32, until `closes` ends.

    With the cap, a larger GPU behaves like a smaller one. By default cuBLAS may round partial sums
    to 16 bits.
    """
    closes.callback(torch.cuda.empty_cache)
    _, total_nbytes = torch.cuda.mem_get_info(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    closes.callback(torch.cuda.set_per_process_memory_fraction, before, device)
    torch.cuda.set_per_process_memory_fraction(min(nbytes / total_nbytes, 1.0), device)
    products = torch.backends.cuda.matmul
    for dtype in ("bf16", "fp16"):
        name = f"allow_{dtype}_reduced_precision_reduction"
        closes.callback(setattr, products, name, getattr(products, name))
        setattr(products, name, False)
