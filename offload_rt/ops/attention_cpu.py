"""Tree attention on a CPU. The order of sums depends only on the visible keys of a row.

See csrc/attention_cpu.h.
"""

import ctypes

import torch
from torch import Tensor

from offload_rt.ops import cpu
from offload_rt.ops.tree_mask import TreeMask


class _TreeAttention(ctypes.Structure):
    """`TreeAttention` of csrc/attention_cpu.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "sinks", "bits",
            "depths")),
        *((name, ctypes.c_int64) for name in ("n", "n_heads", "n_kv_heads", "k_dim", "v_dim",
            "n_words")),
        *((name, ctypes.c_int64) for name in ("q_row", "q_head", "k_head", "k_row", "v_head",
            "v_row")),
        *((name, ctypes.c_int64) for name in ("n_before", "n_tree", "window")),
        ("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("dtype", ctypes.c_int32),
    )  # fmt: skip


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel applies to q (n, heads, dim), k and v (kv_heads, n_keys, dim)."""
    return (
        q.device.type == "cpu"
        and q.dtype in cpu.DTYPES
        and q.dtype == k.dtype == v.dtype
        and q.shape[-1] % 2 == 0  # keys of bfloat16 are packed in pairs
        and all(x.stride(-1) == 1 and not x.requires_grad for x in (q, k, v))
        and cpu.library() is not None
    )


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float, softcap: float | None = None,
    sinks: Tensor | None = None, level: int | None = None, n_threads: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `ops.tree_attention`: output (n, heads, head_dim of v), log-sum-exp (n, heads).

    The log-sum-exp is float32 and excludes sinks.
    """
    library = cpu.library(level)
    assert library is not None, "callers check `serves`"
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
    sizes = (
        n,
        n_heads,
        len(k),
        k_dim,
        v.shape[2],
        bits.shape[1],
        *strides,
        n_before,
        n_tree,
        mask.window or 0,
    )
    arguments = _TreeAttention(*pointers, *sizes, scale, softcap or 0.0, cpu.DTYPES[q.dtype])
    library.offload_rt_tree_attention(ctypes.byref(arguments), n_threads or torch.get_num_threads())
    return out, lse
