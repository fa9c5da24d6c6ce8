"""What each op means, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32 or better as transformers computes it.

    x (..., d), weight (d,); returns x's shape and dtype.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of the Llama family.

    x (n, heads, head_dim); cos, sin (n, head_dim); returns x's shape.
    """
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]


def tree_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """Attention of new rows to a prefix and to each other; grouped KV heads are shared, not repeated.

    q        (n, heads, head_dim)
    k, v     (kv_heads, n_keys, head_dim), heads a multiple of kv_heads
    visible  (n, n_keys) bool, True where a row may look; None: everywhere
    Returns (n, heads, head_dim).
    """
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=q.shape[1] != k.shape[0]
    )
    return out[0].transpose(0, 1)
