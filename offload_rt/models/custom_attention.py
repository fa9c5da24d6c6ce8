"""Replacements for attention modules that bypass transformers' AttentionInterface."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Layer arguments with linear biases by position; layers receive the positions instead.
ALIBI = frozenset({"alibi", "position_bias"})
# Largest integer up to which bfloat16 represents all integers.
_EXACT = 256


def replace_attention(module: Any) -> bool:
    """Replace the attention code of a module, by its class or methods; return whether it applied.

    The module's `pass_cache` computes the attention.
    """
    kind = type(module).__name__
    if kind == "FalconLinear":  # a linear module with its own forward
        module.__class__ = nn.Linear
    if kind in _FORWARDS:
        module.forward = partial(_FORWARDS[kind], module)
    elif hasattr(module, "indexer"):
        module.indexer = _AllKeys()
    elif kind in _SCALED:
        module._attn = partial(_attend_scaled, module)
    else:
        return False
    return True


class _AllKeys(nn.Module):
    """Indexer of sparse attention for contexts within `index_topk`: it selects all keys."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Return no selection."""


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend with q, k and v (1, n_heads, n, dim); returns (1, n, n_heads, v_dim)."""
    is_local = getattr(module, "attention_type", None) == "local"
    window = module.config.window_size if is_local else None
    cache = module.__dict__["pass_cache"]
    out: Tensor = cache.attend(q.to(v.dtype), k.to(v.dtype), v, scale, window)
    return out


def _attend_scaled(
    module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> list[Tensor | None]:
    """Attention of the classes in `_SCALED`, without the mask."""
    if hasattr(module, "split_heads"):  # GPT transposes keys
        k = k.transpose(2, 3)
        divisor = q.shape[-1] ** 0.5 if module.scale else 1.0
    else:
        divisor = getattr(module, "scale_attn", getattr(module, "norm_factor", 1.0))
    return [_attend(module, q, k, v, 1 / divisor).transpose(1, 2), None]


def _falcon(
    module: Any, hidden_states: Tensor, alibi: Any, position_embeddings: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Forward of FalconAttention; each key head is stored once."""
    qkv = module.query_key_value(hidden_states)
    groups = qkv.view(*qkv.shape[:2], module.num_kv_heads, -1, module.head_dim)
    q = groups[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
    k, v = (groups[:, :, :, place].transpose(1, 2) for place in (-2, -1))
    code = sys.modules[type(module).__module__]
    if alibi is None:
        q, k = code.apply_rotary_pos_emb(q, k, *position_embeddings)
    else:
        q, k = _with_positions(q, k, _slopes(code, q), alibi)
    return module.dense(_attend(module, q, k, v, module.inv_norm_factor).flatten(2)), None


def _bloom(
    module: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    scale = module.inv_norm_factor
    slopes = _slopes(sys.modules[type(module).__module__], q) / scale
    q, k = _with_positions(q, k, slopes, alibi)
    return module.dense(_attend(module, q, k, v, scale).flatten(2)) + residual, None


def _mpt(
    module: Any, hidden_states: Tensor, position_bias: Tensor, **kwargs: Any
) -> tuple[Tensor, None]:
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = (
        part.view(*part.shape[:2], module.n_heads, -1).transpose(1, 2) for part in qkv.chunk(3, -1)
    )
    code = sys.modules[type(module).__module__]
    bias = code.build_mpt_alibi_tensor(module.n_heads, 2, device=q.device)
    q, k = _with_positions(q, k, -bias[:, 0, 0] / module.softmax_scale, position_bias)
    return module.out_proj(_attend(module, q, k, v, module.softmax_scale).flatten(2)), None


def _xglm(module: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    q, k, v = (
        project(hidden_states).view(*hidden_states.shape[:2], -1, module.head_dim).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    return module.out_proj(_attend(module, q, k, v, module.scaling).flatten(2)), None


def _slopes(code: Any, q: Tensor) -> Tensor:
    """Return the bias per position of each head, by the code of Bloom or Falcon."""
    ones = torch.ones(1, 2, dtype=torch.int64, device=q.device)
    bias: Tensor = code.build_alibi_tensor(ones, q.shape[1], torch.float32)
    return bias[:, 0, 1]


def _with_positions(
    q: Tensor, k: Tensor, slopes: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Append dimensions so that q k^T contains slope * key position.

    Softmax ignores the query's position. Slopes and positions are sums of two terms, so that
    16-bit products keep 16 bits of both. Eight dimensions keep rows aligned.
    """
    coarse = slopes.to(q.dtype).float()
    fine = slopes - coarse
    high = positions[0] // _EXACT * _EXACT
    low = positions[0] % _EXACT
    of_heads = torch.stack([coarse, coarse, fine, fine, *[torch.zeros_like(fine)] * 4], -1)
    of_keys = torch.stack([high, low, high, low, *[torch.zeros_like(low)] * 4], -1)
    q_more = of_heads[None, :, None].to(q.dtype).expand(*q.shape[:3], -1)
    k_more = of_keys[None, None].to(k.dtype).expand(*k.shape[:3], -1)
    return torch.cat([q, q_more], -1), torch.cat([k, k_more], -1)


# Classes with a method for scores and outputs: OpenAI GPT, GPT-Neo, GPT-J, CodeGen.
_SCALED = {
    "Attention", "GPTNeoSelfAttention", "GPTJAttention", "CodeGenAttention",
    "GPTNeoXJapaneseAttention",
}  # fmt: skip
_FORWARDS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "BloomAttention": _bloom,
    "FalconAttention": _falcon,
    "MptAttention": _mpt,
    "XGLMAttention": _xglm,
}
