"""Operations between the products of a layer, and of logits, on a CPU.

See csrc/attention_cpu.h, csrc/layer_cpu.h and csrc/sampling_cpu.cpp, which define the structures.
The bits of a row are independent of further rows, of attention also of invisible keys.
"""

from ctypes import Structure

import torch
from torch import Tensor

from offload_rt.ops import cpu
from offload_rt.ops.cpu import ADDRESS, FLOAT, INT, SIZE
from offload_rt.ops.tree_mask import TreeMask


class _Norm(Structure):
    _fields_ = cpu.fields(
        (ADDRESS, "x delta weight out"), (SIZE, "n n_heads dim x_row x_head delta_row"),
        (FLOAT, "eps"), (INT, "dtype"),
    )  # fmt: skip


class _Gate(Structure):
    _fields_ = cpu.fields((ADDRESS, "gate up out"), (SIZE, "n dim gate_row up_row"), (INT, "dtype"))


class _Rotary(Structure):
    _fields_ = cpu.fields(
        (ADDRESS, "q k v cos sin out keys values"), (SIZE, "n n_heads n_kv_heads dim v_dim"),
        (SIZE, "q_row q_head k_row k_head v_row v_head cos_row sin_row"),
        (SIZE, "key_head key_row value_head value_row"), (INT, "dtype has_pairs"),
        (ADDRESS, "q_norm k_norm"), (FLOAT, "eps"),
    )  # fmt: skip


class _TreeAttention(Structure):
    _fields_ = cpu.fields(
        (ADDRESS, "q k v out lse sinks bits depths"),
        (SIZE, "n n_heads n_kv_heads k_dim v_dim n_words q_row q_head k_head k_row v_head v_row"),
        (SIZE, "n_before n_tree window"), (FLOAT, "scale softcap"), (INT, "dtype"),
    )  # fmt: skip


class _Top(Structure):
    _fields_ = cpu.fields(
        (ADDRESS, "logits values tokens"), (SIZE, "n width row k"), (FLOAT, "rate"), (INT, "dtype")
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, delta: Tensor | None = None) -> Tensor:
    """Compute `ops.rms_norm` of x (n, d) or (n, heads, d); with delta, `ops.add_rms_norm`."""
    rows = x if x.dim() == 3 else x[:, None]
    out = x.new_empty(x.shape)
    strides = rows.stride(0), rows.stride(1), 0 if delta is None else delta.stride(0)
    pointers = cpu.addresses(x, delta, weight, out)
    arguments = _Norm(*pointers, *rows.shape, *strides, eps, cpu.DTYPES[x.dtype])
    cpu.call("offload_rt_rms_norm", arguments)
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `ops.silu_mul` of gate and up (n, d)."""
    out = gate.new_empty(gate.shape)
    pointers = cpu.addresses(gate, up, out)
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
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], v.shape[2])
    strides = (stride for x in (q, k, v) for stride in x.stride()[:2])
    arguments = _Rotary(
        *cpu.addresses(q, k, v, cos, sin, out, keys, values), *sizes, *strides, cos.stride(0),
        sin.stride(0), *keys.stride()[:2], *values.stride()[:2], cpu.DTYPES[q.dtype],
    )  # fmt: skip
    cpu.call("offload_rt_rotate_and_store", arguments)
    return out


def attends(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `tree_attention` applies to q (n, heads, dim), k and v (kv_heads, n_keys, dim)."""
    return q.shape[-1] % 2 == 0 and cpu.serves(q, k, v)  # keys of bfloat16 are packed in pairs


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `ops.tree_attention`: output (n, heads, head_dim of v), log-sum-exp (n, heads).

    The log-sum-exp is float32 and excludes sinks.
    """
    n, n_heads, k_dim = q.shape
    out = q.new_empty(n, n_heads, v.shape[2])
    lse = q.new_empty(n, n_heads, dtype=torch.float32)
    bits = mask.bits.contiguous()
    depths = mask.depths.contiguous()
    wide_sinks = None if sinks is None else sinks.float().contiguous()
    pointers = cpu.addresses(q, k, v, out, lse, wide_sinks, bits, depths)
    sizes = n, n_heads, len(k), k_dim, v.shape[2], bits.shape[1]
    strides = (stride for x in (q, k, v) for stride in x.stride()[:2])
    extent = *mask.extent.tolist(), mask.window or 0
    numbers = scale, softcap or 0.0, cpu.DTYPES[q.dtype]
    arguments = _TreeAttention(*pointers, *sizes, *strides, *extent, *numbers)
    cpu.call("offload_rt_tree_attention", arguments)
    return out, lse


def top(logits: Tensor, k: int, temperature: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute `ops.top`."""
    n, width = logits.shape
    values = torch.empty(n, k)
    tokens = torch.empty(n, k, dtype=torch.int64)
    # The largest rate makes all probabilities but those of the largest logit 0.
    rate = 0.0 if temperature is None else 1 / max(temperature, torch.finfo(torch.float32).tiny)
    pointers = cpu.addresses(logits, values, tokens)
    arguments = _Top(*pointers, n, width, logits.stride(0), k, rate, cpu.DTYPES[logits.dtype])
    cpu.call("offload_rt_top", arguments)
    return values, tokens
