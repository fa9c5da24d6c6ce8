"""A model of transformers without weights: traced once on shapes alone, then called layer by layer.

Its layers are replaced by `_Place`s. A forward of the model then gives what each layer is told besides the hidden states, or
takes the hidden states behind the last layer to the logits.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import KVShape, LayerExperts, LayerWeights, PassContext, StateShape, TensorShape
from offload_rt.models.stand_ins import (
    NAME,
    OTHER_STATE,
    TRACED,
    PassCache,
    Table,
    Touched,
    delta_net,
    experts_of,
    register,
)

OWN_CODE = "attend by code of their own"
# Rows that a model is traced with: no size of a model, so that they are recognised in a shape.
_N_ROWS = 7


# What the model gives a layer besides the hidden states.
Call = tuple[tuple[Any, ...], dict[str, Any]]
# Of a layer: for each parameter that holds experts, the modules of each expert, without the prefix of the layer.
ExpertNames = Mapping[str, list[list[str]]]
# Of a layer: for each tensor that a checkpoint has in parts, one behind the other along their first dimension, these.
JoinedTensors = Mapping[str, Sequence[TensorShape]]
# Takes the hidden states with which a forward of the model comes to layer i, and gives what it takes for its output.
_Visit = Callable[[int, Tensor, Call], Tensor]


class _Place(nn.Module):
    """Stands where a layer was, and answers for its attributes."""

    def __init__(self, model: "TracedModel", i: int) -> None:
        super().__init__()
        self.__dict__["_of"] = (model, i)

    def __getattr__(self, name: str) -> Any:
        model, i = self.__dict__["_of"]
        return getattr(model.layers[i], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model has come to this layer."""
        model, i = self.__dict__["_of"]
        hidden = args[0] if args else kwargs.pop("hidden_states")
        out = model.visit(i, hidden, (args[1:], kwargs))
        return (out, None, None) if model.gives_tuples else out


class _Tensor(NamedTuple):
    """A parameter or buffer of a module, and its name and shape in a block.

    dtype  None: that of the computation
    """

    table: dict[str, Any]
    key: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None


def _all_there(weights: LayerWeights) -> LayerExperts:
    """Experts that are part of a layer."""
    return LayerExperts(lambda n_rows, _: ((one, weights) for one in n_rows), lambda: None, lambda _: None)


class LayerMixture(NamedTuple):
    """The experts of a layer.

    name        of their module, without the prefix of the layer
    parameters  shapes of its tensors, each with a row for an expert, by their names in the layer
    n_used      experts that a row takes
    router      the module whose output's part `place` says which; None: no module gives it as it is used
    """

    module: nn.Module
    name: str
    parameters: dict[str, tuple[int, ...]]
    n_used: int
    router: nn.Module | None
    place: int

    @property
    def n_experts(self) -> int:
        """How many there are."""
        return next(iter(self.parameters.values()))[0]


class _Trace:
    """What is seen of a model's layers while it runs on shapes alone; to them it is the `PassContext`."""

    row_inputs = ()

    def __init__(self, model: "TracedModel") -> None:
        self._model = model
        self.shapes: dict[int, KVShape] = {}
        self.state_shapes: list[StateShape] = []
        self.n_layers = self._n_calls = 0
        self.first = self._hidden = torch.empty(0)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, **options: Any) -> Tensor:
        """Note the shape of keys and values; see `PassContext.attend`."""
        self._n_calls += 1
        if k is not None and v is not None:
            self.shapes[layer] = KVShape(k.shape[1], k.shape[2], v.shape[2])
        return q.new_empty(*q.shape[:2], self.shapes[layer].v_dim)

    def recur(self, layer: int, shape: StateShape, x: Tensor, *rows: Tensor) -> Tensor:
        """Note the shape of the state; see `StateContext.recur`."""
        self._n_calls += 1
        self.state_shapes.append(shape)
        return x.new_empty(len(x), shape.n_v_heads, shape.v_dim)

    def visit(self, i: int, hidden: Tensor, call: Call) -> Tensor:
        """Run a layer. Raises UnsupportedModelError where it could not be run by itself, in its turn."""
        if i != self.n_layers or (i > 0 and hidden is not self._hidden):
            raise UnsupportedModelError("it computes between its layers, or does not call them one after the other")
        self.first = hidden if i == 0 else self.first
        n_before, self._hidden = self._n_calls, hidden
        try:
            self._hidden = self._model.run_layer(i, hidden, call, self)
        except (NotImplementedError, RuntimeError):  # some mixtures look at values, behind their attention
            if self._n_calls == n_before:
                raise
        if self._n_calls == n_before:
            raise UnsupportedModelError(f"its layers {OWN_CODE}, or {OTHER_STATE}")
        self.n_layers += 1
        return self._hidden


class TracedModel:
    """A model of transformers without weights.

    text          the config of its text model
    prefix        what stands before the number of a layer in the name of a tensor
    state         shapes of all tensors by name, those of parts that a text does not need included
    shapes        per layer those of its tensors, named without the prefix; the last are outside the layers
    hidden_shape  of the hidden states between layers, without rows
    kv_shapes     of the layers of the cache
    state_shapes  of the layers with a state, see `Architecture`
    has_state     layers of the model that have one
    windows       of the masks of all attentions
    mixtures      of the layers that have experts as transformers' own implementations know them, all of one kind; else empty
    """

    def __init__(self, config: PreTrainedConfig, kind: type[PreTrainedModel]) -> None:
        register()
        with torch.device("meta"):
            is_whole = isinstance(config, kind.config_class or PreTrainedConfig)
            made_from = config if is_whole else config.get_text_config(decoder=True)
            self.model: Any = kind._from_config(made_from, attn_implementation=TRACED).eval()  # type: ignore[no-untyped-call]
        self.decoder: Any = self.model.get_decoder()
        for one in (self.model, self.decoder):
            one.warn_if_padding_and_no_attention_mask = lambda *_: None  # it looks at tokens
        if "position_ids" not in inspect.signature(self.decoder.forward).parameters:
            raise UnsupportedModelError("its model takes no positions of tokens")
        self.text = self.model.config.get_text_config(decoder=True)
        self.state = {name: tuple(one.shape) for name, one in self.model.state_dict().items()}
        self.buffer_names = dict(self.model.named_buffers()).keys()
        names = {id(module): name for name, module in self.model.named_modules()}
        tied: dict[int, str] = {}
        for name, one in self.model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(one), name)
        self._buffers, self._device = self._computed_buffers(), torch.device("cpu")
        lists, n = (
            (one for one in self.decoder.modules() if isinstance(one, nn.ModuleList)),
            self.text.num_hidden_layers,
        )
        places = next((one for one in lists if len(one) == n), None)
        if places is None:
            raise UnsupportedModelError(f"its model has no list of {n} layers")
        self.prefix, self.layers = f"{names[id(places)]}.", list(places)
        self._cache, self.gives_tuples = PassCache(), False
        for i, layer in enumerate(self.layers):
            for module in layer.modules():
                module.__dict__["pass_cache"] = self._cache
                if type(module).__name__.endswith("GatedDeltaNet"):
                    module.forward = partial(delta_net, module)
            places[i] = _Place(self, i)
        self._bind(self._trace(), names, tied)

    def _computed_buffers(self) -> list[tuple[dict[str, Any], str, Tensor]]:
        """What follows from the config, such as frequencies, as transformers computes it for a model that it loads."""
        modules = list(self.model.modules())
        found = [
            (one._buffers, key) for one in modules for key in one._non_persistent_buffers_set & one._buffers.keys()
        ]
        found = [(table, key) for table, key in found if table[key] is not None]
        for table, key in found:
            table[key] = torch.empty_like(table[key], device="cpu")
        self.model.initialize_weights()
        for module in modules:  # frequencies that would depend on the length of the sequence stay as they are now
            kind = getattr(module, "rope_type", None)
            if kind is not None:
                module.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
        return [(table, key, table[key]) for table, key in found]

    def _trace(self) -> list[nn.Module]:
        """Run the model on shapes alone, and see that it is what is expected here; returns the modules outside the layers."""
        called: dict[nn.Module, None] = {}
        modules = self.model.modules()
        hooks = [one.register_forward_pre_hook(lambda module, _: called.setdefault(module)) for one in modules]
        outputs: list[tuple[nn.Module, tuple[Any, ...]]] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            if len(args) + len(kwargs) == 1 and isinstance(out, tuple):
                outputs.append((module, out))

        of_layers = (module for layer in self.layers for module in layer.modules())
        hooks += [one.register_forward_hook(note, with_kwargs=True) for one in of_layers]
        config, trace = self.model.config, _Trace(self)
        config._experts_implementation = NAME
        rows = torch.zeros(_N_ROWS, dtype=torch.int64, device="meta")
        self._move_to(rows.device)
        self.vocab_size: int = self._forward(self.model, trace.visit, rows, rows).logits.shape[-1]
        config._attn_implementation = NAME
        if trace.n_layers != len(self.layers):
            raise UnsupportedModelError("its layers are not called one after the other")
        self.kv_shapes = tuple(trace.shapes[i] for i in range(len(trace.shapes)))
        self.state_shapes, self.has_state = tuple(trace.state_shapes), self._cache.states.keys()
        self.windows = set(self._cache.windows.values())
        shape = trace.first.shape
        (self._row_dim,) = (dim for dim, size in enumerate(shape) if size == _N_ROWS)
        self.hidden_shape = (*shape[: self._row_dim], *shape[self._row_dim + 1 :])
        for hook in hooks:
            hook.remove()
        self.mixtures = self._mixtures(outputs)
        return list(called)

    def _mixtures(self, outputs: list[tuple[nn.Module, tuple[Any, ...]]]) -> dict[int, LayerMixture]:
        """What was seen of the experts of layers; the outputs of modules that take one tensor tell who chose them."""
        found: dict[int, LayerMixture] = {}
        parts = [(one, n, part) for one, out in outputs for n, part in enumerate(out)]
        for i, ((module, given), *others) in self._cache.chosen.items():
            if others or len(given) != 3 or len(given[0].shape) != 2 or given[1].shape != given[2].shape:
                return {}
            chosen = given[1]
            name = next(name for name, one in self.layers[i].named_modules() if one is module)
            shapes = {f"{name}.{key}": tuple(one.shape) for key, one in module.named_parameters(recurse=False)}
            if not shapes or any(len(one) < 2 or one[0] != module.num_experts for one in shapes.values()):
                return {}
            router, place = next(((one, n) for one, n, part in parts if part is chosen), (None, 0))
            found[i] = LayerMixture(module, name, shapes, chosen.shape[1], router, place)
        kinds = {(one.n_experts, one.n_used, *one.parameters.values()) for one in found.values()}
        self._cache.chosen.clear()
        return found if len(kinds) == 1 else {}

    def _bind(self, called: list[nn.Module], names: dict[int, str], tied: dict[int, str]) -> None:
        """Let linear modules and embeddings ask for their weights, and list what else a module has to be given.

        names  of modules and, `tied`, of parameters, by id
        """
        self._weights: LayerWeights
        parts = [*(list(layer.modules()) for layer in self.layers), called]
        self._tensors: list[list[_Tensor]] = [[] for _ in parts]
        self._tables: list[list[tuple[dict[str, Any], str]]] = [[] for _ in parts]
        self.shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in parts]
        self.transposed: set[str] = set()  # experts whose matrices are (n_in, n_out)
        self.linears: set[str] = set()  # matrices of layers that products alone use, as plans of transformers name them
        for i, module in ((i, module) for i, modules in enumerate(parts) for module in modules):
            start = len(f"{self.prefix}{i}.") if i < len(self.layers) else 0
            own: list[_Tensor] = []
            for table, key in ((place, key) for place in (module._parameters, module._buffers) for key in place):
                one = table[key]
                if one is not None and key not in module._non_persistent_buffers_set:
                    name = (tied.get(id(one)) or f"{names[id(module)]}.{key}")[start:]
                    dtype = None if one.dtype == self.model.dtype else one.dtype
                    own.append(_Tensor(table, key, name, tuple(one.shape), dtype))
            self.shapes[i] |= {one.name: one.shape for one in own}
            self.transposed |= {one.name for one in own if getattr(module, "is_transposed", False)}
            if type(module) is nn.Linear:
                linear = partial(self._linear, own[0].name.removesuffix(".weight"))
                module.forward = linear  # type: ignore[method-assign]
                self.linears.add(re.sub(r"(?<=\.)\d+(?=\.)", "*", f"layers.*.{linear.args[0]}"))
            elif isinstance(module, nn.Embedding):
                self._tables[i].append((module._parameters, own[0].name.removesuffix(".weight")))
            else:
                self._tensors[i] += own

    def kv_layers(self, i: int) -> list[int]:
        """Numbers of the layers of the cache that layer i writes to."""
        return self._cache.of_layer(i)

    def kv_read(self, i: int) -> set[int]:
        """Those that it attends to."""
        return self._cache.read.get(i, set())

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return self._weights.linear(x, name)

    def embed(self, weights: LayerWeights, ids: Tensor, positions: Tensor) -> tuple[Tensor, tuple[Call, ...]]:
        """What the first layer gets for these tokens (n,), and what the model tells each layer besides."""
        found: list[tuple[Tensor, Call]] = []

        def collect(i: int, hidden: Tensor, call: Call) -> Tensor:
            found.append((hidden, call))
            return hidden

        self._move_to(ids.device)
        with self._given(-1, weights, {}, {}):
            self._forward(self.decoder, collect, ids, positions)
        return self._to_rows(found[0][0]), tuple(call for _, call in found)

    def layer(
        self, i: int, weights: LayerWeights, experts: ExpertNames, joined: JoinedTensors, x: Tensor, context: PassContext,
    ) -> Tensor:  # fmt: skip
        """Layer i on the hidden states x (n, width)."""
        with self._given(i, weights, experts, joined):
            return self._to_rows(self.run_layer(i, self._of_rows(x), context.row_inputs[i], context))

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Logits of the hidden states x (n, width) behind the last layer."""
        rows, hidden = torch.zeros(len(x), dtype=torch.int64, device=x.device), self._of_rows(x)
        with self._given(-1, weights, {}, {}):
            logits: Tensor = self._forward(self.model, lambda *_: hidden, rows, rows).logits[0]
        return logits

    def normed(self, weight: Tensor, x: Tensor) -> Tensor:
        """The norm behind the last layer of x (n, width), with any weight."""
        table = self.decoder.norm._parameters
        table["weight"] = weight
        out: Tensor = self.decoder.norm(x)
        table["weight"] = None
        return out

    def run_layer(self, i: int, hidden: Tensor, call: Call, context: PassContext) -> Tensor:
        """The module of layer i on hidden states as it has them."""
        self._cache.enter(i, context)
        out = self.layers[i](hidden, *call[0], **call[1])
        self.gives_tuples = isinstance(out, tuple)
        found: Tensor = out[0] if self.gives_tuples else out
        return found

    def _move_to(self, device: torch.device) -> None:
        if device != self._device:
            for table, key, value in self._buffers:
                table[key] = value.to(device)
            self._device = device

    @contextmanager
    def _given(self, i: int, weights: LayerWeights, experts: ExpertNames, joined: JoinedTensors) -> Iterator[None]:
        """Bind the weights of layer i, -1: those outside the layers, and let go of them."""
        self._weights, is_card = weights, self._device.type == "cuda"
        mixture, share = self.mixtures.get(i), weights.expert_share
        come = weights.experts or (share and _all_there(weights))
        if mixture is not None and come:
            own = share.own if share else range(mixture.n_experts)
            experts = {name: parts[own.start : own.stop] for name, parts in experts.items()}
            touched = Touched(come, own, mixture.name, experts, partial(self._choice_of_next, i, come))
            mixture.module.__dict__ |= {"share": share, "touched": touched}
        apart = mixture.parameters if mixture is not None and weights.experts is not None else {}
        tensors = [one for one in self._tensors[i] if one.name not in apart]
        for one in tensors:
            if parts := experts.get(one.name):
                one.table[one.key] = experts_of(parts, (len(parts), *one.shape[1:]), weights, is_card)
            elif part := joined.get(one.name):
                one.table[one.key] = torch.cat([weights.tensor(name, one.dtype) for name, _ in part])
            else:
                one.table[one.key] = weights.tensor(one.name, one.dtype)
        for table, name in self._tables[i]:
            table["weight"] = Table(name, weights, self._device)
        try:
            yield
        finally:
            for one in tensors:
                one.table[one.key] = None
            if mixture is not None:
                mixture.module.__dict__ |= {"share": None, "touched": None}

    def _choice_of_next(self, i: int, experts: LayerExperts, hidden: Tensor) -> Tensor | None:
        """What the router of the next layer with experts makes of the hidden states that those of layer i get.

        Source: Eliseev and Mazur 2023. None where it has none of its own, or is not there.
        """
        following = next(((j, one) for j, one in self.mixtures.items() if j > i), None)
        if following is None or following[1].router is None or (weights := experts.following()) is None:
            return None
        own = self._weights
        with self._given(following[0], weights, {}, {}):
            chosen: Tensor = following[1].router(hidden)[following[1].place]
        self._weights = own
        return chosen

    def _forward(self, module: nn.Module, visit: _Visit, ids: Tensor, positions: Tensor) -> Any:
        """A forward of the model, or of its decoder, on tokens (n,), whose layers are visited instead of computed."""
        self.visit = visit
        return module(ids[None], position_ids=positions[None], past_key_values=self._cache, use_cache=True)

    def _to_rows(self, hidden: Tensor) -> Tensor:
        """Hidden states as the layers have them to (n, width)."""
        return hidden.movedim(self._row_dim, 0).flatten(1)

    def _of_rows(self, x: Tensor) -> Tensor:
        """The other way round."""
        before, behind = self.hidden_shape[: self._row_dim], self.hidden_shape[self._row_dim :]
        if math.prod(before) == 1:  # strides as of new tensors: torch copies the weights of a product with others
            return x.view(*before, len(x), *behind)
        return x.view(len(x), *self.hidden_shape).movedim(0, self._row_dim)
