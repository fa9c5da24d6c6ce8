"""Any causal model of transformers: its own modules, whose layers are given weights for as long as they compute.

The model is made on the meta device and traced once. Its layers are replaced by `_Place`s: a forward of the model then gives
what each layer is told besides the hidden states, or takes the hidden states behind the last one to the logits. The layers
themselves are called one by one, with the weights of a block, and their attention leads to the context of the pass.
"""

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)  # fmt: skip
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import Architecture, KVShape, LayerWeights, Part, PassContext, TensorShape

# Names under which transformers finds our attention: in passes, where nobody makes masks, and while a model is traced.
_ATTENTION, _TRACED = "offload_rt", "offload_rt_traced"
_STATE = "keep state that is not keys and values"
_OWN_CODE = "attend by code of their own"
# Kinds of layers whose attention is causal, whole or within a window.
_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
# Rows that a model is traced with: no size of a model, so that they are recognised in a shape.
_N_TRACED = 7
# What the models of transformers write into the arguments of attention, and what of it does not change the result.
_IGNORED = {
    "dropout",
    "is_causal",
    "position_ids",
    "output_attentions",
    "use_cache",
    "cache_position",
    "past_key_values",
}


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
    _refuse_other_state(kind, config)
    try:
        net = _Net(config, _class_of(kind, config, raw.get("architectures")))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{kind} is not supported: {error}") from error
    except Exception as error:  # a model runs on shapes alone here, and may fail in any way
        is_own = isinstance(error, KeyError) and error.args == (_TRACED,)  # it has a table of the kinds that it knows
        why = f"its layers {_OWN_CODE}" if is_own else f"its model cannot be traced ({_said(error)})"
        raise UnsupportedModelError(f"{kind} is not supported: {why}") from error
    return TransformersModel(
        family=kind,
        dtype_name=None if config.dtype is None else str(config.dtype).removeprefix("torch."),
        n_layers=len(net.layers),
        vocab_size=net.vocab_size,
        hidden_size=math.prod(net.hidden_shape),
        n_kv_heads=net.kv_shapes[0].n_heads,
        head_dim=net.kv_shapes[0].k_dim,
        max_positions=_max_positions(net.text, set(net.going.windows.values())),
        config=config.to_json_string(),
        net=net,
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _nothing(*args: Any) -> None:
    pass


def _refuse_other_state(kind: str, config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{kind} is not supported: it is an encoder-decoder")
    text = config.get_text_config(decoder=True)
    for name in ("layer_types", "layers_block_type"):
        others = sorted(set(getattr(text, name, None) or ()) - _KINDS - {"attention"})
        if others:
            raise UnsupportedModelError(f"{kind} is not supported: its layers of type {others[0]!r} {_STATE}")


def _class_of(kind: str, config: PreTrainedConfig, named: object) -> type[PreTrainedModel]:
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
    raise UnsupportedModelError(f"{kind} is not supported: transformers has no causal language model of it")


def _max_positions(text: PreTrainedConfig, windows: set[int | None]) -> int:
    """Positions up to which every layer sees all that is not behind its window, and rotations do not depend on the length.

    windows  those of the layers' masks
    """
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "attention_chunk_size")]
    if windows == {None} and not getattr(text, "layer_types", None):
        limits.append(getattr(text, "sliding_window", None))  # transformers' caches go by it where masks do not
    ropes = getattr(text, "rope_parameters", None) or {}
    for one in (ropes, *(one for one in ropes.values() if isinstance(one, dict))):
        if one.get("rope_type") in ("longrope", "dynamic"):
            limits.append(one.get("original_max_position_embeddings"))
    return min((one for one in limits if one), default=2**15)


class _Tensor(NamedTuple):
    """A parameter or buffer of a module, and its name in a block."""

    table: dict[str, Any]
    key: str
    name: str
    dtype: torch.dtype | None


class _Call(NamedTuple):
    """What the model gives a layer besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Pass(Cache):
    """What the modules see of a pass: to the model, its cache; to the attention of its layers, the way to the context.

    order    numbers of the layers of the cache, by layer of the model and attention in it
    windows  likewise, how many positions back a row sees
    """

    def __init__(self) -> None:
        self.layers = []
        self.context: PassContext | None = None
        self.order: dict[tuple[int, int], int] = {}
        self.windows: dict[tuple[int, int], int | None] = {}
        self._at = (0, 0)

    def enter(self, layer: int, context: PassContext) -> None:
        """A layer begins."""
        self.context, self._at = context, (layer, 0)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows alone: what the layer makes of them for each position is kept when it attends."""
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        """Positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """No mask is made in passes."""
        return query_length, 0

    get_query_offset = get_seq_length  # type: ignore[assignment]

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """No layer that has such a state is run."""
        raise UnsupportedModelError(f"its layers {_STATE}")

    update_recurrent_state = has_previous_state = update_conv_state  # type: ignore[assignment]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention (1, n, n_heads, dim) of q (1, n_heads, n, dim) to the rows of the cache that k and v become part of.

        Keys and values that another layer has attended to with are there already.
        """
        assert self.context is not None, "a layer is called within a pass"
        known: int | None = getattr(k, "kv_layer", None)
        is_stored = known is not None and getattr(v, "kv_layer", None) == known
        number = known if is_stored else self.order.setdefault(self._at, len(self.order))
        assert number is not None
        options["window"] = self.windows.setdefault(self._at, options["window"])
        self._at = (self._at[0], self._at[1] + 1)
        rows = [one[0].transpose(0, 1) for one in ((q,) if is_stored else (q, k, v))]
        out = self.context.attend(number, rows[0].contiguous(), *(rows[1:] or (None, None)), **options)
        k.kv_layer = v.kv_layer = number  # type: ignore[attr-defined]
        return out[None]


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What the models call for attention, see transformers' AttentionInterface; s_aux are sinks."""
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    options = {"scale": scale, "window": sliding_window, "softcap": softcap, "sinks": s_aux}
    going: _Pass = module.__dict__["offload_pass"]
    if q.is_meta:
        others = sorted(key for key, one in kwargs.items() if isinstance(one, Tensor) and key not in _IGNORED)
        is_ours = attention_mask is None or hasattr(attention_mask, "window")
        if others or not is_ours or not getattr(module, "is_causal", True):
            raise UnsupportedModelError(f"its attention takes {(others or ['a mask of its own'])[0]}")
        # The windows that layers name are for kernels that take no masks, and may lack; those of masks are what counts.
        options["window"] = getattr(attention_mask, "window", sliding_window)
        if k.shape[2] != q.shape[2]:
            raise UnsupportedModelError("its layers keep keys that are not those of single tokens")
    return going.attend(q, k, v, **options), None


def _mask(
    q_length: int, kv_length: int, device: torch.device, use_vmap: bool = False, local_size: int | None = None,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """What a traced model takes for a mask: nothing but the window, unless a model masks by a function of its own."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    if not use_vmap:
        mask.window = local_size  # type: ignore[attr-defined]
    return mask


class _Place(nn.Module):
    """Stands where a layer was, and answers for its attributes."""

    def __init__(self, net: "_Net", i: int, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_of"] = (net, i, layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_of"][2], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model has come to this layer."""
        net, i, _ = self.__dict__["_of"]
        hidden = args[0] if args else kwargs.pop("hidden_states")
        return net.come_to(i, hidden, _Call(args[1:], kwargs))


class _Traced:
    """The context of the pass in which a model is traced."""

    row_inputs = ()

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}
        self.n_calls, self.has_scores = 0, False

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, **options: Any) -> Tensor:
        """Note the shape of keys and values; see `PassContext.attend`."""
        self.n_calls += 1
        if k is not None and v is not None:
            self.shapes[layer] = KVShape(k.shape[1], k.shape[2], v.shape[2])
        return q.new_empty(*q.shape[:2], self.shapes[layer].v_dim)


class _Table:
    """The table of an embedding; to its module, the parameter that rows are looked up in."""

    def __init__(self, name: str, weights: LayerWeights, device: torch.device) -> None:
        self._name, self._weights = name, weights
        self.dtype, self.device = weights.dtype, device

    def __getitem__(self, ids: Tensor) -> Tensor:
        rows = self._weights.rows(ids.flatten(), self._name)
        return rows.view(*ids.shape, rows.shape[1])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Tensor:
        assert function is F.embedding, "what an embedding computes"
        ids, table = args[:2]
        out: Tensor = table[ids]
        return out


class _Experts:
    """One matrix for each expert, or several whose outputs follow each other, under other names; to a module, its parameter."""

    def __init__(self, names: list[list[str]], shape: tuple[int, ...], weights: LayerWeights) -> None:
        self._names, self.shape, self._weights = names, shape, weights

    def __getitem__(self, expert: Any) -> "_Matrix":
        return _Matrix(self._names[int(expert)], self._weights)


class _Matrix:
    """A matrix whose rows lie in several, for `linear` alone."""

    def __init__(self, names: list[str], weights: LayerWeights) -> None:
        self._names, self._weights = names, weights

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Tensor:
        x, matrix, *bias = args
        assert function is F.linear and not any(one is not None for one in bias), (
            "what the experts of a mixture compute"
        )
        return torch.cat([matrix._weights.linear(x, name) for name in matrix._names], dim=-1)


class _Net:
    """A model of transformers without weights.

    hidden_shape  of the hidden states between layers, without rows
    kv_shapes     of the layers of the cache
    """

    def __init__(self, config: PreTrainedConfig, model: type[PreTrainedModel]) -> None:
        for name in (_ATTENTION, _TRACED):
            AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(_TRACED, _mask)
        with torch.device("meta"):
            is_whole = isinstance(config, model.config_class or PreTrainedConfig)
            made_from = config if is_whole else config.get_text_config(decoder=True)
            self.model: Any = model._from_config(made_from, attn_implementation=_TRACED).eval()  # type: ignore[no-untyped-call]
        self.text = self.model.config.get_text_config(decoder=True)
        self.model.warn_if_padding_and_no_attention_mask = _nothing  # it looks at tokens
        self.decoder: Any = self.model.get_decoder()
        self.decoder.warn_if_padding_and_no_attention_mask = _nothing
        if "position_ids" not in inspect.signature(self.decoder.forward).parameters:
            raise UnsupportedModelError("its model takes no positions of tokens")
        names = {id(module): name for name, module in self.model.named_modules()}
        self.state = {name: tuple(one.shape) for name, one in self.model.state_dict().items()}
        tied: dict[int, str] = {}
        for name, one in self.model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(one), name)
        places = self._places()
        self.prefix, self.layers = f"{names[id(places)]}.", list(places)
        self.going, self.device = _Pass(), torch.device("cpu")
        self.first: Tensor | None = None
        self.last: Tensor | None = None
        self.calls: list[_Call] = []
        self.gives_tuples = False
        for i, layer in enumerate(self.layers):
            for module in layer.modules():
                module.__dict__["offload_pass"] = self.going
            places[i] = _Place(self, i, layer)
        called = self._trace()
        stands = list(places)
        for i, layer in enumerate(self.layers):
            places[i] = layer
        self._fill_buffers()
        for i, one in enumerate(stands):
            places[i] = one
        self._bind(called, names, tied)

    def _places(self) -> nn.ModuleList:
        n = self.text.num_hidden_layers
        for module in self.decoder.modules():
            if isinstance(module, nn.ModuleList) and len(module) == n:
                return module
        raise UnsupportedModelError(f"its model has no list of {n} layers")

    def _trace(self) -> list[nn.Module]:
        """Run the model on shapes alone, and see that it is what is expected here; returns the modules outside the layers."""
        called: dict[nn.Module, None] = {}
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        outside = [module for module in self.model.modules() if id(module) not in inside]
        hooks = [module.register_forward_pre_hook(lambda module, _: called.setdefault(module)) for module in outside]
        self.traced: _Traced | None = _Traced()
        self.n_come = 0
        ropes = [(one, one.rope_type) for one in self.model.modules() if hasattr(one, "rope_type")]
        self._freeze_ropes()
        config = self.model.config
        config._experts_implementation = "batched_mm"  # the one that does not look at values
        rows = torch.zeros(1, _N_TRACED, dtype=torch.int64, device="meta")
        self.vocab_size: int = self.model(
            rows, position_ids=rows, past_key_values=self.going, use_cache=True
        ).logits.shape[-1]
        config._experts_implementation, config._attn_implementation = "eager", _ATTENTION
        if self.n_come != len(self.layers):
            raise UnsupportedModelError("its layers are not called one after the other")
        self.kv_shapes = tuple(self.traced.shapes[i] for i in range(len(self.traced.shapes)))
        self.traced = None
        for hook in hooks:
            hook.remove()
        for module, kind in ropes:
            module.rope_type = kind
        return list(called)

    def _fill_buffers(self) -> None:
        """Compute what follows from the config, such as frequencies, as transformers does for a model that it loads."""
        modules = list(self.model.modules())
        self.buffers = [
            (one._buffers, key) for one in modules for key in one._non_persistent_buffers_set & one._buffers.keys()
        ]
        self.buffer_names = dict(self.model.named_buffers()).keys()
        for table, key in self.buffers:
            buffer = table[key]
            table[key] = None if buffer is None else torch.empty_like(buffer, device="cpu")
        self.model.initialize_weights()
        self._freeze_ropes()

    def _freeze_ropes(self) -> None:
        """Keep frequencies that would depend on the length of the sequence; see `_max_positions`."""
        for module in self.model.modules():
            kind = getattr(module, "rope_type", None)
            if kind is not None:
                module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"

    def come_to(self, i: int, hidden: Tensor, call: _Call) -> Any:
        """What the model takes for the output of layer i."""
        if self.traced is not None:
            return self._trace_layer(i, hidden, call)
        if self.last is None:
            self.calls.append(call)
            self.first = hidden if i == 0 else self.first
        elif i == len(self.layers) - 1:
            hidden = self.last
        return (hidden, None, None) if self.gives_tuples else hidden

    def _trace_layer(self, i: int, hidden: Tensor, call: _Call) -> Any:
        traced = self.traced
        assert traced is not None
        n_before = traced.n_calls
        self.going.enter(i, traced)
        if i != self.n_come or (i > 0 and hidden is not self.last):
            raise UnsupportedModelError("it computes between its layers, or does not call them one after the other")
        out: Any = hidden
        try:
            out = self.layers[i](hidden, *call.args, **call.kwargs)
        except (NotImplementedError, RuntimeError):  # some mixtures look at values, behind their attention
            if traced.n_calls == n_before:
                raise
        if traced.n_calls == n_before:
            raise UnsupportedModelError(f"its layers {_OWN_CODE}, or {_STATE}")
        self.gives_tuples = isinstance(out, tuple)
        self.last = out[0] if self.gives_tuples else out
        if i == 0:
            (self.row_dim,) = (dim for dim, size in enumerate(hidden.shape) if size == _N_TRACED)
            self.hidden_shape = (*hidden.shape[: self.row_dim], *hidden.shape[self.row_dim + 1 :])
        self.n_come += 1
        return out

    def _bind(self, called: list[nn.Module], names: dict[int, str], tied: dict[int, str]) -> None:
        """Let linear modules and embeddings ask for their weights, and list what else a module has to be given.

        names  of modules and, `tied`, of parameters, by id
        """
        self.weights: LayerWeights
        self.last, self.calls = None, []
        of_layer = {id(module): i for i, layer in enumerate(self.layers) for module in layer.modules()}
        # Those of the layers, and behind them those outside.
        self.tensors: list[list[_Tensor]] = [[] for _ in range(len(self.layers) + 1)]
        self.tables: list[list[tuple[dict[str, Any], str]]] = [[] for _ in self.tensors]
        self.shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in self.tensors]
        for module in (*called, *(module for layer in self.layers for module in layer.modules())):
            i = of_layer.get(id(module), -1)
            start = len(f"{self.prefix}{i}.") if i >= 0 else 0
            own: list[tuple[dict[str, Any], str, Any]] = [
                (module._parameters, key, one) for key, one in module._parameters.items() if one is not None
            ]
            kept = module._buffers.keys() - module._non_persistent_buffers_set
            own += [(module._buffers, key, module._buffers[key]) for key in sorted(kept)]
            keys = [(tied.get(id(one)) or f"{names[id(module)]}.{key}")[start:] for _, key, one in own]
            self.shapes[i] |= {key: tuple(one.shape) for key, (_, _, one) in zip(keys, own, strict=True)}
            if type(module) is nn.Linear:
                linear = partial(self._linear, keys[0].removesuffix(".weight"))
                module.forward = linear  # type: ignore[method-assign]
            elif isinstance(module, nn.Embedding):
                self.tables[i].append((module._parameters, keys[0].removesuffix(".weight")))
            else:
                dtypes = (None if one.dtype == self.model.dtype else one.dtype for _, _, one in own)
                more = zip(own, keys, dtypes, strict=True)
                self.tensors[i] += [_Tensor(table, at, key, dtype) for (table, at, _), key, dtype in more]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self.weights.linear(x, name)

    @contextmanager
    def given(self, i: int, weights: LayerWeights, experts: Mapping[str, list[list[str]]]) -> Iterator[None]:
        """Bind the weights of layer i, -1: those outside the layers, and let go of them."""
        self.weights = weights
        for one in self.tensors[i]:
            parts = experts.get(one.name)
            shape = self.shapes[i][one.name]
            given = _Experts(parts, shape, weights) if parts else weights.tensor(one.name, one.dtype)
            one.table[one.key] = given
        for table, name in self.tables[i]:
            table["weight"] = _Table(name, weights, self.device)
        try:
            yield
        finally:
            for one in self.tensors[i]:
                one.table[one.key] = None

    def ask(self, module: nn.Module, ids: Tensor, positions: Tensor) -> Any:
        """A forward of the model, or of its decoder, in which no layer computes."""
        if ids.device != self.device:
            for table, key in self.buffers:
                table[key] = None if table[key] is None else table[key].to(ids.device)
            self.device = ids.device
        return module(ids[None], position_ids=positions[None], past_key_values=self.going, use_cache=True)

    def to_rows(self, hidden: Tensor) -> Tensor:
        """Hidden states as the layers have them to (n, width)."""
        return hidden.movedim(self.row_dim, 0).flatten(1)

    def of_rows(self, x: Tensor) -> Tensor:
        """The other way round."""
        before, behind = self.hidden_shape[: self.row_dim], self.hidden_shape[self.row_dim :]
        if math.prod(before) == 1:  # strides as of new tensors: torch copies the weights of a product with others
            return x.view(*before, len(x), *behind)
        return x.view(len(x), *self.hidden_shape).movedim(0, self.row_dim)


@dataclass(frozen=True)
class TransformersModel(Architecture):
    """A model of transformers.

    config   what it is made from
    experts  per parameter of a layer that holds experts, their matrices in the checkpoint: several are joined
    """

    config: str
    net: _Net = field(compare=False, repr=False)
    experts: tuple[Mapping[str, list[list[str]]], ...] = field(default=(), compare=False, repr=False)

    is_native = False

    @property
    def notice(self) -> str:  # type: ignore[override]  # it is read alone
        """Says where a part of the model is left out."""
        is_part = self.net.model.config is not self.net.text
        return f"{self.family}: the text model is run, and nothing else of the checkpoint is read" if is_part else ""

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """As the layers give them."""
        return self.net.kv_shapes

    def of_checkpoint(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple["TransformersModel", Mapping[str, Part]]:
        """By transformers' own mapping of names. See `Architecture.of_checkpoint`."""
        names = _Names(self.net)
        for name in sorted(shapes, key=dot_natural_key):
            names.add(name, shapes[name])
        return replace(self, experts=names.experts()), names.parts

    def layer_prefix(self, i: int) -> str:
        """As the model names its layers."""
        return f"{self.net.prefix}{i}."

    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """In the order of the model; the matrices of experts one by one where the checkpoint has them so."""
        tensors, experts = [], self._experts(i)
        for name, shape in self.net.shapes[i].items():
            parts = [one for names in experts.get(name, ()) for one in names]
            rows = math.prod(shape[:2]) // max(len(parts), 1)
            tensors += [TensorShape(f"{one}.weight", (rows, shape[2])) for one in parts] or [TensorShape(name, shape)]
        return tuple(tensors)

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """Of the modules that are called for a text."""
        return tuple(TensorShape(*one) for one in self.net.shapes[-1].items())

    def is_unused(self, name: str) -> bool:
        """Parts that are not called, copies of tied weights, what follows from the config, and what transformers ignores."""
        ignored = self.net.model._keys_to_ignore_on_load_unexpected or ()
        derived = name.endswith(("rotary_emb.inv_freq", ".masked_bias")) or name in self.net.buffer_names
        return name in self.net.state or derived or any(re.search(one, name) for one in ignored)

    def row_inputs(self, positions: Tensor, lengths: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The model makes everything else of them."""
        return (positions,)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[_Call, ...]]:
        """What the first layer gets, and what the model tells each of them besides."""
        net = self.net
        net.last, net.calls = None, []
        with net.given(-1, weights, {}):
            net.ask(net.decoder, ids, row_inputs[0])
        assert net.first is not None, "the model has come to its first layer"
        return net.to_rows(net.first), tuple(net.calls)

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """The model's own layer."""
        net, call = self.net, context.row_inputs[i]
        net.going.enter(i, context)
        with net.given(i, weights, self._experts(i)):
            out = net.layers[i](net.of_rows(x), *call.args, **call.kwargs)
        return net.to_rows(out[0] if isinstance(out, tuple) else out)

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """What the model makes of hidden states behind its last layer."""
        net, rows = self.net, torch.zeros(len(x), dtype=torch.int64, device=x.device)
        net.last = net.of_rows(x)
        with net.given(-1, weights, {}):
            logits: Tensor = net.ask(net.model, rows, rows).logits[0]
        return logits

    def flops(self, i: int, n_rows: int, context: int) -> float:
        """Two for each weight that a row meets, and two for each number of key and value that its heads meet."""
        n_experts = getattr(self.net.text, "num_experts_per_tok", None)
        shapes = self.net.shapes[i].values()
        n_weights = sum(
            math.prod((min(one[0], n_experts or one[0]), *one[1:]) if len(one) == 3 else one) for one in shapes
        )
        shape = self.net.kv_shapes[min(i, len(self.net.kv_shapes) - 1)]
        n_met = self.net.text.num_attention_heads * (shape.k_dim + shape.v_dim)
        return 2.0 * n_rows * float(n_weights + (context + n_rows) * n_met)

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """What all matrices of a layer take and give."""
        widest = max(sum(sum(one[-2:]) for one in shapes.values() if len(one) > 1) for shapes in self.net.shapes[:-1])
        return n_rows * (widest + 4 * self.hidden_size) * itemsize + n_logits * self.vocab_size * (itemsize + 8)

    def _experts(self, i: int) -> Mapping[str, list[list[str]]]:
        return self.experts[i] if self.experts else {}


class _Names:
    """Finds a model's tensors among those of a checkpoint.

    parts  where the tensors lie, by the model's names; of experts that are stored one by one, by the checkpoint's
    """

    def __init__(self, net: _Net) -> None:
        self.parts: dict[str, Part] = {}
        self._net = net
        transforms = get_model_conversion_mapping(net.model)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._of_experts: dict[str, dict[str, dict[str, None]]] = {}

    def add(self, stored: str, shape: tuple[int, ...]) -> None:
        """Place a tensor; one that nothing is known of keeps its name."""
        stem, _, last = stored.rpartition(".")
        for probe, ending in ((stored, ""), (f"{stem}.weight", last)):  # a matrix may be stored as codes and scales
            name, pattern = self._renamed(probe)
            if name not in self._net.state:
                continue
            if pattern is not None:
                self._convert(stored, (probe, ending), shape, name, pattern)
            else:
                self.parts[name.removesuffix("weight") + ending if ending else name] = Part(stored)
            return
        self.parts[stored] = Part(stored)

    def _renamed(self, name: str) -> tuple[str, str | None]:
        base = self._net.model.base_model_prefix
        new, pattern = rename_source_key(name, self._renamings, self._converters, base, self._net.state)
        if new not in self._net.state and name in self._net.state:
            return name, None
        return new, pattern

    def _convert(self, stored: str, probe: tuple[str, str], shape: tuple[int, ...], name: str, pattern: str) -> None:
        """Place a tensor that has parts of others, or is a part. Raises UnsupportedModelError where bytes change places."""
        converter = next(one for one in self._converters if pattern in one.source_patterns)
        steps = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
        if steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]) and probe[0].endswith(".weight"):
            own, base = apply_renamings(probe[0], self._renamings), f"{self._net.model.base_model_prefix}."
            own = base + own if name.startswith(base) and not own.startswith(base) else own
            self.parts[own.removesuffix("weight") + probe[1] if probe[1] else own] = Part(stored)
            self._of_experts.setdefault(name, {}).setdefault(pattern, {})[own.removesuffix(".weight")] = None
        elif steps == [(Chunk, 0)] and not probe[1]:
            targets = converter.target_patterns
            n_rows = shape[0] // len(targets)
            for n, target in enumerate(targets):
                self.parts[name.replace(targets[0], target)] = Part(stored, n * n_rows, n_rows)
        else:
            raise UnsupportedModelError(
                f"tensor {stored!r} would have to be converted ({', '.join(map(str, converter.operations))})",
                change="save the model with transformers as its classes have it",
            )

    def experts(self) -> tuple[Mapping[str, list[list[str]]], ...]:
        """Per layer, for each parameter that holds experts, the modules of each expert, without the prefix of the layer."""
        layers: list[dict[str, list[list[str]]]] = [{} for _ in self._net.layers]
        order = {one: n for converter in self._converters for n, one in enumerate(converter.source_patterns)}
        for name, by_pattern in self._of_experts.items():
            i = name.removeprefix(self._net.prefix).partition(".")[0]
            start = len(f"{self._net.prefix}{i}.")
            kinds = [
                [one[start:] for one in by_pattern[pattern]] for pattern in sorted(by_pattern, key=order.__getitem__)
            ]
            layers[int(i)][name[start:]] = [list(one) for one in zip(*kinds, strict=True)]
        return tuple(layers)
