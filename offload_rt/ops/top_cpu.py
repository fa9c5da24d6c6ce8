"""The most probable tokens of rows of logits on a CPU; see csrc/sampling_cpu.cpp."""

import ctypes

import torch
from torch import Tensor

from offload_rt.ops import cpu


class _Top(ctypes.Structure):
    """`Top` of csrc/sampling_cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "values", "tokens")),
        *((name, ctypes.c_int64) for name in ("n", "width", "row", "k")),
        ("rate", ctypes.c_float), ("dtype", ctypes.c_int32),
    )  # fmt: skip


def serves(logits: Tensor) -> bool:
    """Whether the kernel applies to logits."""
    return (
        logits.device.type == "cpu"
        and logits.dtype in cpu.DTYPES
        and logits.stride(-1) == 1
        and cpu.library() is not None
    )


def top(
    logits: Tensor, k: int, temperature: float | None = None, level: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `ops.top`."""
    library = cpu.library(level)
    assert library is not None, "callers check `serves`"
    n, width = logits.shape
    values = torch.empty(n, k)
    tokens = torch.empty(n, k, dtype=torch.int64)
    # The largest rate makes all probabilities but those of the largest logit 0.
    tiny = torch.finfo(torch.float32).tiny
    rate = 0.0 if temperature is None else 1 / max(temperature, tiny)
    pointers = (tensor.data_ptr() for tensor in (logits, values, tokens))
    arguments = _Top(*pointers, n, width, logits.stride(0), k, rate, cpu.DTYPES[logits.dtype])
    library.offload_rt_top(ctypes.byref(arguments), torch.get_num_threads())
    return values, tokens
