"""Heads that draft for a model by its hidden states: EAGLE-3, layers for multi-token prediction (MTP), Medusa.

EAGLE-3: Li et al. 2025 (arXiv 2503.01840); MTP: DeepSeek-V3 (arXiv 2412.19437); Medusa: Cai et al. 2024 (arXiv 2401.10774).
Row j of a head that has a cache is token j + 1 of the sequence beside the hidden state of token j.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from offload_rt.errors import SettingsError, UnsupportedModelError
from offload_rt.models.architecture import Architecture, LayerWeights, PassContext, TensorShape
from offload_rt.models.families import spec_of
from offload_rt.models.native import EMBED, HEAD, NORM, QKV, NativeDecoder, norm

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class HeadWeights(LayerWeights):
    """What a head has of its own, named in `names`, and for all other names the weights of its target.

    token_ids  (n,) int64, on the device: tokens of the target that the head's own vocabulary stands for; None: it has none
    """

    own: LayerWeights
    target: LayerWeights
    names: frozenset[str]
    token_ids: Tensor | None

    def _with(self, name: str) -> LayerWeights:
        return self.own if name in self.names else self.target

    @property
    def dtype(self) -> torch.dtype:
        """See `LayerWeights`."""
        return self.own.dtype

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
    """A head; `family` is the name of its drafter, vocabulary and hidden size are the target's.

    token_ids  see `HeadWeights`; on the host
    """

    token_ids: Tensor | None = field(default=None, compare=False, repr=False)

    def weights_beside(self, own: LayerWeights, target: LayerWeights, device: torch.device) -> HeadWeights:
        """Its weights outside the layers, and the target's."""
        names = frozenset(name for name, _ in self.non_layer_tensors())
        return HeadWeights(own, target, names, None if self.token_ids is None else self.token_ids.to(device))

    @abstractmethod
    def take(self, weights: LayerWeights, states: Tensor) -> Tensor:
        """What rows take of the target's hidden states (n, len(taps), hidden_size): (n, hidden_size)."""

    def is_unused(self, name: str) -> bool:
        """Whatever it has in common with the target, such as a copy of the embedding."""
        return True


class HeadDecoder(Head):
    """A head of one decoder layer. Its own hidden states stand in for the target's in rows below the first of a tree."""

    @abstractmethod
    def join(self, weights: LayerWeights, x: Tensor, states: Tensor) -> Tensor:
        """Embeddings x and what `take` or `give` gave for the tokens before, (n, hidden_size) each: what the layer gets."""

    @abstractmethod
    def give(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """What the rows below take of rows x behind the layer: (n, hidden_size)."""


@dataclass(frozen=True)
class Eagle3(HeadDecoder, NativeDecoder):
    """EAGLE-3. Its residual stream stands behind the embeddings: both are what the layer gets, (n, 2 * hidden_size).

    n_tokens     of its own vocabulary
    norm_before  the residual stream is normed, too
    """

    n_tokens: int = 0
    norm_before: bool = False

    def layer_prefix(self, i: int) -> str:
        """Its one layer."""
        return "midlayer."

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """A Llama's with a second norm, and twice the input to attention."""
        d, wide = self.hidden_size, tuple(f"{name}.weight" for name in QKV)
        of_llama = super().layer_tensors(i)
        doubled = (TensorShape(name, (shape[0], 2 * d) if name in wide else shape) for name, shape in of_llama)
        return (norm("hidden_norm", d), *doubled)

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """What fuses the target's hidden states, the last norm and the head."""
        d, n = self.hidden_size, len(self.taps)
        return TensorShape("fc.weight", (d, n * d)), norm("norm", d), TensorShape("lm_head.weight", (self.n_tokens, d))

    def take(self, weights: LayerWeights, states: Tensor) -> Tensor:
        """All of them through one matrix."""
        return weights.linear(states.flatten(1), "fc")

    def join(self, weights: LayerWeights, x: Tensor, states: Tensor) -> Tensor:
        """One beside the other."""
        import torch  # not at the top: a plan computes nothing

        return torch.cat((x, states), 1)

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """Attention on norms of embedding and hidden state; what it gives is added to the latter."""
        import torch

        from offload_rt import ops

        embedded, hidden = (part.contiguous() for part in x.chunk(2, 1))
        normed = ops.rms_norm(hidden, weights.vector("hidden_norm"), self.eps)
        both = torch.cat((ops.rms_norm(embedded, weights.vector("input_layernorm"), self.eps), normed), 1)
        out = self.attention(i, weights, both, context)
        return torch.cat((embedded, self.mlp(weights, normed if self.norm_before else hidden, out)), 1)

    def give(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """The residual stream."""
        return x[:, self.hidden_size :]

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Logits of the target's vocabulary; tokens that are not in the head's own cannot be."""
        from offload_rt import ops

        normed = ops.rms_norm(self.give(weights, x).contiguous(), weights.vector("norm"), self.eps)
        logits = weights.linear(normed, "lm_head")
        assert isinstance(weights, HeadWeights), "a head has its target beside it"
        if weights.token_ids is None:
            return logits
        whole = logits.new_full((len(logits), self.vocab_size), -math.inf)
        return whole.index_copy_(1, weights.token_ids, logits)


class MtpLayout(NamedTuple):
    """How a family stores and joins its layer for multi-token prediction.

    layer        prefix of the decoder layer; {n} stands for the layers of the target, as in the names of modules
    embed_norm, hidden_norm, project, norm  modules
    embed_first  the embedding comes first in what is projected
    is_normed    the target's hidden states are taken behind its last norm
    """

    layer: str
    embed_norm: str
    hidden_norm: str
    project: str
    norm: str
    embed_first: bool = True
    is_normed: bool = True

    def of(self, n: int) -> MtpLayout:
        """That of a target of n layers."""
        return MtpLayout(*(one.format(n=n) if isinstance(one, str) else one for one in self))  # type: ignore[arg-type]


_NEXTN, _MIMO = "model.layers.{n}.", "model.mtp_layers.0."
MTP_LAYOUTS = (
    # DeepSeek-V3, GLM-4.5
    MtpLayout(_NEXTN, f"{_NEXTN}enorm", f"{_NEXTN}hnorm", f"{_NEXTN}eh_proj", f"{_NEXTN}shared_head.norm"),
    # MiMo
    MtpLayout(
        _MIMO, f"{_MIMO}token_layernorm", f"{_MIMO}hidden_layernorm", f"{_MIMO}input_proj", f"{_MIMO}final_layernorm",
        embed_first=False, is_normed=False,
    ),
    # Qwen3-Next, Qwen3.5
    MtpLayout("mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
)  # fmt: skip


@dataclass(frozen=True)
class Mtp(HeadDecoder):
    """The first of a model's layers for multi-token prediction, for tokens at every distance.

    target_norm  the target's last norm
    """

    layout: MtpLayout = MTP_LAYOUTS[0]
    target_norm: str = NORM

    @abstractmethod
    def normed(self, weights: LayerWeights, name: str, x: Tensor) -> Tensor:
        """Norm `name` of x (n, hidden_size)."""

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """Norms, and what projects embedding and hidden state."""
        d, names = self.hidden_size, self.layout
        norms = (norm(name, d) for name in (names.embed_norm, names.hidden_norm, names.norm))
        return (*norms, TensorShape(f"{names.project}.weight", (d, 2 * d)))

    def take(self, weights: LayerWeights, states: Tensor) -> Tensor:
        """The last, behind the target's norm or before."""
        assert isinstance(weights, HeadWeights), "a head has its target beside it"
        last = states[:, 0]
        return self.normed(weights.target, self.target_norm, last) if self.layout.is_normed else last

    def join(self, weights: LayerWeights, x: Tensor, states: Tensor) -> Tensor:
        """A norm of each, projected together."""
        import torch

        names = self.layout
        parts = self.normed(weights, names.embed_norm, x), self.normed(weights, names.hidden_norm, states)
        return weights.linear(torch.cat(parts if names.embed_first else parts[::-1], 1), names.project)

    def give(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Behind the norm, as the target's."""
        return self.normed(weights, self.layout.norm, x)


@dataclass(frozen=True)
class NativeMtp(Mtp, NativeDecoder):
    """That of a native decoder."""

    def layer_prefix(self, i: int) -> str:
        """Its one layer."""
        return self.layout.layer

    def normed(self, weights: LayerWeights, name: str, x: Tensor) -> Tensor:
        """See `Mtp.normed`."""
        from offload_rt import ops

        return ops.rms_norm(x, weights.vector(name), self.eps)

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Its own norm, and the target's head."""
        return weights.linear(self.give(weights, x), EMBED if self.tied else HEAD)


# What may stand before the names of Medusa's tensors: alone in a file, or in a whole model.
MEDUSA_PREFIXES = ("", "medusa_head.")


@dataclass(frozen=True)
class Medusa(Head, NativeDecoder):
    """Medusa's heads: layer i predicts the token i + 2 places behind the one whose hidden state it gets."""

    prefix: str = ""
    n_blocks: int = 1
    has_bias: bool = True

    def layer_prefix(self, i: int) -> str:
        """Heads are numbered."""
        return f"{self.prefix}{i}."

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """Residual blocks, and a head."""
        d, parts = self.hidden_size, ("weight", "bias") if self.has_bias else ("weight",)
        names = [f"{k}.linear.{part}" for k in range(self.n_blocks) for part in parts]
        head = TensorShape(f"{self.n_blocks}.weight", (self.vocab_size, d))
        return (*(TensorShape(name, (d, d) if "weight" in name else (d,)) for name in names), head)

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """None."""
        return ()

    def take(self, weights: LayerWeights, states: Tensor) -> Tensor:
        """The last, behind the target's norm."""
        from offload_rt import ops

        return ops.rms_norm(states[:, 0], weights.vector(NORM), self.eps)

    def predict(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Logits (n, vocab_size) of the head with these weights."""
        from torch.nn.functional import silu

        for k in range(self.n_blocks):
            x = x + silu(weights.linear(x, f"{k}.linear"))
        return weights.linear(x, f"{self.n_blocks}")

    def kv_nbytes(self, itemsize: int) -> int:
        """It has no cache."""
        return 0

    def flops(self, i: int, n_rows: int, context: int) -> float:
        """Of its matrices."""
        return 2.0 * n_rows * self.hidden_size * (self.n_blocks * self.hidden_size + self.vocab_size)


_EAGLE_KEYS = {
    "architectures", "draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "norm_before_residual",
    "target_hidden_size", "target_model_type", "has_no_defaults_at_init",
}  # fmt: skip


def _eagle_of(raw: dict[str, Any], target: NativeDecoder) -> Eagle3:
    llama = spec_of({key: value for key, value in raw.items() if key not in _EAGLE_KEYS})
    if llama.n_layers != 1 or not isinstance(llama, NativeDecoder):
        problem = f"config.json: an EAGLE-3 head of {llama.n_layers} layers of type {llama.family} is not supported"
        raise UnsupportedModelError(problem, need="1 layer as of a Llama")
    for what, have, need in (
        ("hidden size", raw.get("target_hidden_size", llama.hidden_size), target.hidden_size),
        ("hidden size", llama.hidden_size, target.hidden_size),
        ("vocabulary", llama.vocab_size, target.vocab_size),
    ):
        if have != need:
            raise of_another_target(what, str(have), str(need))
    n, nested = target.n_layers, (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    # Trainers count the layers whose output is taken from 0; at the top of a config stand those before which it is taken.
    taps = [i + 1 for i in nested] if nested else raw.get("eagle_aux_hidden_state_layer_ids") or [2, n // 2, n - 3]
    if not all(isinstance(one, int) and 0 <= one <= n for one in taps):
        raise of_another_target("hidden states", f"those after {taps} layers", f"at most {n}")
    return Eagle3(**{
        **vars(llama), "family": "eagle", "max_positions": target.max_positions, "taps": tuple(taps),
        "n_tokens": raw.get("draft_vocab_size") or llama.vocab_size,
        "norm_before": bool(raw.get("norm_before_residual")),
    })  # fmt: skip


def mtp_of(target: NativeDecoder, layout: MtpLayout) -> NativeMtp:
    """The layer of a model for multi-token prediction."""
    n = target.n_layers
    changes = {"family": "mtp", "n_layers": 1, "windows": (None,), "taps": (n,), "n_mtp": 0, "layout": layout.of(n)}
    return NativeMtp(**{**vars(target), **changes})


def _medusa_of(raw: dict[str, Any], target: NativeDecoder) -> Medusa:
    """In the layout of the authors."""
    n_heads = raw.get("medusa_num_heads", raw.get("num_heads"))
    n_blocks = raw.get("medusa_num_layers", raw.get("num_hidden_layers", 1))
    for name, value in (("medusa_num_heads", n_heads), ("medusa_num_layers", n_blocks)):
        if type(value) is not int or not 0 < value < 100:
            raise UnsupportedModelError(f"config.json: {name} is {value!r}", need="a whole number from 1 to 99")
    changes = {"family": "medusa", "n_layers": n_heads, "taps": (target.n_layers,), "n_mtp": 0}
    return Medusa(**{**vars(target), **changes, "n_blocks": n_blocks})


def head_kind(raw: dict[str, Any]) -> str | None:
    """The drafter whose heads a config.json describes; None: it is of a whole model."""
    if raw.get("model_type") == "medusa" or "medusa_num_heads" in raw:
        return "medusa"
    is_eagle = "draft_vocab_size" in raw or any("Eagle3" in str(name) for name in raw.get("architectures") or ())
    return "eagle" if is_eagle else None


def head_of(raw: dict[str, Any] | None, target: Architecture) -> Head | None:
    """The head of a config.json, or of the target where none is given; None where there is none.

    Raises UnsupportedModelError where it is not understood, SettingsError where it is for another target.
    """
    if raw is None:
        return mtp_of(target, MTP_LAYOUTS[0]) if isinstance(target, NativeDecoder) and target.n_mtp else None
    kind = head_kind(raw)
    if kind is None:
        return None
    if not isinstance(target, NativeDecoder):
        change = "leave --draft-model out, or give a whole model"
        raise UnsupportedModelError(f"heads cannot draft for a model of type {target.family}", change=change)
    return _medusa_of(raw, target) if kind == "medusa" else _eagle_of(raw, target)


def of_another_target(what: str, have: str, need: str) -> SettingsError:
    """The error of a head that does not fit."""
    return SettingsError(
        f"the head's {what} is not the model's", need=need, have=have, change="give a head made for it"
    )
