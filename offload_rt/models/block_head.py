"""Block drafters, which predict several tokens at once: DFlash, JetSpec, DSpark, DFlash2.

DFlash: Chen et al. 2026 (arXiv 2602.06036). JetSpec (arXiv 2606.18394): causal attention within a
block. DSpark: logits depend on the preceding token by a matrix of low rank.
DFlash2 (Inco AI 2026, inco.ai/blog/dflash2, vLLM pull request 52816): convolutions within a block,
and a selector of coherent candidates.

Cache row j holds keys and values of the target's hidden states of token j. A block has the last
token and mask tokens at the following positions. Its rows attend to the cache and to the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_rt.models.heads import Head, HeadWeights
from offload_rt.models.layers import LayerWeights, TensorShape
from offload_rt.models.native import EMBED, GATE_UP, HEAD, QKV, NativeDecoder, weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt import ops

    _Pair = tuple[Tensor, Tensor]
else:
    from offload_rt.lazy import ops, torch

_MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2")
_GATE = "markov_head.gate_proj"
_CONVOLUTIONS = ("attention_conv", "mlp_conv")
_SELECTOR = "candidate_selector"


@dataclass(frozen=True)
class BlockHead(Head, NativeDecoder):
    """Layers of Qwen3 over the target's hidden states and a block.

    block_size       tokens of a block, including the last token of the sequence
    mask_token       token at positions to predict
    n_tokens         size of the vocabulary, possibly reduced
    is_causal        per layer, rows of a block see only earlier rows of the block
    anchored         windows begin before the last token, instead of before each row (speculators)
    predicts_first   row k predicts position k + 1 of the block, instead of position k
    markov_rank      rank of the dependence of logits on the preceding token; 0 for none
    is_gated         this dependence has a gate, a function of hidden state and preceding token
    input_scale      factor of the embedding
    logit_scale      factor of the logits
    logit_softcap    replaces logits s by softcap * tanh(s / softcap); 0 to keep them
    """

    block_size: int = 16
    mask_token: int = 0
    n_tokens: int = 0
    is_causal: tuple[bool, ...] = ()
    anchored: bool = False
    predicts_first: bool = False
    markov_rank: int = 0
    is_gated: bool = False
    input_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def n_at_once(self) -> int:
        return self.block_size if self.predicts_first else self.block_size - 1

    def layer_prefix(self, i: int) -> str:
        return f"layers.{i}."

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        d = self.hidden_size
        tensors = [weight("fc", d, len(self.taps) * d), weight("hidden_norm", d), weight("norm", d)]
        if self.n_tokens != self.vocab_size:
            tensors.append(weight(HEAD, self.n_tokens, d))
        if rank := self.markov_rank:
            tensors.append(weight(_MARKOV[0], self.vocab_size, rank))
            tensors.append(weight(_MARKOV[1], self.n_tokens, rank))
        if self.is_gated:
            tensors += weight(_GATE, rank, d + rank), TensorShape(f"{_GATE}.bias", (rank,))
        return tuple(tensors)

    def reduce_states(self, weights: LayerWeights, states: Tensor) -> Tensor:
        fused = weights.linear(states.flatten(1), "fc")
        return ops.rms_norm(fused, weights.vector("hidden_norm"), self.eps)

    def cached_rows(
        self, layers: Sequence[LayerWeights], inputs: Tensor, first: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values (n_kv_heads, n, head_dim) of tokens, per layer.

        inputs  (n, hidden_size) from `reduce_states`
        first   position of the first token
        """
        rotary = self._rotary(first, len(inputs), inputs)
        rows = []
        for weights in layers:
            parts = weights.linears(inputs, QKV[1:])
            k, v = (part.view(len(part), -1, self.head_dim) for part in parts)
            k = self._rotated(weights, "k_norm", k, rotary)
            rows.append((k.transpose(0, 1), v.transpose(0, 1)))
        return rows

    def block(
        self,
        layers: Sequence[LayerWeights],
        weights: LayerWeights,
        tokens: Tensor,
        cached: Sequence[_Pair],
    ) -> Tensor:
        """Compute the hidden states (n_blocks, n_at_once, hidden_size) of predicting rows.

        tokens  (n_blocks, block_size) int64: the last token of the sequence first
        cached  keys and values (n_kv_heads, n, head_dim) of all earlier tokens, per layer
        """
        n_blocks, size = tokens.shape
        n_cached = cached[0][0].shape[1]
        x = weights.rows(tokens.flatten(), EMBED) * self.input_scale
        cos, sin = self._rotary(n_cached, size, x)
        rotary = cos.repeat(n_blocks, 1), sin.repeat(n_blocks, 1)
        for i, layer in enumerate(layers):
            h = ops.rms_norm(x, layer.vector("input_layernorm"), self.eps)
            x = self.mlp(layer, x, self.attend_to_block(i, layer, h, cached[i], rotary))
        hidden = ops.rms_norm(x, weights.vector("norm"), self.eps).view(n_blocks, size, -1)
        return hidden[:, size - self.n_at_once :]

    def attend_to_block(
        self, i: int, layer: LayerWeights, h: Tensor, cached: _Pair, rotary: _Pair
    ) -> Tensor:
        """Return attention's contribution (n, hidden_size) for the normed rows of blocks.

        cached  keys and values (n_kv_heads, n, head_dim) of all earlier tokens
        rotary  cosines and sines (n, head_dim) of the rows
        """
        q, k, v = (part.view(len(part), -1, self.head_dim) for part in layer.linears(h, QKV))
        q = self._rotated(layer, "q_norm", q, rotary)
        k = self._rotated(layer, "k_norm", k, rotary)
        blocks = (part.view(-1, self.block_size, *part.shape[1:]) for part in (q, k, v))
        q, *new = (part.transpose(1, 2) for part in blocks)
        k, v = (
            torch.cat((old.expand(len(part), -1, -1, -1), part), 2)
            for old, part in zip(cached, new, strict=True)
        )
        mask = self._mask(i, q.shape[2], k.shape[2]).to(q.device)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return layer.linear(out.transpose(1, 2).flatten(2).flatten(0, 1), "self_attn.o_proj")

    def logits(self, weights: LayerWeights, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return logits (n, vocab_size) of hidden states (n, hidden_size), -inf if not in use.

        tokens  (n,) int64 tokens before the predicted tokens
        """
        logits = weights.linear(hidden, HEAD)
        if self.logit_scale != 1:
            logits = logits * self.logit_scale
        if self.logit_softcap:
            logits = (logits / self.logit_softcap).tanh_() * self.logit_softcap
        if self.markov_rank:
            before = weights.rows(tokens, _MARKOV[0])
            if self.is_gated:
                before = before * weights.linear(torch.cat((hidden, before), 1), _GATE).sigmoid_()
            logits = logits + weights.linear(before, _MARKOV[1])
        assert isinstance(weights, HeadWeights), "created by weights_beside"
        return weights.expand(logits, self.vocab_size)

    def _mask(self, i: int, n_rows: int, n_keys: int) -> Tensor:
        """Return the visibility (n_rows, n_keys) bool of keys for the rows of a block."""
        keys = torch.arange(n_keys)
        rows = keys[n_keys - n_rows :, None]
        window = self.windows[i]
        visible = (keys <= rows) | (not self.is_causal[i])
        if window is not None and self.anchored:
            visible &= keys >= n_keys - n_rows - window
        elif window is not None:
            visible &= (rows - keys).abs() < window
        return visible

    def _rotated(self, weights: LayerWeights, name: str, x: Tensor, rotary: _Pair) -> Tensor:
        """Apply a norm and rotary embeddings to x (n, heads, head_dim)."""
        normed = ops.rms_norm(x, weights.vector(f"self_attn.{name}"), self.eps)
        return ops.reference.rotate(normed, *rotary)

    def _rotary(self, first: int, n: int, like: Tensor) -> _Pair:
        positions = torch.arange(first, first + n)
        cos, sin = self.rope.cos_sin(positions, positions + 1, like.dtype)
        return cos.to(like.device), sin.to(like.device)


@dataclass(frozen=True)
class DFlash2(BlockHead):
    """DFlash2. Each sublayer reads and returns convolved rows.

    conv_kernel_size  rows of a convolution: a row of the block and rows before it
    conv_group_size   channels with equal dynamic weights
    selector_rank     rank of the score of a candidate after the preceding token
    selector_top_k    candidates per position
    """

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        d = self.hidden_size
        n_taps = self.conv_kernel_size
        tensors = [*super().layer_tensors(i)]
        for name in _CONVOLUTIONS:
            tensors.append(TensorShape(f"{name}.base_kernel", (2, n_taps, d)))
            n_dynamic = 2 * n_taps * (d // self.conv_group_size)
            tensors.append(weight(f"{name}.kernel_projection", n_dynamic, d))
        return tuple(tensors)

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        rank = self.selector_rank
        return (
            *super().non_layer_tensors(),
            weight(f"{_SELECTOR}.hidden_projection", rank, self.hidden_size),
            TensorShape(f"{_SELECTOR}.predecessor_codebook", (self.vocab_size, rank)),
            TensorShape(f"{_SELECTOR}.successor_codebook", (self.vocab_size, rank)),
        )

    def attend_to_block(
        self, i: int, layer: LayerWeights, h: Tensor, cached: _Pair, rotary: _Pair
    ) -> Tensor:
        h, convolve = self._convolved(layer, _CONVOLUTIONS[0], h)
        return convolve(super().attend_to_block(i, layer, h, cached, rotary))

    def mlp(self, weights: LayerWeights, x: Tensor, out: Tensor) -> Tensor:
        h = ops.add_rms_norm(x, out, weights.vector("post_attention_layernorm"), self.eps)
        h, convolve = self._convolved(weights, _CONVOLUTIONS[1], h)
        wide = ops.silu_mul(*weights.linears(h, GATE_UP))
        return x.add_(convolve(weights.linear(wide, "mlp.down_proj")))

    def logits(self, weights: LayerWeights, hidden: Tensor, tokens: Tensor) -> Tensor:
        """See `BlockHead.logits`; only candidates have finite logits."""
        unary, candidates = super().logits(weights, hidden, tokens).topk(self.selector_top_k)
        before = weights.tensor(f"{_SELECTOR}.predecessor_codebook").index_select(0, tokens)
        after = weights.tensor(f"{_SELECTOR}.successor_codebook")[candidates]
        context = before * weights.linear(hidden, f"{_SELECTOR}.hidden_projection")
        scores = unary + torch.einsum("nr,nkr->nk", context, after)
        whole = scores.new_full((len(scores), self.vocab_size), -math.inf)
        return whole.scatter_(1, candidates, scores)

    def _convolved(
        self, weights: LayerWeights, name: str, h: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return the convolved input h (n, hidden_size), and a function for a sublayer's output."""
        base = weights.tensor(f"{name}.base_kernel")
        dynamic = weights.linear(h, f"{name}.kernel_projection")
        dynamic = dynamic.view(len(h), 2, self.conv_kernel_size, -1, 1)
        kernels = base.view(2, self.conv_kernel_size, -1, self.conv_group_size) + dynamic

        def convolve(x: Tensor, side: int) -> Tensor:
            blocks = x.view(-1, self.block_size, x.shape[1])
            out = torch.zeros_like(x)
            for distance in range(self.conv_kernel_size):
                earlier = torch.nn.functional.pad(blocks, (0, 0, distance, 0))[:, : self.block_size]
                out.addcmul_(kernels[:, side, distance].flatten(1), earlier.flatten(0, 1))
            return out

        return convolve(h, 0), lambda x: convolve(x, 1)
