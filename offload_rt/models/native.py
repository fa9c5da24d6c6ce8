"""The decoder of Llama, Mistral, Qwen2 and Qwen3: RMS norms before attention and MLP, rotary embeddings, gated SiLU."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offload_rt.models.architecture import Architecture, LayerWeights, PassContext, TensorShape
from offload_rt.models.rope import Rope

if TYPE_CHECKING:
    import torch
    from torch import Tensor

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
EMBED, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
# Old Llama checkpoints carry the rotary frequencies, which follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class NativeDecoder(Architecture):
    """The architecture of the families in `families.py`.

    windows  per layer: how many positions back a token sees, itself included; None: all of them
    n_mtp    layers for multi-token prediction that its checkpoints may hold besides
    """

    intermediate_size: int
    n_heads: int
    eps: float
    tied: bool
    windows: tuple[int | None, ...]
    rope: Rope = field(compare=False, repr=False)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    n_mtp: int = 0

    def layer_prefix(self, i: int) -> str:
        """As transformers names the layers of these families."""
        return f"model.layers.{i}."

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """The same in every layer."""
        d, m = self.hidden_size, self.intermediate_size
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        head_norms = (norm("self_attn.q_norm", self.head_dim), norm("self_attn.k_norm", self.head_dim))
        return (
            norm("input_layernorm", d),
            *_linears(dict(zip(QKV, (q, kv, kv), strict=True)), d, self.qkv_bias),
            *(head_norms if self.qk_norm else ()),
            *_linears({"self_attn.o_proj": d}, q, self.o_bias),
            norm("post_attention_layernorm", d),
            *_linears(dict.fromkeys(GATE_UP, m), d, self.mlp_bias),
            *_linears({"mlp.down_proj": d}, m, self.mlp_bias),
        )

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """Embedding, last norm, and the head unless it is tied to the embedding."""
        table = (self.vocab_size, self.hidden_size)
        head = () if self.tied else (TensorShape(f"{HEAD}.weight", table),)
        return (TensorShape(f"{EMBED}.weight", table), norm(NORM, self.hidden_size), *head)

    def is_unused(self, name: str) -> bool:
        """Derived frequencies, a stored copy of a tied head (transformers takes the embedding, too), layers that only draft."""
        drafting = (f"model.layers.{self.n_layers + i}." for i in range(self.n_mtp))
        return (
            (self.tied and name == f"{HEAD}.weight")
            or _DERIVED.fullmatch(name) is not None
            or (self.n_mtp > 0 and name.startswith(("mtp.", "model.mtp_layers.", *drafting)))
        )

    def row_inputs(self, positions: Tensor, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Cosines and sines, each (n, head_dim)."""
        return self.rope.cos_sin(positions, lengths, dtype)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Rows of the embedding."""
        return weights.rows(ids, EMBED), row_inputs

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """Attention and MLP, each on a norm of the residual stream and added to it."""
        from offload_rt import ops  # not at the top: a plan computes nothing

        h = ops.rms_norm(x, weights.vector("input_layernorm"), self.eps)
        return self.mlp(weights, x, self.attention(i, weights, h, context))

    def attention(self, i: int, weights: LayerWeights, h: Tensor, context: PassContext) -> Tensor:
        """What attention adds to the residual stream (n, hidden_size), of its norm h."""
        from offload_rt import ops

        q, k, v = (one.view(len(one), -1, self.head_dim) for one in weights.linears(h, QKV))
        if self.qk_norm:
            q = ops.rms_norm(q, weights.vector("self_attn.q_norm"), self.eps)
            k = ops.rms_norm(k, weights.vector("self_attn.k_norm"), self.eps)
        cos, sin = context.row_inputs
        out = context.attend(i, q, k, v, scale=self.head_dim**-0.5, window=self.windows[i], rotary=(cos, sin))
        return weights.linear(out.reshape(len(out), -1), "self_attn.o_proj")

    def mlp(self, weights: LayerWeights, x: Tensor, out: Tensor) -> Tensor:
        """The residual stream x behind the layer, which it becomes; `out` of attention is added to it first."""
        from offload_rt import ops

        h = ops.add_rms_norm(x, out, weights.vector("post_attention_layernorm"), self.eps)
        return x.add_(weights.linear(ops.silu_mul(*weights.linears(h, GATE_UP)), "mlp.down_proj"))

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """The last norm and the head."""
        from offload_rt import ops

        return weights.linear(ops.rms_norm(x, weights.vector(NORM), self.eps), EMBED if self.tied else HEAD)

    def flops(self, i: int, n_rows: int, context: int) -> float:
        """Two for each weight and row, and four for each number of q and key that it meets."""
        n_weights = sum(math.prod(shape) for _, shape in self.layer_tensors(i))
        return 2.0 * n_rows * n_weights + 4.0 * n_rows * (context + n_rows) * self.n_heads * self.head_dim

    def window(self, i: int) -> int | None:
        """As the config says."""
        return self.windows[i]

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """The wider of attention and MLP, beside the residual stream."""
        attention = 3 * (self.n_heads + self.n_kv_heads) * self.head_dim
        widest = max(attention, 3 * self.intermediate_size) + 4 * self.hidden_size
        return n_rows * widest * itemsize + n_logits * self.vocab_size * (itemsize + 8)


def norm(name: str, width: int) -> TensorShape:
    """The weights of a norm."""
    return TensorShape(f"{name}.weight", (width,))


def _linears(n_out: Mapping[str, int], n_in: int, bias: bool) -> tuple[TensorShape, ...]:
    """Matrices of the same input, and behind them their biases: back to back, they are one product."""
    weights = tuple(TensorShape(f"{name}.weight", (n, n_in)) for name, n in n_out.items())
    return weights + (tuple(TensorShape(f"{name}.bias", (n,)) for name, n in n_out.items()) if bias else ())
