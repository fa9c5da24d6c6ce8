"""DFlash2: DFlash with convolutions within a block, and a selector of coherent candidates.

Inco AI 2026 (inco.ai/blog/dflash2), vLLM pull request 52816.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_rt.models.block_head import BlockHead
from offload_rt.models.layers import LayerWeights, TensorShape
from offload_rt.models.native import GATE_UP

if TYPE_CHECKING:
    from torch import Tensor

_CONVOLUTIONS = ("attention_conv", "mlp_conv")
_SELECTOR = "candidate_selector"


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
        """Return a layer of Qwen3 and its convolutions."""
        d = self.hidden_size
        n_taps = self.conv_kernel_size
        n_dynamic = 2 * n_taps * (d // self.conv_group_size)
        convolutions = (
            tensor
            for name in _CONVOLUTIONS
            for tensor in (
                TensorShape(f"{name}.base_kernel", (2, n_taps, d)),
                TensorShape(f"{name}.kernel_projection.weight", (n_dynamic, d)),
            )
        )
        return (*super().layer_tensors(i), *convolutions)

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """Return the tensors of DFlash and of the selector."""
        rank = self.selector_rank
        return (
            *super().non_layer_tensors(),
            TensorShape(f"{_SELECTOR}.hidden_projection.weight", (rank, self.hidden_size)),
            TensorShape(f"{_SELECTOR}.predecessor_codebook", (self.vocab_size, rank)),
            TensorShape(f"{_SELECTOR}.successor_codebook", (self.vocab_size, rank)),
        )

    def attend_to_block(
        self,
        i: int,
        layer: LayerWeights,
        h: Tensor,
        cached: tuple[Tensor, Tensor],
        rotary: tuple[Tensor, Tensor],
    ) -> Tensor:
        """See `BlockHead.attend_to_block`; convolve input and output."""
        h, convolve = self._convolved(layer, _CONVOLUTIONS[0], h)
        return convolve(super().attend_to_block(i, layer, h, cached, rotary))

    def mlp(self, weights: LayerWeights, x: Tensor, out: Tensor) -> Tensor:
        """See `NativeDecoder.mlp`; convolve input and output."""
        from offload_rt import ops  # not at the top: a plan computes nothing

        h = ops.add_rms_norm(x, out, weights.vector("post_attention_layernorm"), self.eps)
        h, convolve = self._convolved(weights, _CONVOLUTIONS[1], h)
        wide = ops.silu_mul(*weights.linears(h, GATE_UP))
        return x.add_(convolve(weights.linear(wide, "mlp.down_proj")))

    def logits(self, weights: LayerWeights, hidden: Tensor, tokens: Tensor) -> Tensor:
        """See `BlockHead.logits`; only candidates have finite logits."""
        import torch

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
        """Return the convolved input h (n, hidden_size) of a sublayer, and how to convolve its
        output.
        """
        import torch
        from torch.nn.functional import pad

        size = self.conv_group_size
        base = weights.tensor(f"{name}.base_kernel")
        dynamic = weights.linear(h, f"{name}.kernel_projection")
        dynamic = dynamic.view(len(h), 2, self.conv_kernel_size, -1, 1)
        kernels = base.view(2, self.conv_kernel_size, -1, size) + dynamic

        def convolve(x: Tensor, side: int) -> Tensor:
            blocks = x.view(-1, self.block_size, x.shape[1])
            out = torch.zeros_like(x)
            for distance in range(self.conv_kernel_size):
                earlier = pad(blocks, (0, 0, distance, 0))[:, : self.block_size]
                out.addcmul_(kernels[:, side, distance].flatten(1), earlier.flatten(0, 1))
            return out

        return convolve(h, 0), lambda x: convolve(x, 1)
