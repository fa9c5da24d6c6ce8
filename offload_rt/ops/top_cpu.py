"""The most probable tokens of rows of logits on a CPU; see csrc/sampling_cpu.cpp."""

from ctypes import Structure

import torch
from torch import Tensor

from offload_rt.ops import cpu
from offload_rt.ops.cpu import ADDRESS, FLOAT, INT, SIZE


class _Top(Structure):
    """`Top` of csrc/sampling_cpu.cpp."""

    _fields_ = cpu.fields(
        (ADDRESS, "logits values tokens"), (SIZE, "n width row k"), (FLOAT, "rate"), (INT, "dtype")
    )


def top(logits: Tensor, k: int, temperature: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute `ops.top`."""
    n, width = logits.shape
    values = torch.empty(n, k)
    tokens = torch.empty(n, k, dtype=torch.int64)
    # The largest rate makes all probabilities but those of the largest logit 0.
    tiny = torch.finfo(torch.float32).tiny
    rate = 0.0 if temperature is None else 1 / max(temperature, tiny)
    pointers = (tensor.data_ptr() for tensor in (logits, values, tokens))
    arguments = _Top(*pointers, n, width, logits.stride(0), k, rate, cpu.DTYPES[logits.dtype])
    cpu.call("offload_rt_top", arguments)
    return values, tokens
