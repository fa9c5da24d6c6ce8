"""Any causal model of transformers: its own modules, whose layers are given weights for as long as they compute."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import (
    Architecture,
    KVShape,
    LayerWeights,
    Mixture,
    Part,
    PassContext,
    StateShape,
    TensorShape,
)
from offload_rt.models.stand_ins import OTHER_STATE, TRACED
from offload_rt.models.tensor_names import TensorNames
from offload_rt.models.traced import OWN_CODE, Call, ExpertNames, JoinedTensors, TracedModel
from offload_rt.ops.delta_rule import BLOCK_ROWS

# Kinds of layers whose attention is causal, whole or within a window.
_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def spec_of(raw: dict[str, Any]) -> "TransformersModel":
    """Understand the content of a config.json by transformers' own model. Raises UnsupportedModelError."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        change = "its own code is not run; give a model that transformers itself has"
        raise UnsupportedModelError(f"config.json: model_type {kind!r} is not supported", change=change)
    try:
        made = CONFIG_MAPPING[kind]
        known = {key: value for key, value in raw.items() if key != "auto_map"}
        config = made.from_dict(made._decode_special_floats(known))
    except Exception as error:  # transformers' strict configs raise a dozen unrelated classes for bad values
        raise UnsupportedModelError(f"config.json is not understood: {_said(error)}") from error
    try:
        _refuse_other_state(config)
        model = TracedModel(config, _class_of(kind, raw.get("architectures")))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{kind} is not supported: {error}") from error
    except Exception as error:  # a model runs on shapes alone here, and may fail in any way
        is_own = isinstance(error, KeyError) and error.args == (TRACED,)  # it has a table of the kinds that it knows
        why = f"its layers {OWN_CODE}" if is_own else f"its model cannot be traced ({_said(error)})"
        raise UnsupportedModelError(f"{kind} is not supported: {why}") from error
    return TransformersModel(
        family=kind,
        dtype_name=None if config.dtype is None else str(config.dtype).removeprefix("torch."),
        n_layers=len(model.layers),
        vocab_size=model.vocab_size,
        hidden_size=math.prod(model.hidden_shape),
        n_kv_heads=model.kv_shapes[0].n_heads,
        head_dim=model.kv_shapes[0].k_dim,
        max_positions=_max_positions(model.text, model.windows),
        config=config.to_json_string(),
        model=model,
        tp_plan=dict.fromkeys(model.linears, "colwise_gather_output") | (model.text.base_model_tp_plan or {}),
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _refuse_other_state(config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedModelError("it is an encoder-decoder")
    text = config.get_text_config(decoder=True)
    # Heads of values are those of gated delta nets; others decay each channel by itself (Kimi Linear).
    known = _KINDS | {"linear_attention"} if hasattr(text, "linear_num_value_heads") else _KINDS
    for name in ("layer_types", "layers_block_type"):
        others = sorted(set(getattr(text, name, None) or ()) - known)
        if others:
            raise UnsupportedModelError(f"its layers of type {others[0]!r} {OTHER_STATE}")


def _class_of(kind: str, named: object) -> type[PreTrainedModel]:
    """The class that the config names, or the one that transformers has for it."""
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )  # fmt: skip
    names = [names[kind] for names in mappings if kind in names]
    if isinstance(named, list) and len(named) == 1 and any(named[0] in one.values() for one in mappings):
        names.insert(0, named[0])
    for name in names:
        found: type[PreTrainedModel] | None = getattr(transformers, name, None)
        if found is not None:
            return found
    raise UnsupportedModelError("transformers has no causal language model of it")


def _max_positions(text: PreTrainedConfig, windows: set[int | None]) -> int:
    """Positions up to which every layer sees all that is not behind its window, and rotations do not depend on the length."""
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "attention_chunk_size")]
    if windows == {None} and not getattr(text, "layer_types", None):
        limits.append(getattr(text, "sliding_window", None))  # transformers' caches go by it where masks do not
    ropes = getattr(text, "rope_parameters", None) or {}
    for one in (ropes, *(one for one in ropes.values() if isinstance(one, dict))):
        if one.get("rope_type") in ("longrope", "dynamic"):
            limits.append(one.get("original_max_position_embeddings"))
    return min((one for one in limits if one), default=2**15)


@dataclass(frozen=True)
class TransformersModel(Architecture):
    """A model of transformers.

    config   what it is made from
    experts  per layer, where the checkpoint has experts one by one
    joined   per layer, likewise other tensors in parts
    """

    config: str
    model: TracedModel = field(compare=False, repr=False)
    experts: tuple[ExpertNames, ...] = field(default=(), compare=False, repr=False)
    joined: tuple[JoinedTensors, ...] = field(default=(), compare=False, repr=False)

    is_native = False

    @property
    def notice(self) -> str:  # type: ignore[override]  # it is read alone
        """Says where a part of the model is left out."""
        is_part = self.model.model.config is not self.model.text
        return f"{self.family}: the text model is run, and nothing else of the checkpoint is read" if is_part else ""

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """As the layers give them."""
        return self.model.kv_shapes

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """Likewise."""
        return self.model.state_shapes

    @property
    def state_layers(self) -> Collection[int]:
        """Likewise."""
        return self.model.has_state

    def kv_layers(self, i: int) -> Sequence[int]:
        """As they were numbered when the model was traced."""
        return self.model.kv_layers(i)

    def kv_read(self, i: int) -> Collection[int]:
        """Likewise."""
        return self.model.kv_read(i)

    def of_checkpoint(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Self, Mapping[str, Part]]:
        """By transformers' own mapping of names. See `Architecture.of_checkpoint`."""
        names = TensorNames(self.model, shapes)
        return replace(self, experts=names.experts(), joined=names.joined()), names.parts

    @property
    def mixture(self) -> Mixture | None:
        """As it was traced."""
        found = self.model.mixtures
        one = next(iter(found.values()), None)
        return None if one is None else Mixture(tuple(sorted(found)), one.n_experts, one.n_used)

    def expert_names(self, i: int) -> Mapping[str, int | None]:
        """See `Architecture.expert_names`."""
        names: dict[str, int | None] = {}
        for name in self.model.mixtures[i].parameters if i in self.model.mixtures else ():
            matrices = self._experts(i).get(name)
            names |= {one: expert for expert, own in enumerate(matrices or ()) for one in own}
            names |= {} if matrices else {name: None}
        return names

    def layer_prefix(self, i: int) -> str:
        """As the model names its layers."""
        return f"{self.model.prefix}{i}."

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """In the order of the model; the matrices of experts one by one where the checkpoint has them so."""
        tensors, experts = list[TensorShape](), self._experts(i)
        for name, shape in self.model.shapes[i].items():
            parts = [one for names in experts.get(name, ()) for one in names]
            rows = math.prod(shape[:2]) // max(len(parts), 1)
            matrix = shape[:0:-1] if name in self.model.transposed else (rows, *shape[2:])
            stored = self._joined(i).get(name, [TensorShape(name, shape)])
            tensors += [TensorShape(f"{one}.weight", matrix) for one in parts] or stored
        return tuple(tensors)

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """Of the modules that are called for a text."""
        return tuple(TensorShape(*one) for one in self.model.shapes[-1].items())

    def is_unused(self, name: str) -> bool:
        """Parts that are not called, copies of tied weights, what follows from the config, and what transformers ignores."""
        ignored = self.model.model._keys_to_ignore_on_load_unexpected or ()
        derived = name.endswith(("rotary_emb.inv_freq", ".masked_bias")) or name in self.model.buffer_names
        return name in self.model.state or derived or any(re.search(one, name) for one in ignored)

    def row_inputs(self, positions: Tensor, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The model makes everything else of them."""
        return (positions,)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Call, ...]]:
        """What the first layer gets, and what the model tells each of them besides."""
        return self.model.embed(weights, ids, row_inputs[0])

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """The model's own layer."""
        return self.model.layer(i, weights, self._experts(i), self._joined(i), x, context)

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """What the model makes of hidden states behind its last layer."""
        return self.model.head(weights, x)

    def flops(self, i: int, n_rows: int, context: int) -> float:
        """Two for each weight that a row meets, and two for each number of key and value that its heads meet."""
        n_weights = sum(self._n_met(one) * math.prod(one[-2:]) for one in self.model.shapes[i].values())
        if i in self.model.has_state:  # a row reads a state twice and adds to it; rows of a block meet each other
            state = self.state_shapes[0]
            of_head = 3 * state.k_dim * state.v_dim + min(n_rows, BLOCK_ROWS) * (state.k_dim + state.v_dim)
            return 2.0 * n_rows * float(n_weights + state.n_v_heads * of_head)
        shape = self.kv_shapes[min(i, len(self.kv_shapes) - 1)]
        n_met = self.model.text.num_attention_heads * (shape.k_dim + shape.v_dim)
        return 2.0 * n_rows * float(n_weights + (context + n_rows) * n_met)

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """What all matrices of a layer take and give, where a row may meet several experts at once."""
        of_layers = ([one for one in shapes.values() if len(one) > 1] for shapes in self.model.shapes[:-1])
        widest = max(sum(self._n_met(one) * sum(one[-2:]) for one in matrices) for matrices in of_layers)
        logits = n_logits * self.vocab_size * (itemsize + 8)
        # Of a layer with a state in float32 the channels, as they are convolved, split and normed, and pairs of rows.
        n_pairs = min(n_rows, n_logits) * n_logits + BLOCK_ROWS**2
        of_states = (5 * n_rows * sum(one.widths) + 4 * one.n_v_heads * n_pairs for one in self.state_shapes)
        return n_rows * (widest + 4 * self.hidden_size) * itemsize + 4 * max(of_states, default=0) + logits

    def _n_met(self, shape: tuple[int, ...]) -> int:
        """How many matrices of a tensor a row meets: not all where they are of experts."""
        n_used = self.mixture.n_used if self.mixture else getattr(self.model.text, "num_experts_per_tok", None)
        return min(shape[0], n_used or shape[0]) if len(shape) == 3 else 1

    def _experts(self, i: int) -> ExpertNames:
        return self.experts[i] if self.experts else {}

    def _joined(self, i: int) -> JoinedTensors:
        return self.joined[i] if self.joined else {}
