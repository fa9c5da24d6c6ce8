"""RMS norm, gated SiLU and rotary embedding on a CPU, independent of further rows.

See csrc/layer_cpu.h.
"""

import ctypes

import torch
from torch import Tensor

from offload_rt.ops import cpu


class _Norm(ctypes.Structure):
    """`Norm` of csrc/layer_cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "delta", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("n", "n_heads", "dim", "x_row", "x_head",
            "delta_row")),
        ("eps", ctypes.c_float), ("dtype", ctypes.c_int32),
    )  # fmt: skip


class _Gate(ctypes.Structure):
    """`Gate` of csrc/layer_cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("gate", "up", "out")),
        *((name, ctypes.c_int64) for name in ("n", "dim", "gate_row", "up_row")),
        ("dtype", ctypes.c_int32),
    )


class _Rotary(ctypes.Structure):
    """`Rotary` of csrc/layer_cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cos", "sin", "out", "keys",
            "values")),
        *((name, ctypes.c_int64) for name in ("n", "n_heads", "n_kv_heads", "dim", "v_dim")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_row", "k_head", "v_row",
            "v_head", "cos_row", "sin_row", "key_head", "key_row", "value_head", "value_row")),
        *((name, ctypes.c_int32) for name in ("dtype", "has_pairs")),
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm")), ("eps", ctypes.c_float),
    )  # fmt: skip


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels apply to these tensors."""
    x = tensors[0]
    return (
        x.device.type == "cpu"
        and x.dtype in cpu.DTYPES
        and all(
            tensor.dtype == x.dtype and tensor.stride(-1) == 1 and not tensor.requires_grad
            for tensor in tensors
        )
        and cpu.library() is not None
    )


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None, level: int | None = None,
    n_threads: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute `ops.rms_norm` of x (n, d) or (n, heads, d); with delta, `ops.add_rms_norm`."""
    rows = x if x.dim() == 3 else x[:, None]
    out = x.new_empty(x.shape)
    pointers = (None if t is None else t.data_ptr() for t in (x, delta, weight, out))
    strides = rows.stride(0), rows.stride(1), 0 if delta is None else delta.stride(0)
    arguments = _Norm(*pointers, *rows.shape, *strides, eps, cpu.DTYPES[x.dtype])
    _call("offload_rt_rms_norm", arguments, level, n_threads)
    return out


def silu_mul(
    gate: Tensor, up: Tensor, level: int | None = None, n_threads: int | None = None
) -> Tensor:
    """Compute `ops.silu_mul` of gate and up (n, d)."""
    out = gate.new_empty(gate.shape)
    pointers = (tensor.data_ptr() for tensor in (gate, up, out))
    arguments = _Gate(*pointers, *gate.shape, gate.stride(0), up.stride(0), cpu.DTYPES[gate.dtype])
    _call("offload_rt_silu_mul", arguments, level, n_threads)
    return out


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor,
    first: int, level: int | None = None, n_threads: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute `ops.rotate_and_store` for rows from `first` on."""
    cos, sin = rotary
    out = torch.empty(q.shape, dtype=q.dtype)
    keys = keys[:, first:]
    values = values[:, first:]
    tensors = (q, k, v, cos, sin, out, keys, values)
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], v.shape[2])
    strides = (stride for x in (q, k, v) for stride in x.stride()[:2])
    arguments = _Rotary(
        *(x.data_ptr() for x in tensors), *sizes, *strides, cos.stride(0), sin.stride(0),
        *keys.stride()[:2], *values.stride()[:2], cpu.DTYPES[q.dtype],
    )  # fmt: skip
    _call("offload_rt_rotate_and_store", arguments, level, n_threads)
    return out


def _call(name: str, arguments: ctypes.Structure, level: int | None, n_threads: int | None) -> None:
    library = cpu.library(level)
    assert library is not None, "callers check `serves`"
    getattr(library, name)(ctypes.byref(arguments), n_threads or torch.get_num_threads())
