"""What each op means, in plain torch."""

from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_rt.chunks import MOST_SCORES


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32 or better as transformers computes
    it.

    x (..., d), weight (d,); returns x's shape and dtype.
    """
    # A copy where gradients flow, which need x as it is now, and `add_rms_norm` adds to it.
    wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=torch.is_grad_enabled())
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of x + delta, which x becomes; x, delta (n, d)."""
    return rms_norm(x.add_(delta), weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate, times up; all (n, d)."""
    return F.silu(gate).mul_(up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of the Llama family.

    x (n, heads, head_dim); cos, sin (n, head_dim); returns x's shape.
    """
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor,
    values: Tensor,
    rows: slice | Tensor,
) -> Tensor:  # fmt: skip
    """Rotate q and k by the cosines and sines of `rotary`, None: not at all; write k and v to rows
    of a layer's cache.

    q             (n, heads, head_dim)
    k, v          (n, kv_heads, head_dim)
    keys, values  (kv_heads, capacity, head_dim), written
    rows          n rows of them, a tensor being int64
    Returns q, rotated.
    """
    if rotary is not None:
        q = rotate(q, *rotary)
        k = rotate(k, *rotary)
    keys[:, rows] = k.transpose(0, 1)
    values[:, rows] = v.transpose(0, 1)
    return q


def tree_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Attention under a dense mask; heads of a group share their KV head.

    q        (n, heads, head_dim)
    k, v     (kv_heads, n_keys, head_dim), heads a multiple of kv_heads
    visible  (n, n_keys) bool, True where a row sees a key; None: everywhere
    Returns (n, heads, head_dim).
    """
    if q.is_cuda and visible is not None and q.shape[1] != k.shape[0]:
        return grouped_attention(q, k, v, visible, scale)
    # torch copies keys for each head
    if q.device.type == "cpu" and visible is None and q.shape[1] != k.shape[0]:
        return partial_attention(q, k, v, None, scale)[0]
    return torch_attention(q, k, v, visible, scale)


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float
) -> Tensor:
    """The same by torch's own kernels."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=visible,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[0],
    )
    return out[0].transpose(0, 1)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """The same, with the heads of a group as rows of one head: torch's fast CUDA kernels take a
    mask or groups, not both.
    """
    n = q.shape[0]
    n_groups = k.shape[0]
    head_dim = q.shape[2]
    rows = q.view(n, n_groups, -1, head_dim).permute(1, 2, 0, 3).reshape(n_groups, -1, head_dim)
    mask = visible.repeat(rows.shape[1] // n, 1)
    out = F.scaled_dot_product_attention(rows[None], k[None], v[None], attn_mask=mask, scale=scale)[
        0
    ]
    return out.view(n_groups, -1, n, head_dim).permute(2, 0, 1, 3).reshape(q.shape)


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to a part of the keys, computed in float32 or better, to be merged with that to the
    others.

    Arguments as of `tree_attention`; a row may see nothing here. Scores s become softcap * tanh(s /
    softcap).
    Returns the output (n, heads, head_dim), zeros for a row that sees nothing, and (n, heads)
    float32 or better: the log-sum-exp of the scaled scores, minus infinity for such a row.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    n, heads, head_dim = q.shape
    is_flash = (
        q.device.type == "cpu" and softcap is None and head_dim == v.shape[-1] and k.shape[1] > 0
    )
    most = max(MOST_SCORES // max(k.shape[1] * (1 if is_flash else heads), 1), 1)
    if n > most:
        masks = repeat(None) if visible is None else torch.split(visible, most)
        pairs = zip(torch.split(q, most), masks, strict=False)
        parts = [partial_attention(one, k, v, mask, scale, softcap) for one, mask in pairs]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    if is_flash:
        return _flash_attention(q, k, v, visible, scale)
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


def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`partial_attention` by torch's own kernel for a CPU, where products and a softmax take five
    to ten times as long.
    """
    n = q.shape[0]
    n_groups = k.shape[0]
    head_dim = q.shape[2]
    rows = q.view(n, n_groups, -1, head_dim).permute(2, 1, 0, 3)
    mask = None
    if visible is not None:
        mask = q.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
    # the heads of a group are rows of one and read its keys together; a mask would have to be there
    # for each of them
    else:
        rows = rows.transpose(0, 1).reshape(1, n_groups, -1, head_dim)
    pair = (one.expand(len(rows), *one.shape) for one in (k, v))
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, *pair, attn_mask=mask, scale=scale
    )
    out = found[0]
    lse = found[1][..., None]
    if visible is None:
        out, lse = (one.view(n_groups, -1, n, one.shape[-1]).transpose(0, 1) for one in (out, lse))
    out, lse = (one.permute(2, 1, 0, 3).reshape(n, q.shape[1], -1) for one in (out, lse))
    if visible is not None:
        is_blind = ~visible.any(1)[:, None, None]
        out = out.masked_fill(is_blind, 0.0)
        lse = lse.masked_fill(is_blind, -torch.inf)
    return out, lse[..., 0]


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention to two parts of the keys.

    out_a, out_b  (n, heads, head_dim)
    lse_a, lse_b  (n, heads) log-sum-exp of the scores, minus infinity where a row saw nothing of a
                  part
    Returns both, joined, in the same shapes and dtypes.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.clamp_min(torch.finfo(lse.dtype).min)
    parts = [out * (part - base).exp()[..., None] for out, part in ((out_a, lse_a), (out_b, lse_b))]
    return (parts[0] + parts[1]).to(out_a.dtype), lse


def commit_rows(keys: Tensor, values: Tensor, rows: Tensor, first: int) -> None:
    """Move rows `first + rows` to `first` and on, in place.

    keys, values  (n_layers, n_kv_heads, capacity, head_dim)
    rows          (n,) int64, ascending, rows[i] >= i
    """
    for store in (keys, values):
        store[:, :, first : first + len(rows)] = store.index_select(2, rows + first)
