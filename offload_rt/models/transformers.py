"""Any causal model of transformers: runs its modules, with weights bound layer by layer.

Mixtures with Llama's attention share attention and norms with the native decoder: on a CPU, a layer
outside of its products then takes a third of the time of transformers' modules.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Self

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from offload_rt import ops
from offload_rt.errors import UnsupportedModelError, config_error
from offload_rt.models import image_tower
from offload_rt.models.architecture import Architecture
from offload_rt.models.bound_modules import WHOLE, StoredParts
from offload_rt.models.image_tower import ImageTower
from offload_rt.models.layers import LayerWeights, Mixture, Part, PassContext, TensorShape
from offload_rt.models.native import NativeDecoder, native_decoder
from offload_rt.models.stand_ins import OTHER_STATE, OWN_CODE, TRACED
from offload_rt.models.tensor_names import TensorNames
from offload_rt.models.traced import TracedModel
from offload_rt.ops.delta_rule import BLOCK_ROWS

# Supported layer types: causal attention, full or within a window.
_KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
# Model types with Llama's attention, and whether it norms queries and keys; biases are weights.
_HAS_QK_NORM = {"mixtral": False, "qwen2_moe": False, "qwen3_moe": True}


def parse_architecture(raw: dict[str, Any]) -> "TransformersModel":
    """Build the architecture of a config.json from transformers. Raises UnsupportedModelError."""
    kind = raw.get("model_type")
    kind = "deepseek_v3" if kind == "kimi_k2" else kind  # by its authors' advice
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        change = "remote code is not run; use a model type that transformers implements"
        raise config_error(f"model_type {kind!r} is not supported", change=change)
    try:
        made = CONFIG_MAPPING[kind]
        known = {key: value for key, value in raw.items() if key != "auto_map"}
        config = made.from_dict(made._decode_special_floats({**known, "model_type": kind}))
    except Exception as error:  # transformers' strict configs raise a dozen unrelated classes
        raise UnsupportedModelError(f"config.json is not understood: {_said(error)}") from error
    try:
        _refuse_other_state(config)
        model = TracedModel(config, _class_of(kind, raw.get("architectures")))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{kind} is not supported: {error}") from error
    except Exception as error:  # tracing runs arbitrary model code on shapes
        # A KeyError for our attention means a table of attention classes, as in older models.
        is_own = isinstance(error, KeyError) and error.args == (TRACED,)
        why = f"its layers {OWN_CODE}" if is_own else f"its model cannot be traced ({_said(error)})"
        raise UnsupportedModelError(f"{kind} is not supported: {why}") from error
    has_tower = (
        kind in image_tower.FAMILIES
        and getattr(config, "vision_config", None) is not None
        and hasattr(model.model.base_model, "get_image_features")
    )
    spec = TransformersModel(
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
        tower=ImageTower(model, kind) if has_tower else None,
        tp_plan=dict.fromkeys(model.linears, "colwise_gather_output")
        | (model.text.base_model_tp_plan or {}),
    )
    if kind not in _HAS_QK_NORM:
        return spec
    windows = tuple(model.cache.windows[i, 0] for i in range(spec.n_layers))
    changes = {"windows": windows, "qk_norm": _HAS_QK_NORM[kind]}
    return NativeMixture(**vars(spec), decoder=native_decoder(model.text.to_dict(), **changes))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _refuse_other_state(config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedModelError("it is an encoder-decoder model")
    text = config.get_text_config(decoder=True)
    # Value heads identify gated delta nets; other kinds decay per channel (Kimi Linear).
    known = _KINDS | {"linear_attention"} if hasattr(text, "linear_num_value_heads") else _KINDS
    known = known | {"indexed_attention"} if hasattr(text, "index_topk") else known
    for name in ("layer_types", "layers_block_type"):
        if unknown := sorted(set(getattr(text, name, None) or ()) - known):
            raise UnsupportedModelError(f"its layers of type {unknown[0]!r} {OTHER_STATE}")


def _class_of(kind: str, named: object) -> type[PreTrainedModel]:
    """Return the class named in the config, or transformers' class for the model type."""
    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    names = [names[kind] for names in mappings if kind in names]
    class_names = [name for mapping in mappings for name in mapping.values()]
    if isinstance(named, list) and len(named) == 1 and named[0] in class_names:
        names.insert(0, named[0])
    for name in names:
        if hasattr(transformers, name):
            model_class: type[PreTrainedModel] = getattr(transformers, name)
            return model_class
    raise UnsupportedModelError("transformers has no causal language model of this type")


def _max_positions(text: PreTrainedConfig, windows: set[int | None]) -> int:
    """Return the number of positions without truncated attention or length-dependent RoPE."""
    # Sparse attention selects all keys up to index_topk.
    names = ("max_position_embeddings", "attention_chunk_size", "index_topk")
    limits = [getattr(text, name, None) for name in names]
    if windows == {None} and not getattr(text, "layer_types", None):
        # used by caches if masks have no window
        limits.append(getattr(text, "sliding_window", None))
    ropes = getattr(text, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)]
    for rope in (ropes, *nested):
        if rope.get("rope_type") in ("longrope", "dynamic"):
            limits.append(rope.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit), default=2**15)


@dataclass(frozen=True)
class TransformersModel(Architecture):
    """A model of transformers.

    config         JSON of the config
    tower          vision tower of a supported family, or None
    parts          per layer, tensors that the checkpoint stores in parts
    """

    config: str
    model: TracedModel = field(compare=False, repr=False)
    tower: ImageTower | None = field(default=None, compare=False, repr=False)
    parts: tuple[StoredParts, ...] = field(default=(), compare=False, repr=False)

    supports_graphs = False
    supports_self_draft = False
    supports_offloaded_kv = False
    supports_training = False
    embeds_on_all_stages = True

    images = property(attrgetter("tower"))
    shared_modules = property(attrgetter("model.shared_modules"))
    kv_shapes = property(attrgetter("model.kv_shapes"))
    state_shapes = property(attrgetter("model.state_shapes"))
    state_layers = property(attrgetter("model.cache.states"))

    @property
    def supports_mtp(self) -> bool:
        """Whether `traced_mtp` knows the layer: models with recurrent states."""
        return bool(self.state_shapes)

    @property
    def notice(self) -> str:  # type: ignore[override]  # read-only
        """Notice about omitted parts of a multimodal model."""
        is_part = self.model.model.config is not self.model.text and self.tower is None
        return f"{self.family}: only the text model of the checkpoint is used" if is_part else ""

    def kv_layers(self, i: int) -> Sequence[int]:
        return self.model.cache.of_layer(i)

    def kv_read(self, i: int) -> Collection[int]:
        return self.model.cache.read.get(i, ())

    def of_checkpoint(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Self, Mapping[str, Part]]:
        names = TensorNames(self.model, shapes)
        # Text models are also published with the config of the whole model.
        has_tower = self.tower is not None and self.tower.parts[0][0].name in names.parts
        tower = self.tower if has_tower else None
        return replace(self, tower=tower, parts=names.stored_parts()), names.parts

    @property
    def mixture(self) -> Mixture | None:
        if not (mixtures := self.model.mixtures):
            return None
        first = next(iter(mixtures.values()))
        return Mixture(tuple(sorted(mixtures)), first.n_experts, first.n_used)

    def expert_names(self, i: int) -> Mapping[str, int | None]:
        names: dict[str, int | None] = {}
        for name in self.model.mixtures[i].parameters if i in self.model.mixtures else ():
            matrices = self._parts(i).experts.get(name)
            for expert, group in enumerate(matrices or ()):
                names |= dict.fromkeys(group, expert)
            names |= {} if matrices else {name: None}
        return names

    def layer_prefix(self, i: int) -> str:
        return f"{self.model.prefix}{i}."

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """Return tensors in the order of the model; experts individually if stored so."""
        tensors = list[TensorShape]()
        held = self._parts(i)
        for name, shape in self.model.shapes[i].items():
            parts = [part for names in held.experts.get(name, ()) for part in names]
            ordered = (shape[0], *shape[:0:-1]) if name in self.model.transposed else shape
            matrix = (math.prod(ordered[:2]) // max(len(parts), 1), *ordered[2:])
            experts = [TensorShape(f"{part}.weight", matrix) for part in parts]
            tensors += experts or held.split.get(name, [TensorShape(name, shape)])
        return tuple(tensors)

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        return tuple(TensorShape(*item) for item in self.model.shapes[-1].items())

    def is_unused(self, name: str) -> bool:
        ignored = self.model.model._keys_to_ignore_on_load_unexpected or ()
        return (
            name in self.model.state
            or name in self.model.buffer_names
            or name.endswith(("rotary_emb.inv_freq", ".masked_bias"))
            or any(re.search(pattern, name) for pattern in ignored)
        )

    def row_inputs(
        self, positions: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        return (positions,)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        return self.model.embed(weights, ids, row_inputs[0], None)

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        return self.model.layer(i, weights, self._parts(i), x, context)

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        return self.model.head(weights, x)

    def flops(self, i: int, n_rows: int, context: int) -> float:
        """Count 2 per used weight and row, and 2 per visible key and value element of each head."""
        shapes = self.model.shapes[i].values()
        n_weights = sum(self._n_met(shape) * math.prod(shape[-2:]) for shape in shapes)
        # A row reads a state twice and updates it; rows of a block interact with each other.
        if i in self.model.cache.states:
            _, n_heads, k_dim, v_dim, _ = self.state_shapes[0]
            n_head_products = 3 * k_dim * v_dim + min(n_rows, BLOCK_ROWS) * (k_dim + v_dim)
            return 2.0 * n_rows * float(n_weights + n_heads * n_head_products)
        shape = self.kv_shapes[min(i, len(self.kv_shapes) - 1)]
        n_met = self.model.text.num_attention_heads * (shape.k_dim + shape.v_dim)
        return 2.0 * n_rows * float(n_weights + (context + n_rows) * n_met)

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """Return the summed inputs and outputs of a layer's matrices, for all experts of a row."""
        widest = max(
            sum(self._n_met(shape) * sum(shape[-2:]) for shape in shapes.values() if len(shape) > 1)
            for shapes in self.model.shapes[:-1]
        )
        logits = n_logits * self.vocab_size * (itemsize + 8)
        # State layers hold float32 channels (convolved, split, normed) and pairs of rows.
        n_pairs = min(n_rows, n_logits) * n_logits + BLOCK_ROWS**2
        state_sizes = (
            5 * n_rows * sum(state.widths) + 4 * state.n_v_heads * n_pairs
            for state in self.state_shapes
        )
        n_activations = n_rows * (widest + 4 * self.hidden_size)
        return n_activations * itemsize + 4 * max(state_sizes, default=0) + logits

    def _n_met(self, shape: tuple[int, ...]) -> int:
        """Return the number of matrices of a tensor that a row uses; fewer than all for experts."""
        if len(shape) < 3:
            return 1
        config = self.mixture.n_used if self.mixture else 0
        n_used = config or getattr(self.model.text, "num_experts_per_tok", None) or shape[0]
        return min(shape[0], n_used)

    def _parts(self, i: int) -> StoredParts:
        return self.parts[i] if self.parts else WHOLE


@dataclass(frozen=True)
class NativeMixture(TransformersModel):
    """A mixture of transformers; the decoder computes all but its routers and experts."""

    decoder: NativeDecoder = field(compare=False, repr=False, kw_only=True)

    embeds_on_all_stages = False

    def row_inputs(
        self, positions: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        return self.decoder.row_inputs(positions, lengths, dtype)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.decoder.embed(weights, ids, row_inputs)

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        eps = self.decoder.eps
        h = ops.rms_norm(x, weights.vector("input_layernorm"), eps)
        out = self.decoder.attention(i, weights, h, context)
        h = ops.add_rms_norm(x, out, weights.vector("post_attention_layernorm"), eps)
        return x.add_(self.model.mlp(i, weights, self._parts(i), h))

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        return self.decoder.head(weights, x)
