"""CPU library: kernels of csrc/*_cpu.cpp, prebuilt or built at first use, called through ctypes."""

import ctypes
from functools import cache

import torch

from offload_rt.ops import build

_ADDRESS = ctypes.c_void_p
_SIZE = ctypes.c_int64
_INT = ctypes.c_int
# Result and arguments of each function.
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "offload_rt_tree_attention": (None, (_ADDRESS, _INT)),
    "offload_rt_rms_norm": (None, (_ADDRESS, _INT)),
    "offload_rt_silu_mul": (None, (_ADDRESS, _INT)),
    "offload_rt_rotate_and_store": (None, (_ADDRESS, _INT)),
    "offload_rt_decode_layers": (None, (_ADDRESS, _INT)),
    "offload_rt_top": (None, (_ADDRESS, _INT)),
    "offload_rt_digest": (ctypes.c_uint64, (_ADDRESS, _SIZE)),
    "offload_rt_decode": (ctypes.c_bool, (_ADDRESS, _SIZE, _INT, _SIZE, _ADDRESS, ctypes.c_bool)),
    "offload_rt_linear": (None, (_ADDRESS, _INT, _INT, _INT)),
    "offload_rt_linear_groups": (
        None,
        (_ADDRESS, _INT, _ADDRESS, _ADDRESS, _ADDRESS, _INT, _ADDRESS, _SIZE, _ADDRESS, _INT, _INT),
    ),
    "offload_rt_unpack": (None, (_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _INT, _INT)),
    "offload_rt_fma_rate": (ctypes.c_double, (_SIZE, _ADDRESS)),
}
# As `Dtype` in csrc/cpu.h.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def library(isa: int | None = None) -> ctypes.CDLL | None:
    """Load the library, which may build it; None without a C++ compiler.

    isa  instruction set as of `level`; default: that of this machine
    """
    return _load(level() if isa is None else isa)


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
