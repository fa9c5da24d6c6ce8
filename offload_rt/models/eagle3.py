"""EAGLE-3, EAGLE-3.1 and P-EAGLE: draft layers on hidden states of the target.

EAGLE-3: Li et al. 2025 (arXiv 2503.01840). EAGLE-3.1: norms of each hidden state, and normed
states as inputs of child rows. P-EAGLE (arXiv 2602.01469): one pass predicts several positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from offload_rt.models.architecture import Architecture
from offload_rt.models.heads import HeadDecoder, HeadWeights
from offload_rt.models.layers import LayerWeights, Part, PassContext, TensorShape
from offload_rt.models.native import EMBED, QKV, NativeDecoder, weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt import ops
else:
    from offload_rt.lazy import ops, torch

# Embedding of a head, beside the target's `EMBED`.
_OWN_EMBED = "embed_tokens"
_MASK = "mask_hidden"


@dataclass(frozen=True)
class Eagle3(HeadDecoder, NativeDecoder):
    """EAGLE-3. The layers' input is embedding and residual stream, (n, 2 * hidden_size).

    Layers after the first read only the residual stream.

    n_tokens       size of the reduced vocabulary
    norm_before    use the normed residual stream as residual
    prefix         prefix of the first layer, "midlayer." or "layers.0."
    state_norm     norm of the tapped states: "" none, "input_norm" of their concatenation,
                   "fc_norm" of each of them (EAGLE-3.1)
    feeds_normed   child rows receive the normed output (`norm_output` of speculators, EAGLE-3.1)
    is_normed      apply the final norm before the output matrix (`norm_output` of SpecForge)
    has_embedding  the head's embedding differs from the target's
    n_parallel     predictions of a pass (P-EAGLE); 0 for heads that predict one token
    mask_token     token of rows with unknown tokens (P-EAGLE)
    mask_shape     stored shape of the hidden states of these rows
    """

    n_tokens: int = 0
    norm_before: bool = False
    prefix: str = "midlayer."
    state_norm: str = ""
    feeds_normed: bool = False
    is_normed: bool = True
    has_embedding: bool = False
    n_parallel: int = 0
    mask_token: int = 0
    mask_shape: tuple[int, ...] = ()

    def of_checkpoint(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Self, Mapping[str, Part]]:
        """Take names and shapes that differ between layouts. See `Architecture.of_checkpoint`."""
        has_number = "layers.0.hidden_norm.weight" in shapes
        mask_shape = shapes.get(_MASK, ())
        is_mask = math.prod(mask_shape) == len(self.taps) * self.hidden_size
        spec = replace(
            self,
            prefix="layers.0." if has_number else "midlayer.",
            has_embedding=self.has_embedding and f"{_OWN_EMBED}.weight" in shapes,
            mask_shape=mask_shape if is_mask else self.mask_shape,
        )
        return spec, {name: Part(name) for name in shapes}

    @property
    def n_at_once(self) -> int:
        return max(self.n_parallel, 1)

    def layer_prefix(self, i: int) -> str:
        return f"layers.{i}." if i else self.prefix

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        if i:
            return super().layer_tensors(i)
        d = self.hidden_size
        wide = [f"{name}.weight" for name in QKV]
        doubled = [
            TensorShape(name, (shape[0], 2 * d) if name in wide else shape)
            for name, shape in super().layer_tensors(i)
        ]
        return (weight("hidden_norm", d), *doubled)

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        d = self.hidden_size
        n = len(self.taps)
        tensors = [TensorShape(_MASK, self.mask_shape)] if self.n_parallel else []
        if self.state_norm == "input_norm":
            tensors.append(weight("input_norm", n * d))
        elif self.state_norm == "fc_norm":
            tensors += [weight(f"fc_norm.{i}", d) for i in range(n)]
        if self.has_embedding:
            tensors.append(weight(_OWN_EMBED, self.vocab_size, d))
        fusion = weight("fc", d, n * d)
        return (*tensors, fusion, weight("norm", d), weight("lm_head", self.n_tokens, d))

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return weights.rows(ids, _OWN_EMBED if self.has_embedding else EMBED), row_inputs

    def reduce_states(self, weights: LayerWeights, states: Tensor) -> Tensor:
        flat = states.flatten(1)
        if self.state_norm == "input_norm":
            flat = ops.rms_norm(flat, weights.vector("input_norm"), self.eps)
        elif self.state_norm == "fc_norm":
            normed = [
                ops.rms_norm(state.contiguous(), weights.vector(f"fc_norm.{i}"), self.eps)
                for i, state in enumerate(states.unbind(1))
            ]
            flat = torch.cat(normed, 1)
        return weights.linear(flat, "fc")

    def masked_input(self, weights: LayerWeights) -> Tensor:
        """Return the head input (1, hidden_size) of rows with unknown tokens."""
        states = weights.tensor(_MASK).view(1, len(self.taps), self.hidden_size)
        return self.reduce_states(weights, states)

    def combine(self, weights: LayerWeights, x: Tensor, states: Tensor) -> Tensor:
        return torch.cat((x, states), 1)

    layer_group = Architecture.layer_group

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """Update the residual stream; in the first layer, attention reads both normed parts."""
        embedded, hidden = (part.contiguous() for part in x.chunk(2, 1))
        if i:
            return torch.cat((embedded, super().layer(i, weights, hidden, context)), 1)
        normed = ops.rms_norm(hidden, weights.vector("hidden_norm"), self.eps)
        first = ops.rms_norm(embedded, weights.vector("input_layernorm"), self.eps)
        out = self.attention(i, weights, torch.cat((first, normed), 1), context)
        residual = normed if self.norm_before else hidden
        return torch.cat((embedded, self.mlp(weights, residual, out)), 1)

    def child_inputs(self, weights: LayerWeights, x: Tensor) -> Tensor:
        return self._output(weights, x) if self.feeds_normed else x[:, self.hidden_size :]

    def _output(self, weights: LayerWeights, x: Tensor) -> Tensor:
        return ops.rms_norm(x[:, self.hidden_size :].contiguous(), weights.vector("norm"), self.eps)

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        output = self._output(weights, x) if self.is_normed else x[:, self.hidden_size :]
        logits = weights.linear(output, "lm_head")
        assert isinstance(weights, HeadWeights), "created by weights_beside"
        return weights.expand(logits, self.vocab_size)
