"""Tree attention on a CPU. The order of sums depends only on the visible keys of a row.

See csrc/attention_cpu.h.
"""

from ctypes import Structure

import torch
from torch import Tensor

from offload_rt.ops import cpu
from offload_rt.ops.cpu import ADDRESS, FLOAT, INT, SIZE
from offload_rt.ops.tree_mask import TreeMask


class _TreeAttention(Structure):
    """`TreeAttention` of csrc/attention_cpu.cpp."""

    _fields_ = cpu.fields(
        (ADDRESS, "q k v out lse sinks bits depths"),
        (SIZE, "n n_heads n_kv_heads k_dim v_dim n_words q_row q_head k_head k_row v_head v_row"),
        (SIZE, "n_before n_tree window"), (FLOAT, "scale softcap"), (INT, "dtype"),
    )  # fmt: skip


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel applies to q (n, heads, dim), k and v (kv_heads, n_keys, dim)."""
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
    n_before, n_tree = mask.extent.tolist()
    bits = mask.bits.contiguous()
    depths = mask.depths.contiguous()
    wide_sinks = None if sinks is None else sinks.float().contiguous()
    pointers = (
        None if x is None else x.data_ptr() for x in (q, k, v, out, lse, wide_sinks, bits, depths)
    )
    strides = q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    sizes = n, n_heads, len(k), k_dim, v.shape[2], bits.shape[1]
    extent = n_before, n_tree, mask.window or 0
    numbers = scale, softcap or 0.0, cpu.DTYPES[q.dtype]
    arguments = _TreeAttention(*pointers, *sizes, *strides, *extent, *numbers)
    cpu.call("offload_rt_tree_attention", arguments)
    return out, lse
