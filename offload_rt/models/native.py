"""Native decoder for Llama, Mistral, Qwen2 and Qwen3: pre-norm, rotary embeddings, gated SiLU."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import (
    Attention,
    CachedContext,
    LayerWeights,
    PassContext,
    TensorShape,
)
from offload_rt.models.rope import Rope

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt import ops
    from offload_rt.ops import decoder_cpu
else:
    from offload_rt.lazy import decoder_cpu, ops

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
# In the order of use.
MATRICES = (*QKV, "self_attn.o_proj", *GATE_UP, "mlp.down_proj")
EMBED = "model.embed_tokens"
NORM = "model.norm"
HEAD = "lm_head"
# Old Llama checkpoints store rotary frequencies, which the config determines.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class NativeDecoder(Architecture):
    """Architecture of the families in `families.py`.

    windows  per layer, number of visible positions including the row's; None for all
    n_mtp    multi-token prediction layers that checkpoints may contain in addition
    """

    supports_embeddings = True
    supports_layer_groups = True

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

    @property
    def shared_modules(self) -> tuple[str, str] | None:
        return EMBED, EMBED if self.tied else HEAD

    def layer_prefix(self, i: int) -> str:
        return f"model.layers.{i}."

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        return self._layer_tensors

    @cached_property
    def _layer_tensors(self) -> tuple[TensorShape, ...]:
        d = self.hidden_size
        m = self.intermediate_size
        q = self.n_heads * self.head_dim
        kv = self.n_kv_heads * self.head_dim
        head_norms = (
            norm("self_attn.q_norm", self.head_dim),
            norm("self_attn.k_norm", self.head_dim),
        )
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
        table = (self.vocab_size, self.hidden_size)
        head = () if self.tied else (TensorShape(f"{HEAD}.weight", table),)
        return (TensorShape(f"{EMBED}.weight", table), norm(NORM, self.hidden_size), *head)

    def is_unused(self, name: str) -> bool:
        """Ignore derived frequencies, copies of tied heads, and multi-token prediction layers."""
        drafting = (f"model.layers.{self.n_layers + i}." for i in range(self.n_mtp))
        return (
            (self.tied and name == f"{HEAD}.weight")
            or _DERIVED.fullmatch(name) is not None
            or (self.n_mtp > 0 and name.startswith(("mtp.", "model.mtp_layers.", *drafting)))
        )

    def row_inputs(
        self, positions: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Return cosines and sines, each (n, head_dim)."""
        return self.rope.cos_sin(positions, lengths, dtype)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return weights.rows(ids, EMBED), row_inputs

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """Apply attention and MLP, each on a norm of the residual stream."""
        h = ops.rms_norm(x, weights.vector("input_layernorm"), self.eps)
        return self.mlp(weights, x, self.attention(i, weights, h, context))

    def layer_group(
        self, weights: Mapping[int, LayerWeights], x: Tensor, context: CachedContext
    ) -> Tensor:
        """Apply layers in order; by a single call of the CPU library if it serves all."""
        segments = context.in_place() if x.device.type == "cpu" else None
        described = [self._described(i, part) for i, part in weights.items()] if segments else []
        kernels = [layer for layer in described if layer is not None]
        sizes = decoder_cpu.Sizes(self.n_heads, self.n_kv_heads, self.head_dim, self.eps)
        cos, sin = context.row_inputs
        if (
            segments
            and len(kernels) == len(weights)
            and decoder_cpu.decode(x, kernels, sizes, (cos, sin), segments)
        ):
            return x
        return super().layer_group(weights, x, context)

    def _described(self, i: int, weights: LayerWeights) -> decoder_cpu.Layer | None:
        """Return the library's description of a layer, kept with its weights; None without it."""
        if weights.kernel is None:
            matrices = [weights.stored(name) for name in MATRICES]
            known = [matrix for matrix in matrices if matrix is not None]
            if len(known) < len(matrices) or self.head_dim % 2:
                return None
            head_norms = ("self_attn.q_norm", "self_attn.k_norm") if self.qk_norm else ()
            norms = [
                weights.vector(name)
                for name in ("input_layernorm", "post_attention_layernorm", *head_norms)
            ]
            padded = [*norms, None, None][:4]
            weights.kernel = decoder_cpu.layer(i, padded, known, self.windows[i], weights.has_pairs)
        return weights.kernel

    def attention(self, i: int, weights: LayerWeights, h: Tensor, context: PassContext) -> Tensor:
        """Return attention's contribution (n, hidden_size) for the normed input h."""
        q, k, v = (part.view(len(part), -1, self.head_dim) for part in weights.linears(h, QKV))
        if self.qk_norm:
            q = ops.rms_norm(q, weights.vector("self_attn.q_norm"), self.eps)
            k = ops.rms_norm(k, weights.vector("self_attn.k_norm"), self.eps)
        cos, sin = context.row_inputs
        scale = self.head_dim**-0.5
        out = context.attend(Attention(i, q, k, v, scale, self.windows[i], (cos, sin)))
        return weights.linear(out.reshape(len(out), -1), "self_attn.o_proj")

    def mlp(self, weights: LayerWeights, x: Tensor, out: Tensor) -> Tensor:
        """Add the attention output `out` and the MLP output to the residual stream x, in place."""
        h = ops.add_rms_norm(x, out, weights.vector("post_attention_layernorm"), self.eps)
        return x.add_(weights.linear(ops.silu_mul(*weights.linears(h, GATE_UP)), "mlp.down_proj"))

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        return weights.linear(self.final_states(weights, x), EMBED if self.tied else HEAD)

    def final_states(self, weights: LayerWeights, x: Tensor) -> Tensor:
        return ops.rms_norm(x, weights.vector(NORM), self.eps)

    def flops(self, i: int, n_rows: int, context: int) -> float:
        """Count 2 per weight and row, and 4 per query element and visible key."""
        n_weights = sum(math.prod(shape) for _, shape in self.layer_tensors(i))
        return (
            2.0 * n_rows * n_weights
            + 4.0 * n_rows * (context + n_rows) * self.n_heads * self.head_dim
        )

    def window(self, i: int) -> int | None:
        return self.windows[i]

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """Return the larger of attention and MLP activations, plus the residual stream."""
        attention = 3 * (self.n_heads + self.n_kv_heads) * self.head_dim
        widest = max(attention, 3 * self.intermediate_size) + 4 * self.hidden_size
        return n_rows * widest * itemsize + n_logits * self.vocab_size * (itemsize + 8)


def norm(name: str, width: int) -> TensorShape:
    """Return the weight tensor of a norm."""
    return TensorShape(f"{name}.weight", (width,))


def _linears(n_out: Mapping[str, int], n_in: int, bias: bool) -> tuple[TensorShape, ...]:
    """Return matrices with a shared input, followed by their biases: stored as a single product."""
    weights = tuple(TensorShape(f"{name}.weight", (n, n_in)) for name, n in n_out.items())
    return weights + (
        tuple(TensorShape(f"{name}.bias", (n,)) for name, n in n_out.items()) if bias else ()
    )
