"""Draft heads on the target's hidden states: multi-token prediction (MTP), Medusa.

MTP: DeepSeek-V3 (arXiv 2412.19437). Medusa: Cai et al. 2024 (arXiv 2401.10774). Cache row j of a
head combines token j + 1 and the hidden state of token j.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from offload_rt.errors import SettingsError
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import LayerWeights, TensorShape
from offload_rt.models.native import EMBED, HEAD, NORM, NativeDecoder, linears, weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt import ops
else:
    from offload_rt.lazy import ops, torch


@dataclass(frozen=True)
class HeadWeights(LayerWeights):
    """Weights of a head for the tensors in `names`, and of its target for all other tensors.

    shared     the target's names of the modules `EMBED` and `HEAD`
    token_ids  (n,) int64 on the device: target tokens in the head's reduced vocabulary, or None
    """

    head: LayerWeights
    target: LayerWeights
    names: frozenset[str]
    shared: Mapping[str, str]
    token_ids: Tensor | None

    def _with(self, name: str) -> tuple[LayerWeights, str]:
        if f"{name}.weight" in self.names:
            return self.head, name
        return self.target, self.shared.get(name, name)

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return (self.head if name in self.names else self.target).tensor(name, dtype)

    def linear(self, x: Tensor, name: str) -> Tensor:
        weights, stored_name = self._with(name)
        return weights.linear(x, stored_name)

    def rows(self, ids: Tensor, name: str) -> Tensor:
        weights, stored_name = self._with(name)
        return weights.rows(ids, stored_name)

    def expand(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Return logits (n, vocab_size), -inf outside the head's reduced vocabulary."""
        if self.token_ids is None:
            return logits
        whole = logits.new_full((len(logits), vocab_size), -math.inf)
        return whole.index_copy_(1, self.token_ids, logits)


@dataclass(frozen=True)
class Head(Architecture):
    """A draft head. `family` names its drafter; vocabulary and hidden size are the target's.

    target_modules  the target's `shared_modules`
    token_ids       see `HeadWeights`; on the host
    """

    # Inputs of rows are outputs of their parents, without fixed addresses.
    supports_graphs = False

    target_modules: tuple[str, str] = (EMBED, HEAD)
    token_ids: Tensor | None = field(default=None, compare=False, repr=False)

    def weights_beside(
        self, head: LayerWeights, target: LayerWeights, device: torch.device
    ) -> HeadWeights:
        """Combine the head's weights outside the layers with the target's weights."""
        names = frozenset(name for name, _ in self.non_layer_tensors())
        shared = dict(zip((EMBED, HEAD), self.target_modules, strict=True))
        token_ids = None if self.token_ids is None else self.token_ids.to(device)
        return HeadWeights(head, target, names, shared, token_ids)

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
        _NEXTN, f"{_NEXTN}enorm", f"{_NEXTN}hnorm", f"{_NEXTN}eh_proj", f"{_NEXTN}shared_head.norm"
    ),
    # MiMo
    MtpLayout(
        _MIMO,
        f"{_MIMO}token_layernorm",
        f"{_MIMO}hidden_layernorm",
        f"{_MIMO}input_proj",
        f"{_MIMO}final_layernorm",
        embed_first=False,
        is_normed=False,
    ),
    # Qwen3-Next, Qwen3.5
    MtpLayout(
        "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"
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
        d = self.hidden_size
        names = self.layout
        norms = (weight(name, d) for name in (names.embed_norm, names.hidden_norm, names.norm))
        return (*norms, weight(names.project, d, 2 * d))

    def reduce_states(self, weights: LayerWeights, states: Tensor) -> Tensor:
        last = states[:, 0]
        if not self.layout.is_normed:
            return last
        assert isinstance(weights, HeadWeights), "created by weights_beside"
        return self.normed(weights.target, self.target_norm, last)

    def combine(self, weights: LayerWeights, x: Tensor, states: Tensor) -> Tensor:
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
        return self.layout.layer

    def normed(self, weights: LayerWeights, name: str, x: Tensor) -> Tensor:
        return ops.rms_norm(x, weights.vector(name), self.eps)

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        return weights.linear(self.child_inputs(weights, x), HEAD)


# Prefixes of Medusa's tensors: in a separate file, or within a complete model.
MEDUSA_PREFIXES = ("", "medusa_head.")


@dataclass(frozen=True)
class Medusa(Head, NativeDecoder):
    """Medusa's heads: layer i predicts the token i + 2 positions after its input's token."""

    prefix: str = ""
    n_blocks: int = 1
    has_bias: bool = True

    def layer_prefix(self, i: int) -> str:
        return f"{self.prefix}{i}."

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        d = self.hidden_size
        names = [f"{k}.linear" for k in range(self.n_blocks)]
        blocks = [part for name in names for part in linears({name: d}, d, self.has_bias)]
        return (*blocks, weight(f"{self.n_blocks}", self.vocab_size, d))

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        return ()

    def reduce_states(self, weights: LayerWeights, states: Tensor) -> Tensor:
        return ops.rms_norm(states[:, 0], weights.vector(NORM), self.eps)

    def predict(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Return the logits (n, vocab_size) of the head with these weights."""
        for k in range(self.n_blocks):
            x = x + torch.nn.functional.silu(weights.linear(x, f"{k}.linear"))
        return weights.linear(x, f"{self.n_blocks}")

    def kv_nbytes(self, itemsize: int) -> int:
        return 0

    def flops(self, i: int, n_rows: int, context: int) -> float:
        n_outputs = self.n_blocks * self.hidden_size + self.vocab_size
        return 2.0 * n_rows * self.hidden_size * n_outputs


def fields_of(model: NativeDecoder) -> dict[str, Any]:
    """Return the fields of a model; `vars` would include cached properties."""
    return {item.name: getattr(model, item.name) for item in fields(model)}


def check_sizes(head: NativeDecoder, target: Architecture, target_hidden: int | None) -> None:
    """Raise SettingsError for the layers of a head that do not fit the target.

    target_hidden  hidden size of the target by the head's config, or None
    """
    for quantity, have, need in (
        ("hidden size", target_hidden or head.hidden_size, target.hidden_size),
        ("hidden size", head.hidden_size, target.hidden_size),
        ("vocabulary", head.vocab_size, target.vocab_size),
    ):
        if have != need:
            raise target_mismatch(quantity, str(have), str(need))


def check_taps(taps: Sequence[Any], target: Architecture) -> tuple[int, ...]:
    """Return the taps of a head; raise SettingsError unless the target has these layers."""
    if not taps or not all(type(tap) is int and 0 <= tap <= target.n_layers for tap in taps):
        have = f"layers {', '.join(map(str, taps))}"
        raise target_mismatch("choice of hidden states", have, f"layers 0 to {target.n_layers}")
    return tuple(taps)


def target_mismatch(quantity: str, have: str, need: str) -> SettingsError:
    """Return the error for a head that does not fit the target."""
    problem = f"the head's {quantity} differs from the model's"
    return SettingsError(problem, need=need, have=have, change="use a head trained for this model")
