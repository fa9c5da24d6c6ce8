"""Native decoder for Llama, Mistral, Qwen2 and Qwen3: pre-norm, rotary embeddings, gated SiLU."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from offload_rt.errors import check_integer, config_error
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import (
    Attention,
    CachedContext,
    LayerWeights,
    PassContext,
    TensorShape,
)
from offload_rt.models.rope import Rope, RopeConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt import ops
    from offload_rt.ops import decoder_cpu
else:
    from offload_rt.lazy import decoder_cpu, ops

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
# In the order of use.
MATRICES = (*QKV, "self_attn.o_proj", *GATE_UP, "mlp.down_proj")
EMBED = "model.embed_tokens"
NORM = "model.norm"
HEAD = "lm_head"
# Larger than any real size. Bounds allocations from an invalid config before weights are checked.
MOST = 2**24
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# How transformers divides the modules of these families among ranks.
_TP_PLAN = {
    **{f"layers.*.{name}": "colwise" for name in (*QKV, *GATE_UP)},
    **{f"layers.*.{name}": "rowwise" for name in ("self_attn.o_proj", "mlp.down_proj")},
    **{f"layers.*.{name}": "replicated_with_grad_allreduce" for name in HEAD_NORMS},
}


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
        head_norms = HEAD_NORMS if self.qk_norm else ()
        return (
            weight("input_layernorm", d),
            *linears(dict(zip(QKV, (q, kv, kv), strict=True)), d, self.qkv_bias),
            *(weight(name, self.head_dim) for name in head_norms),
            *linears({"self_attn.o_proj": d}, q, self.o_bias),
            weight("post_attention_layernorm", d),
            *linears(dict.fromkeys(GATE_UP, m), d, self.mlp_bias),
            *linears({"mlp.down_proj": d}, m, self.mlp_bias),
        )

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        table = (self.vocab_size, self.hidden_size)
        head = () if self.tied else (weight(HEAD, *table),)
        return (weight(EMBED, *table), weight(NORM, self.hidden_size), *head)

    def is_unused(self, name: str) -> bool:
        drafting = (f"model.layers.{self.n_layers + i}." for i in range(self.n_mtp))
        return (
            (self.tied and name == f"{HEAD}.weight")
            # Old Llama checkpoints store rotary frequencies, which the config determines.
            or bool(re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name))
            or (self.n_mtp > 0 and name.startswith(("mtp.", "model.mtp_layers.", *drafting)))
        )

    def row_inputs(
        self, positions: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        return self.rope.cos_sin(positions, lengths, dtype)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return weights.rows(ids, EMBED), row_inputs

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        h = ops.rms_norm(x, weights.vector("input_layernorm"), self.eps)
        return self.mlp(weights, x, self.attention(i, weights, h, context))

    def layer_group(
        self, weights: Mapping[int, LayerWeights], x: Tensor, context: CachedContext
    ) -> Tensor:
        """Apply layers in order; by a single call of the CPU library if it serves all."""
        if x.device.type == "cpu" and (segments := context.in_place()):
            described = [self._described(i, part) for i, part in weights.items()]
            kernels = [layer for layer in described if layer is not None]
            sizes = decoder_cpu.Sizes(self.n_heads, self.n_kv_heads, self.head_dim, self.eps)
            cos, sin = context.row_inputs
            is_served = len(kernels) == len(weights)
            if is_served and decoder_cpu.decode(x, kernels, sizes, (cos, sin), segments):
                return x
        return super().layer_group(weights, x, context)

    def _described(self, i: int, weights: LayerWeights) -> decoder_cpu.Layer | None:
        """Return the library's description of a layer, kept with its weights; None without it."""
        if weights.kernel is None:
            matrices = [weights.stored(name) for name in MATRICES]
            known = [matrix for matrix in matrices if matrix is not None]
            if len(known) < len(matrices) or self.head_dim % 2:
                return None
            names = ("input_layernorm", "post_attention_layernorm", *HEAD_NORMS)
            norms = [weights.vector(name) for name in (names if self.qk_norm else names[:2])]
            padded = [*norms, None, None][:4]
            weights.kernel = decoder_cpu.layer(i, padded, known, self.windows[i], weights.has_pairs)
        return weights.kernel

    def attention(self, i: int, weights: LayerWeights, h: Tensor, context: PassContext) -> Tensor:
        """Return attention's contribution (n, hidden_size) for the normed input h."""
        q, k, v = (part.view(len(part), -1, self.head_dim) for part in weights.linears(h, QKV))
        if self.qk_norm:
            q = ops.rms_norm(q, weights.vector(HEAD_NORMS[0]), self.eps)
            k = ops.rms_norm(k, weights.vector(HEAD_NORMS[1]), self.eps)
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
        n_keys = context + n_rows
        return n_rows * (2.0 * n_weights + 4.0 * n_keys * self.n_heads * self.head_dim)

    def window(self, i: int) -> int | None:
        return self.windows[i]

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """Return the larger of attention and MLP activations, plus the residual stream."""
        attention = 3 * (self.n_heads + self.n_kv_heads) * self.head_dim
        widest = max(attention, 3 * self.intermediate_size) + 4 * self.hidden_size
        return n_rows * widest * itemsize + n_logits * self.vocab_size * (itemsize + 8)


def weight(name: str, *shape: int) -> TensorShape:
    """Return the weight tensor of a norm or a matrix."""
    return TensorShape(f"{name}.weight", shape)


def linears(n_out: Mapping[str, int], n_in: int, bias: bool) -> tuple[TensorShape, ...]:
    """Return matrices with a shared input, followed by their biases: stored as a single product."""
    weights = [weight(name, n, n_in) for name, n in n_out.items()]
    biases = [TensorShape(f"{name}.bias", (n,)) for name, n in n_out.items()]
    return (*weights, *(biases if bias else ()))


def native_decoder(raw: dict[str, Any], **changes: Any) -> NativeDecoder:
    """Build a decoder from a config.json; `changes`: biases, head norms and windows of families."""
    dtype_name = raw.get("dtype") or raw.get("torch_dtype")
    hidden_size = raw["hidden_size"]
    n_heads = raw["num_attention_heads"]
    n_layers = raw["num_hidden_layers"]
    n_kv_heads = raw.get("num_key_value_heads") or n_heads
    eps = raw["rms_norm_eps"]
    activation = raw.get("hidden_act", "silu")
    is_grouped = n_heads % n_kv_heads == 0
    is_even = raw.get("head_dim") or hidden_size % n_heads == 0
    n_mtp = raw.get("num_nextn_predict_layers") or 0
    check_integer("num_nextn_predict_layers", n_mtp, 0, MOST)
    for name, value, holds, need in (
        ("dtype", dtype_name, dtype_name in (None, *_DTYPES), ", ".join(_DTYPES)),
        ("num_key_value_heads", n_kv_heads, is_grouped, f"a divisor of {n_heads} heads"),
        ("hidden_size", hidden_size, is_even, f"a multiple of {n_heads} heads"),
        ("hidden_act", activation, activation == "silu", "silu"),
        ("rms_norm_eps", eps, type(eps) in (int, float) and 0 <= eps < math.inf, "a number >= 0"),
    ):
        if not holds:
            raise config_error(f"{name} {value!r} is not supported", need=need)
    head_dim = raw.get("head_dim") or hidden_size // n_heads
    decoder = NativeDecoder(
        family=raw["model_type"],
        dtype_name=dtype_name,
        n_layers=n_layers,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=raw["intermediate_size"],
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        max_positions=raw["max_position_embeddings"],
        eps=eps,
        tied=raw.get("tie_word_embeddings", False),
        windows=(None,) * n_layers,
        rope=Rope(RopeConfig.from_config(raw, head_dim)),
        n_mtp=n_mtp,
        tp_plan=_TP_PLAN,
    )
    return replace(decoder, **changes)
