"""RMS norm, gated SiLU and rotary embedding on a CPU, independent of further rows.

See csrc/layer_cpu.h.
"""

from ctypes import Structure

import torch
from torch import Tensor

from offload_rt.ops import cpu
from offload_rt.ops.cpu import ADDRESS, FLOAT, INT, SIZE


class _Norm(Structure):
    """`Norm` of csrc/layer_cpu.cpp."""

    _fields_ = cpu.fields(
        (ADDRESS, "x delta weight out"), (SIZE, "n n_heads dim x_row x_head delta_row"),
        (FLOAT, "eps"), (INT, "dtype"),
    )  # fmt: skip


class _Gate(Structure):
    """`Gate` of csrc/layer_cpu.cpp."""

    _fields_ = cpu.fields((ADDRESS, "gate up out"), (SIZE, "n dim gate_row up_row"), (INT, "dtype"))


class _Rotary(Structure):
    """`Rotary` of csrc/layer_cpu.cpp."""

    _fields_ = cpu.fields(
        (ADDRESS, "q k v cos sin out keys values"), (SIZE, "n n_heads n_kv_heads dim v_dim"),
        (SIZE, "q_row q_head k_row k_head v_row v_head cos_row sin_row"),
        (SIZE, "key_head key_row value_head value_row"), (INT, "dtype has_pairs"),
        (ADDRESS, "q_norm k_norm"), (FLOAT, "eps"),
    )  # fmt: skip


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """Compute `ops.rms_norm` of x (n, d) or (n, heads, d); with delta, `ops.add_rms_norm`."""
    rows = x if x.dim() == 3 else x[:, None]
    out = x.new_empty(x.shape)
    pointers = (None if t is None else t.data_ptr() for t in (x, delta, weight, out))
    strides = rows.stride(0), rows.stride(1), 0 if delta is None else delta.stride(0)
    arguments = _Norm(*pointers, *rows.shape, *strides, eps, cpu.DTYPES[x.dtype])
    cpu.call("offload_rt_rms_norm", arguments)
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `ops.silu_mul` of gate and up (n, d)."""
    out = gate.new_empty(gate.shape)
    pointers = (tensor.data_ptr() for tensor in (gate, up, out))
    arguments = _Gate(*pointers, *gate.shape, gate.stride(0), up.stride(0), cpu.DTYPES[gate.dtype])
    cpu.call("offload_rt_silu_mul", arguments)
    return out


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor,
    first: int,
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
    cpu.call("offload_rt_rotate_and_store", arguments)
    return out
