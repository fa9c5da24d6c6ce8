"""Draft heads on the target's hidden states: EAGLE-3, multi-token prediction (MTP), Medusa.

EAGLE-3: Li et al. 2025 (arXiv 2503.01840). MTP: DeepSeek-V3 (arXiv 2412.19437). Medusa: Cai et al.
2024 (arXiv 2401.10774). Cache row j of a head combines token j + 1 and the hidden state of token j.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from offload_rt.errors import SettingsError
from offload_rt.models.architecture import Architecture, LayerWeights, PassContext, TensorShape
from offload_rt.models.native import EMBED, HEAD, NORM, QKV, NativeDecoder, norm

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class HeadWeights(LayerWeights):
    """Weights of a head for the tensors in `names`, and of its target for all other tensors.

    token_ids  (n,) int64 on the device: target tokens in the head's reduced vocabulary, or None
    """

    head: LayerWeights
    target: LayerWeights
    names: frozenset[str]
    token_ids: Tensor | None

    def _with(self, name: str) -> LayerWeights:
        return self.head if name in self.names else self.target

    @property
    def dtype(self) -> torch.dtype:
        """See `LayerWeights`."""
        return self.head.dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """See `LayerWeights`."""
        return self._with(name).tensor(name, dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `LayerWeights`."""
        return self._with(f"{name}.weight").linear(x, name)

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """See `LayerWeights`."""
        return self._with(f"{name}.weight").rows(ids, name)


@dataclass(frozen=True)
class Head(Architecture):
    """A draft head. `family` names its drafter; vocabulary and hidden size are the target's.

    token_ids  see `HeadWeights`; on the host
    """

    # Inputs of rows are outputs of their parents, without fixed addresses.
    supports_graphs = False

    token_ids: Tensor | None = field(default=None, compare=False, repr=False)

    def weights_beside(
        self, head: LayerWeights, target: LayerWeights, device: torch.device
    ) -> HeadWeights:
        """Combine the head's weights outside the layers with the target's weights."""
        names = frozenset(name for name, _ in self.non_layer_tensors())
        return HeadWeights(
            head, target, names, None if self.token_ids is None else self.token_ids.to(device)
        )

    @abstractmethod
    def reduce_states(self, weights: LayerWeights, states: Tensor) -> Tensor:
        """Reduce hidden states (n, len(taps), hidden_size) to head inputs (n, hidden_size)."""

    def is_unused(self, name: str) -> bool:
        """Return True: further tensors are shared with the target, e.g. embedding copies."""
        return True


class HeadDecoder(Head):
    """Head with a decoder layer; below a tree's root, its own states replace the target's."""

    @abstractmethod
    def combine(self, weights: LayerWeights, x: Tensor, states: Tensor) -> Tensor:
        """Combine embeddings x with head inputs, (n, hidden_size) each."""

    @abstractmethod
    def child_inputs(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Return the head inputs (n, hidden_size) of child rows, from layer outputs x."""


@dataclass(frozen=True)
class Eagle3(HeadDecoder, NativeDecoder):
    """EAGLE-3. The layer's input is embedding and residual stream, (n, 2 * hidden_size).

    n_tokens       size of the reduced vocabulary
    norm_before    use the normed residual stream as residual
    prefix         prefix of the layer: "midlayer.", "layers.0." in files of speculators
    state_norm     norm of the tapped states: "" none, "input_norm" of their concatenation,
                   "fc_norm" of each of them (EAGLE-3.1)
    feeds_normed   child rows receive the normed output (`norm_output` of speculators, EAGLE-3.1)
    is_normed      apply the final norm before the output matrix (`norm_output` of SpecForge)
    has_embedding  the head's embedding differs from the target's
    """

    n_tokens: int = 0
    norm_before: bool = False
    prefix: str = "midlayer."
    state_norm: str = ""
    feeds_normed: bool = False
    is_normed: bool = True
    has_embedding: bool = False

    def layer_prefix(self, i: int) -> str:
        """Return the prefix of the only layer."""
        return self.prefix

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """Return a Llama layer with a second norm and a doubled attention input."""
        d = self.hidden_size
        wide = tuple(f"{name}.weight" for name in QKV)
        llama_tensors = super().layer_tensors(i)
        doubled = (
            TensorShape(name, (shape[0], 2 * d) if name in wide else shape)
            for name, shape in llama_tensors
        )
        return (norm("hidden_norm", d), *doubled)

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """Return norms and matrix of the fusion, the final norm, the embedding and the head."""
        d = self.hidden_size
        n = len(self.taps)
        norms: list[TensorShape] = []
        if self.state_norm == "input_norm":
            norms = [norm("input_norm", n * d)]
        elif self.state_norm == "fc_norm":
            norms = [norm(f"fc_norm.{i}", d) for i in range(n)]
        if self.has_embedding:
            norms.append(TensorShape(f"{_OWN_EMBED}.weight", (self.vocab_size, d)))
        fusion = TensorShape("fc.weight", (d, n * d))
        head = TensorShape("lm_head.weight", (self.n_tokens, d))
        return (*norms, fusion, norm("norm", d), head)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Look up the head's embedding, or the target's."""
        return weights.rows(ids, _OWN_EMBED if self.has_embedding else EMBED), row_inputs

    def reduce_states(self, weights: LayerWeights, states: Tensor) -> Tensor:
        """Norm the tapped hidden states and fuse them by a matrix."""
        import torch

        from offload_rt import ops

        flat = states.flatten(1)
        if self.state_norm == "input_norm":
            flat = ops.rms_norm(flat, weights.vector("input_norm"), self.eps)
        elif self.state_norm == "fc_norm":
            normed = (
                ops.rms_norm(states[:, i].contiguous(), weights.vector(f"fc_norm.{i}"), self.eps)
                for i in range(len(self.taps))
            )
            flat = torch.cat(tuple(normed), 1)
        return weights.linear(flat, "fc")

    def combine(self, weights: LayerWeights, x: Tensor, states: Tensor) -> Tensor:
        """Concatenate embeddings and states."""
        import torch  # not at the top: a plan computes nothing

        return torch.cat((x, states), 1)

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """Apply attention to inputs normed inputs; update the residual stream."""
        import torch

        from offload_rt import ops

        embedded, hidden = (part.contiguous() for part in x.chunk(2, 1))
        normed = ops.rms_norm(hidden, weights.vector("hidden_norm"), self.eps)
        inputs = torch.cat(
            (ops.rms_norm(embedded, weights.vector("input_layernorm"), self.eps), normed), 1
        )
        out = self.attention(i, weights, inputs, context)
        return torch.cat(
            (embedded, self.mlp(weights, normed if self.norm_before else hidden, out)), 1
        )

    def child_inputs(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Return the residual stream, after the final norm if the head feeds it back normed."""
        return self._output(weights, x) if self.feeds_normed else x[:, self.hidden_size :]

    def _output(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Return the residual stream after the final norm, (n, hidden_size)."""
        from offload_rt import ops

        hidden = x[:, self.hidden_size :].contiguous()
        return ops.rms_norm(hidden, weights.vector("norm"), self.eps)

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Return logits over the target's vocabulary, -inf outside the reduced vocabulary."""
        output = self._output(weights, x) if self.is_normed else x[:, self.hidden_size :]
        logits = weights.linear(output, "lm_head")
        assert isinstance(weights, HeadWeights), "created by weights_beside"
        if weights.token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), -math.inf)
        return whole.index_copy_(1, weights.token_ids, logits)


class MtpLayout(NamedTuple):
    """Storage and structure of a family's multi-token prediction layer.

    layer        prefix of the decoder layer; {n} is the number of target layers, also in modules
    embed_norm, hidden_norm, project, norm  module names
    embed_first  order of the projection's inputs: embedding, hidden state
    is_normed    read the target's hidden states after its final norm
    """

    layer: str
    embed_norm: str
    hidden_norm: str
    project: str
    norm: str
    embed_first: bool = True
    is_normed: bool = True

    def for_target(self, n: int) -> MtpLayout:
        """Return the layout for a target of n layers."""
        parts = (part.format(n=n) if isinstance(part, str) else part for part in self)
        return MtpLayout(*parts)  # type: ignore[arg-type]


_NEXTN = "model.layers.{n}."
_MIMO = "model.mtp_layers.0."
MTP_LAYOUTS = (
    # DeepSeek-V3, GLM-4.5
    MtpLayout(
        layer=_NEXTN,
        embed_norm=f"{_NEXTN}enorm",
        hidden_norm=f"{_NEXTN}hnorm",
        project=f"{_NEXTN}eh_proj",
        norm=f"{_NEXTN}shared_head.norm",
    ),
    # MiMo
    MtpLayout(
        layer=_MIMO,
        embed_norm=f"{_MIMO}token_layernorm",
        hidden_norm=f"{_MIMO}hidden_layernorm",
        project=f"{_MIMO}input_proj",
        norm=f"{_MIMO}final_layernorm",
        embed_first=False,
        is_normed=False,
    ),
    # Qwen3-Next, Qwen3.5
    MtpLayout(
        layer="mtp.layers.0.",
        embed_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        project="mtp.fc",
        norm="mtp.norm",
    ),
)


@dataclass(frozen=True)
class Mtp(HeadDecoder):
    """First multi-token prediction layer of a model, applied recursively for every distance.

    target_norm  name of the target's final norm
    """

    layout: MtpLayout = MTP_LAYOUTS[0]
    target_norm: str = NORM

    @abstractmethod
    def normed(self, weights: LayerWeights, name: str, x: Tensor) -> Tensor:
        """Apply norm `name` to x (n, hidden_size)."""

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """Return the norms and the projection."""
        d = self.hidden_size
        names = self.layout
        norms = (norm(name, d) for name in (names.embed_norm, names.hidden_norm, names.norm))
        return (*norms, TensorShape(f"{names.project}.weight", (d, 2 * d)))

    def reduce_states(self, weights: LayerWeights, states: Tensor) -> Tensor:
        """Return the last hidden state, after the target's norm if the layout requires it."""
        assert isinstance(weights, HeadWeights), "created by weights_beside"
        last = states[:, 0]
        return (
            self.normed(weights.target, self.target_norm, last) if self.layout.is_normed else last
        )

    def combine(self, weights: LayerWeights, x: Tensor, states: Tensor) -> Tensor:
        """Norm inputs inputs and project their concatenation."""
        import torch

        names = self.layout
        embedded = self.normed(weights, names.embed_norm, x)
        hidden = self.normed(weights, names.hidden_norm, states)
        parts = (embedded, hidden) if names.embed_first else (hidden, embedded)
        return weights.linear(torch.cat(parts, 1), names.project)

    def child_inputs(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Return normed outputs, comparable to the target's normed states."""
        return self.normed(weights, self.layout.norm, x)


@dataclass(frozen=True)
class NativeMtp(Mtp, NativeDecoder):
    """Multi-token prediction layer of a native decoder."""

    def layer_prefix(self, i: int) -> str:
        """Return the prefix of the only layer."""
        return self.layout.layer

    def normed(self, weights: LayerWeights, name: str, x: Tensor) -> Tensor:
        """See `Mtp.normed`."""
        from offload_rt import ops

        return ops.rms_norm(x, weights.vector(name), self.eps)

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Apply the layer's norm and the target's head."""
        return weights.linear(self.child_inputs(weights, x), EMBED if self.tied else HEAD)


# Prefixes of Medusa's tensors: in a separate file, or within a complete model.
MEDUSA_PREFIXES = ("", "medusa_head.")


@dataclass(frozen=True)
class Medusa(Head, NativeDecoder):
    """Medusa's heads: layer i predicts the token i + 2 positions after its input's token."""

    prefix: str = ""
    n_blocks: int = 1
    has_bias: bool = True

    def layer_prefix(self, i: int) -> str:
        """Return the numbered prefix of head i."""
        return f"{self.prefix}{i}."

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """Return residual blocks and a head."""
        d = self.hidden_size
        parts = ("weight", "bias") if self.has_bias else ("weight",)
        names = [f"{k}.linear.{part}" for k in range(self.n_blocks) for part in parts]
        head = TensorShape(f"{self.n_blocks}.weight", (self.vocab_size, d))
        return (*(TensorShape(name, (d, d) if "weight" in name else (d,)) for name in names), head)

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """Return no tensors."""
        return ()

    def reduce_states(self, weights: LayerWeights, states: Tensor) -> Tensor:
        """Return the last hidden state after the target's norm."""
        from offload_rt import ops

        return ops.rms_norm(states[:, 0], weights.vector(NORM), self.eps)

    def predict(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Return the logits (n, vocab_size) of the head with these weights."""
        from torch.nn.functional import silu

        for k in range(self.n_blocks):
            x = x + silu(weights.linear(x, f"{k}.linear"))
        return weights.linear(x, f"{self.n_blocks}")

    def kv_nbytes(self, itemsize: int) -> int:
        """Return 0: Medusa has no cache."""
        return 0

    def flops(self, i: int, n_rows: int, context: int) -> float:
        """Count 2 per weight and row."""
        return (
            2.0 * n_rows * self.hidden_size * (self.n_blocks * self.hidden_size + self.vocab_size)
        )


# Embedding of a head, beside the target's `EMBED`.
_OWN_EMBED = "embed_tokens"


def target_mismatch(quantity: str, have: str, need: str) -> SettingsError:
    """Return the error for a head that does not fit the target."""
    return SettingsError(
        f"the head's {quantity} differs from the model's",
        need=need,
        have=have,
        change="use a head trained for this model",
    )
