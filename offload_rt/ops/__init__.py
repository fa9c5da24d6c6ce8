"""One entry point per operation: a kernel of csrc/ if built and applicable, else plain torch."""

import torch
from torch import Tensor

from offload_rt.ops import cpu, extension, layer_cpu, reference
from offload_rt.ops.transfer import fill, to_device, to_host
from offload_rt.ops.tree_mask import TreeMask, make_tree_mask
from offload_rt.ops.verification import Candidates, can_verify, verify

__all__ = [
    "Candidates", "TreeMask", "add_rms_norm", "can_verify", "commit_rows", "fill", "goes_by_extent",
    "make_tree_mask", "merge", "partial_attention", "rms_norm", "rotate_and_store", "silu_mul",
    "to_device", "to_host", "top", "tree_attention", "verify",
]  # fmt: skip

_HALVES = (torch.float16, torch.bfloat16)
_VECTOR_BYTES = 16
# A thread block keeps a normalized row in registers.
_WIDEST_NORMED = 16384


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension of x (n, d) or (n, heads, d), weight (d,)."""
    if cpu.serves(x, weight):
        return layer_cpu.rms_norm(x, weight, eps)
    has_kernel = _in_vectors(x, weight) and x.shape[-1] <= _WIDEST_NORMED
    out: Tensor = (extension.kernels() if has_kernel else reference).rms_norm(x, weight, eps)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add delta (n, d) to x in place and return `rms_norm` of x."""
    if cpu.serves(x, delta, weight):
        return layer_cpu.rms_norm(x, weight, eps, delta)
    has_kernel = _in_vectors(x, delta, weight) and x.shape[-1] <= _WIDEST_NORMED
    kernels = extension.kernels() if has_kernel else reference
    out: Tensor = kernels.add_rms_norm(x, delta, weight, eps)
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply SiLU of the gate by up; all (n, d)."""
    if cpu.serves(gate, up):
        return layer_cpu.silu_mul(gate, up)
    out: Tensor = (extension.kernels() if _in_vectors(gate, up) else reference).silu_mul(gate, up)
    return out


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor] | None,
    keys: Tensor, values: Tensor, rows: slice | Tensor,
) -> Tensor:  # fmt: skip
    """Rotate q and k, store k and v in a layer's cache, return q; see the reference."""
    tensors = q, k, v, *(rotary or ()), keys, values
    if isinstance(rows, slice) and rotary is not None and cpu.serves(*tensors):
        return layer_cpu.rotate_and_store(q, k, v, rotary, keys, values, rows.start)
    if rotary is None or q.shape[-1] % 16 or not _in_vectors(*tensors):
        return reference.rotate_and_store(q, k, v, rotary, keys, values, rows)
    at = (rows, 0) if isinstance(rows, Tensor) else (None, rows.start)
    out: Tensor = extension.kernels().rotate_and_store(q, k, v, *rotary, keys, values, *at)
    return out


def top(logits: Tensor, k: int, temperature: float | None = None) -> tuple[Tensor, Tensor]:
    """Return the k largest logits per row (n, width), in descending order, and their tokens.

    temperature  return their probabilities instead, without denormals; k is at most the width
    Returns (n, k) float32 and (n, k) int64. The first value of a row with NaN is NaN.
    """
    if cpu.serves(logits):
        return layer_cpu.top(logits, k, temperature)
    return reference.top(logits, k, temperature)


def _in_vectors(*tensors: Tensor) -> bool:
    """Whether kernels with 16-byte accesses apply; allocations are aligned to 16 bytes."""
    x = tensors[0]
    n = _VECTOR_BYTES // 2
    return extension.serves(x) and x.dtype in _HALVES and all(
        t.dtype == x.dtype and t.stride(-1) == 1 and not t.requires_grad
        and not any(size % n for size in (t.shape[-1], t.storage_offset(), *t.stride()[:-1]))
        for t in tensors
    )  # fmt: skip


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention of tree rows to the prefix, to their ancestors and to themselves.

    q      (n, heads, head_dim)
    k, v   (kv_heads, mask.n_keys, head_dim), heads a multiple of kv_heads; finite in unused rows;
           v may have a different width
    sinks  (heads,) additional softmax score per head without a value; None: no sinks
    Returns (n, heads, head_dim of v).
    """
    if layer_cpu.attends(q, k, v):
        return layer_cpu.tree_attention(q, k, v, mask, scale, softcap, sinks)[0]
    if sinks is not None or softcap is not None or goes_by_extent(q):
        out, lse = partial_attention(q, k, v, mask, scale, softcap)
        return out if sinks is None else out * (lse - sinks).sigmoid()[..., None].to(out.dtype)
    return reference.tree_attention(q, k, v, mask.dense(), scale)


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `tree_attention` to a part of the keys, and log-sum-exp (n, heads) for `merge`."""
    if layer_cpu.attends(q, k, v):
        return layer_cpu.tree_attention(q, k, v, mask, scale, softcap)
    if softcap is not None or not goes_by_extent(q) or q.shape[-1] != v.shape[-1]:
        return reference.partial_attention(q, k, v, mask.dense(), scale, softcap)
    out, lse = extension.kernels().tree_attention(q, k, v, *mask.tensors, mask.window or 0, scale)
    return out, lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention to two disjoint parts of the keys in one launch; see the reference."""
    if not extension.serves(out_a) or not {out_a.dtype, out_b.dtype} <= {*_HALVES, torch.float32}:
        return reference.merge(out_a, lse_a, out_b, lse_b)
    pairs = (tensor.contiguous() for tensor in (out_a, lse_a, out_b, lse_b))
    out, lse = extension.kernels().merge_attention(*pairs)
    return out, lse


def goes_by_extent(x: Tensor) -> bool:
    """Whether the kernel applies to (..., head_dim); its time is independent of unused rows."""
    return extension.serves(x) and x.dtype in _HALVES and x.shape[-1] in (64, 96, 128)


def commit_rows(keys: Tensor, values: Tensor, rows: Tensor, first: int) -> None:
    """Move rows `first + rows` of a cache to `first` onwards, in place; rows are on the host."""
    has_vectors = keys.shape[3] * keys.element_size() % _VECTOR_BYTES == 0
    if extension.serves(keys) and keys.shape == values.shape and has_vectors:
        extension.kernels().commit_rows(keys, values, rows, first)
    else:
        reference.commit_rows(keys, values, to_device([rows], keys.device)[0], first)
