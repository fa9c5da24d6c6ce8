"""The one decoder layer of every family."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.models.spec import ModelSpec

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class LayerWeights(Protocol):
    """The weights of one layer, however they are coded."""

    def vector(self, name: str) -> Tensor:
        """The one-dimensional weight of a norm."""

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x (n, n_in) through the matrix `name`, bias included: (n, n_out)."""


def decoder_layer(
    spec: ModelSpec, weights: LayerWeights, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend
) -> Tensor:
    """One layer on n tokens.

    x       (n, hidden_size)
    rope    cosines and sines, each (n, head_dim)
    attend  takes rotated q (n, n_heads, head_dim), rotated k and v (n, n_kv_heads, head_dim); keeps k and v in the cache
            and returns the attention's output (n, n_heads, head_dim)
    Returns (n, hidden_size).
    """
    h = ops.rms_norm(x, weights.vector("input_layernorm"), spec.eps)
    x = x + _attention(spec, weights, h, rope, attend)
    h = ops.rms_norm(x, weights.vector("post_attention_layernorm"), spec.eps)
    gate = torch.nn.functional.silu(weights.linear(h, "mlp.gate_proj"))
    return x + weights.linear(gate.mul_(weights.linear(h, "mlp.up_proj")), "mlp.down_proj")


def _attention(
    spec: ModelSpec, weights: LayerWeights, h: Tensor, rope: tuple[Tensor, Tensor], attend: Attend
) -> Tensor:
    heads = (h.shape[0], -1, spec.head_dim)
    q, k, v = (weights.linear(h, f"self_attn.{name}_proj").view(heads) for name in "qkv")
    if spec.qk_norm:
        q = ops.rms_norm(q, weights.vector("self_attn.q_norm"), spec.eps)
        k = ops.rms_norm(k, weights.vector("self_attn.k_norm"), spec.eps)
    out = attend(ops.rotate(q, *rope), ops.rotate(k, *rope), v)
    return weights.linear(out.reshape(h.shape[0], -1), "self_attn.o_proj")
