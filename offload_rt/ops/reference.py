"""Reference implementation of each operation in plain torch."""

from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_rt.chunks import MAX_SCORES


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `ops.rms_norm`, at least in float32 as in transformers."""
    # Copy for gradients: backward needs this x, and `add_rms_norm` changes it in place.
    wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=torch.is_grad_enabled())
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `ops.add_rms_norm`."""
    return rms_norm(x.add_(delta), weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `ops.silu_mul`."""
    return F.silu(gate).mul_(up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding in the half-split layout of the Llama family.

    x (n, heads, head_dim); cos, sin (n, head_dim); returns x's shape.
    """
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor] | None,
    keys: Tensor, values: Tensor, rows: slice | Tensor,
) -> Tensor:  # fmt: skip
    """Rotate q and k by cosines and sines (None: no rotation); store k and v in a layer's cache.

    q             (n, heads, head_dim)
    k, v          (n, kv_heads, head_dim)
    keys, values  (kv_heads, capacity, head_dim), written
    rows          n rows of the cache; a tensor is int64
    Returns the rotated q.
    """
    if rotary is not None:
        q = rotate(q, *rotary)
        k = rotate(k, *rotary)
    keys[:, rows] = k.transpose(0, 1)
    values[:, rows] = v.transpose(0, 1)
    return q


def tree_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Compute `ops.tree_attention` with a dense mask.

    visible  (n, n_keys) bool; None: all visible

    The heads of a group are rows of a single head: torch's fast CUDA kernels accept a mask or
    groups, not both, and its CPU kernels copy keys for each head.
    """
    n, heads, head_dim = q.shape
    rows = q.reshape(n, len(k), -1, head_dim).permute(1, 2, 0, 3).reshape(len(k), -1, head_dim)
    mask = None if visible is None else visible.repeat(heads // len(k), 1)
    out = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=mask, scale=scale)
    return out.view(len(k), -1, n, v.shape[2]).permute(2, 0, 1, 3).reshape(n, heads, -1)


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention to a part of the keys, at least in float32, for `merge`.

    Arguments as in `tree_attention`; softcap replaces scores s by softcap * tanh(s / softcap).
    Returns the output (n, heads, head_dim) and the log-sum-exp (n, heads) of the scaled scores.
    A row without visible keys has zeros and minus infinity.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    n, heads, head_dim = q.shape
    max_rows = max(MAX_SCORES // max(k.shape[1] * heads, 1), 1)
    if n > max_rows:
        masks = repeat(None) if visible is None else torch.split(visible, max_rows)
        pairs = zip(torch.split(q, max_rows), masks, strict=False)
        parts = [partial_attention(rows, k, v, mask, scale, softcap) for rows, mask in pairs]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    rows = q.view(n, len(k), -1, head_dim).permute(1, 2, 0, 3).reshape(len(k), -1, head_dim)
    scores = (rows.to(wide) * scale) @ k.transpose(1, 2).to(wide)
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible.repeat(heads // len(k), 1), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse.clamp_min(torch.finfo(wide).min)).exp() @ v.to(wide)
    out, lse = (
        x.view(len(k), -1, n, x.shape[-1]).permute(2, 0, 1, 3).reshape(n, heads, -1)
        for x in (out, lse)
    )
    return out.to(q.dtype), lse[..., 0]


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention to two disjoint parts of the keys.

    out_a, out_b  (n, heads, head_dim)
    lse_a, lse_b  (n, heads) log-sum-exp of the scores, minus infinity without visible keys
    Returns the joined output and log-sum-exp in the same shapes and dtypes.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.clamp_min(torch.finfo(lse.dtype).min)
    parts = [out * (part - base).exp()[..., None] for out, part in ((out_a, lse_a), (out_b, lse_b))]
    return (parts[0] + parts[1]).to(out_a.dtype), lse


def commit_rows(keys: Tensor, values: Tensor, rows: Tensor, first: int) -> None:
    """Move rows `first + rows` to `first` onwards, in place.

    keys, values  (n_layers, n_kv_heads, capacity, head_dim)
    rows          (n,) int64, ascending, rows[i] >= i
    """
    for store in (keys, values):
        store[:, :, first : first + len(rows)] = store.index_select(2, rows + first)


def top(logits: Tensor, k: int, temperature: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute `ops.top`."""
    values = logits.float() if temperature is None else probs_of(logits.float(), temperature)
    best = values.topk(k, dim=-1)
    return best.values, best.indices


def probs_of(logits: Tensor, temperature: float) -> Tensor:
    """Compute distributions (rows, vocabulary) in float32, with denormals flushed to 0.

    Verification rules cannot divide by denormals.
    """
    # Shift the largest logit to 0: tiny temperatures then underflow to probability 0 only.
    logits = logits - logits.amax(-1, keepdim=True)
    probs = torch.softmax(logits / max(temperature, torch.finfo(logits.dtype).tiny), -1)
    return probs.masked_fill_(probs < torch.finfo(probs.dtype).tiny, 0.0)
