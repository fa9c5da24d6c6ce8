"""Mixtures with the attention and norms of the native decoder, and transformers' routers.

A layer outside of its products takes a third of the time of transformers' modules on a CPU.
"""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.models.layers import LayerWeights, PassContext
from offload_rt.models.native import NativeDecoder
from offload_rt.models.native_config import native_decoder
from offload_rt.models.transformers import TransformersModel

# Model types with Llama's attention, and whether it norms queries and keys. Biases are part of the
# weights.
_HAS_QK_NORM = {"mixtral": False, "qwen2_moe": False, "qwen3_moe": True}


@dataclass(frozen=True)
class NativeMixture(TransformersModel):
    """A mixture of transformers; the decoder computes all but its routers and experts."""

    decoder: NativeDecoder = field(compare=False, repr=False, kw_only=True)

    embeds_on_all_stages = False

    def row_inputs(
        self, positions: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Return cosines and sines, each (n, head_dim)."""
        return self.decoder.row_inputs(positions, lengths, dtype)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Look up the embedding."""
        return self.decoder.embed(weights, ids, row_inputs)

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """Apply attention and the mixture, each on a norm of the residual stream."""
        eps = self.decoder.eps
        h = ops.rms_norm(x, weights.vector("input_layernorm"), eps)
        out = self.decoder.attention(i, weights, h, context)
        h = ops.add_rms_norm(x, out, weights.vector("post_attention_layernorm"), eps)
        return x.add_(self.model.mlp(i, weights, self._parts(i), h))

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Apply the final norm and the head."""
        return self.decoder.head(weights, x)


def with_native_attention(model: TransformersModel) -> TransformersModel:
    """Return the mixture with native attention if its type is known, else the model."""
    if model.family not in _HAS_QK_NORM:
        return model
    decoder = native_decoder(
        model.model.text.to_dict(),
        windows=tuple(model.model.cache.windows[i, 0] for i in range(model.n_layers)),
        qk_norm=_HAS_QK_NORM[model.family],
    )
    values = {item.name: getattr(model, item.name) for item in fields(model)}
    return NativeMixture(**values, decoder=decoder)
