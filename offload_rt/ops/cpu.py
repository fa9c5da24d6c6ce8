"""CPU library: kernels of csrc/*_cpu.cpp, prebuilt or built at first use, called through ctypes."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offload_rt.ops import build

ADDRESS = ctypes.c_void_p
SIZE = ctypes.c_int64
INT = ctypes.c_int
FLOAT = ctypes.c_float
# Result and arguments of functions that take or return more than structures and 32-bit integers.
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "offload_rt_digest": (ctypes.c_uint64, (ADDRESS, SIZE)),
    "offload_rt_decode": (ctypes.c_bool, (ADDRESS, SIZE, INT, SIZE, ADDRESS, ctypes.c_bool)),
    "offload_rt_linear_groups": (
        None,
        (ADDRESS, INT, ADDRESS, ADDRESS, ADDRESS, INT, ADDRESS, SIZE, ADDRESS, INT, INT),
    ),
    "offload_rt_unpack": (None, (ADDRESS, ADDRESS, SIZE, ADDRESS, INT, INT)),
    "offload_rt_fma_rate": (ctypes.c_double, (SIZE, ADDRESS)),
}
# As `Dtype` in csrc/cpu.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def library() -> ctypes.CDLL | None:
    """Load the library for this machine, which may build it; None without a C++ compiler."""
    return _load(level())


def serves(*tensors: Tensor) -> bool:
    """Whether the library computes with these tensors: rows of numbers of the same dtype."""
    x = tensors[0]
    return (
        x.device.type == "cpu"
        and x.dtype in DTYPES
        and all(
            tensor.dtype == x.dtype and tensor.stride(-1) == 1 and not tensor.requires_grad
            for tensor in tensors
        )
        and library() is not None
    )


def call(name: str, *arguments: Any) -> None:
    """Call a function of the library; its last argument is the number of threads."""
    loaded = library()
    assert loaded is not None, "callers check `serves`"
    by_address = (ctypes.Structure, ctypes.Array)
    parts = (ctypes.byref(part) if isinstance(part, by_address) else part for part in arguments)
    getattr(loaded, name)(*parts, torch.get_num_threads())


def fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    """Return the fields of a structure, given types with the names of consecutive fields."""
    return [(name, kind) for kind, names in groups for name in names.split()]


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return the addresses of tensors."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


@cache
def _load(isa: int) -> ctypes.CDLL | None:
    try:
        loaded = build.load(lambda path: ctypes.CDLL(str(path)), build.cpu(isa))
    except (build.NotBuilt, OSError):
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = arguments
    return loaded


@cache
def level() -> int:
    """Return the instruction set of the kernels, LEVEL in csrc/.

    0 portable, 1 AVX2, 2 AVX-512, 3 AVX-512 with bfloat16 and VNNI. ATEN_CPU_CAPABILITY limits it,
    as for torch.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    has_bf16 = torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported()
    if capability == "AVX512" and has_bf16:
        return 3
    return {"AVX512": 2, "AVX2": 1}.get(capability, 0)
