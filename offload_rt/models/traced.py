"""A transformers model without weights, traced on shapes and then called layer by layer.

Its layers are replaced by `Place` modules. A forward of the model then collects the arguments of
each layer, or maps final hidden states to logits.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.bound_modules import (
    WHOLE,
    BoundModules,
    BoundPart,
    BoundTensor,
    StoredParts,
    computed_buffers,
)
from offload_rt.models.custom_attention import ALIBI, replace_attention
from offload_rt.models.layers import LayerExperts, LayerWeights, PassContext
from offload_rt.models.stand_ins import (
    MASKED,
    NAME,
    Call,
    PassCache,
    Place,
    Table,
    Trace,
    delta_net,
    find_mixtures,
    make_model,
    register,
)
from offload_rt.models.traced_experts import (
    MatrixOfModules,
    Touched,
    choose_llama4_experts,
    experts_of,
)

# Number of rows for tracing: differs from every model size, so row dimensions are recognizable.
_N_ROWS = 7


class ImageInputs(NamedTuple):
    """Embedding of rows with images.

    module     part of the model that inserts image features into embeddings, and calls the decoder
    arguments  further arguments of the module
    has_deep   features are also added to the outputs of the first layers
    """

    module: nn.Module
    arguments: dict[str, Any]
    has_deep: bool


class TracedModel:
    """A transformers model without weights.

    text          config of its text model
    cache         connects attention to the current pass; knows cache layers, states and windows
    prefix        tensor name prefix before the layer number
    state         shapes of all tensors by name, including parts unused for text
    shapes        tensor shapes per layer, without the prefix; the last entry is outside the layers
    hidden_shape  shape of hidden states between layers, without rows
    kv_shapes     shapes of the cache layers
    state_shapes  shapes of recurrent states, see `Architecture`
    windows       windows of all attention masks
    mixtures      expert layers in transformers' standard form, all of equal shape; else empty
    shared_modules  see `Architecture`
    """

    def __init__(self, config: PreTrainedConfig, kind: type[PreTrainedModel]) -> None:
        register()
        with torch.device("meta"):
            is_whole = isinstance(config, kind.config_class or PreTrainedConfig)
            made_from = config if is_whole else config.get_text_config(decoder=True)
            model: Any = make_model(kind, made_from)  # `eval` is untyped
        self.model: Any = model.eval()
        decoder = self.model.get_decoder()
        # Some models call their output matrix `decoder`.
        has_layers = isinstance(decoder, PreTrainedModel)
        self.decoder: Any = decoder if has_layers else self.model.base_model
        for item in (self.model, self.decoder):
            item.warn_if_padding_and_no_attention_mask = lambda *_: None  # it would read tokens
        parameters = inspect.signature(self.decoder.forward).parameters
        self._has_positions = "position_ids" in parameters
        # transformers 5.24 deprecates the first name.
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache"
        self.text = self.model.config.get_text_config(decoder=True)
        self.state = {name: tuple(item.shape) for name, item in self.model.state_dict().items()}
        self.buffer_names = dict(self.model.named_buffers()).keys()
        names = {id(module): name for name, module in self.model.named_modules()}
        tied: dict[int, str] = {}
        for name, item in self.model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(item), name)
        self._buffers = computed_buffers(self.model)
        self._device = torch.device("cpu")
        n = self.text.num_hidden_layers
        lists = (module for module in self.decoder.modules() if isinstance(module, nn.ModuleList))
        places = next((modules for modules in lists if len(modules) == n), None)
        if places is None:
            raise UnsupportedModelError(f"its model has no list of {n} layers")
        self.prefix = f"{names[id(places)]}."
        self.layers = list(places)
        self.cache = PassCache()
        self.n_outputs = 0  # of a layer; 0: a tensor
        self.has_custom_attention = False
        for i, layer in enumerate(self.layers):
            for module in layer.modules():
                module.__dict__["pass_cache"] = self.cache
                if type(module).__name__.endswith("GatedDeltaNet"):
                    module.forward = partial(delta_net, module)
                elif type(module).__name__ == "Llama4TextMoe":
                    choose_llama4_experts(module)
                self.has_custom_attention |= replace_attention(module)
            places[i] = Place(layer, partial(self._visit_place, i))
        arguments = inspect.signature(self.layers[0].forward).parameters
        has_bias = self.has_custom_attention and not ALIBI.isdisjoint(arguments)
        if not (self._has_positions or has_bias):
            raise UnsupportedModelError("its model has no position_ids argument")
        self._bind(self._trace(), names, tied)

    def _trace(self) -> list[nn.Module]:
        """Run the model on shapes and check assumptions; return the modules outside the layers."""
        called: dict[nn.Module, None] = {}
        outputs: list[tuple[nn.Module, tuple[Any, ...]]] = []

        def enter(module: nn.Module, _: Any) -> None:
            called[module] = None

        def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if len(args) + len(kwargs) == 1 and isinstance(out, tuple):
                outputs.append((module, out))

        hooks = [module.register_forward_pre_hook(enter) for module in self.model.modules()]
        modules = (module for layer in self.layers for module in layer.modules())
        hooks += [module.register_forward_hook(note, with_kwargs=True) for module in modules]
        config = self.model.config
        trace = Trace(self.run_layer)
        config._experts_implementation = NAME
        rows = torch.zeros(_N_ROWS, dtype=torch.int64, device="meta")
        self.move_to(rows.device)
        self.vocab_size: int = self._forward(self.model, trace.visit, rows, rows).logits.shape[-1]
        config._attn_implementation = MASKED if self.has_custom_attention else NAME
        if trace.n_layers != len(self.layers):
            raise UnsupportedModelError("its layers are not called in order")
        self.kv_shapes = tuple(trace.shapes[i] for i in range(len(trace.shapes)))
        self.state_shapes = tuple(trace.state_shapes)
        self.windows = set(self.cache.windows.values())
        shape = trace.first.shape
        (self._row_dim,) = (dim for dim, size in enumerate(shape) if size == _N_ROWS)
        self.hidden_shape = (*shape[: self._row_dim], *shape[self._row_dim + 1 :])
        for hook in hooks:
            hook.remove()
        self.mixtures = find_mixtures(self.layers, self.cache.chosen, outputs)
        self.cache.chosen.clear()
        return list(called)

    def _bind(self, called: list[nn.Module], names: dict[int, str], tied: dict[int, str]) -> None:
        """Redirect the modules of each layer, and those outside the layers, to their weights."""
        ends = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        shared = [tied[id(module.weight)].removesuffix(".weight") for module in ends if module]
        self.shared_modules = (shared[0], shared[1]) if len(shared) == 2 else None
        modules_of = [*(list(layer.modules()) for layer in self.layers), called]
        self._bound = BoundModules(self.model.dtype, tied)
        self._parts = [BoundPart() for _ in modules_of]
        self.shapes = [part.shapes for part in self._parts]
        self._tables: set[str] = set()  # embedding tables
        self.transposed: set[str] = set()  # expert parameters with matrices (n_in, n_out)
        self.linears: set[str] = set()  # names of linear modules, as in transformers' plans
        for i, (part, modules) in enumerate(zip(self._parts, modules_of, strict=True)):
            n_prefix = len(f"{self.prefix}{i}.") if i < len(self.layers) else 0
            for module in modules:
                name = names.get(id(module), "")  # places of layers have none
                tensors = self._bound.add(part, module, name, n_prefix)
                if getattr(module, "is_transposed", False):
                    self.transposed |= {tensor.name for tensor in tensors}
                if type(module) is nn.Linear:
                    name = tensors[0].name.removesuffix(".weight")
                    self.linears.add(re.sub(r"(?<=\.)\d+(?=\.)", "*", f"layers.*.{name}"))
                elif isinstance(module, nn.Embedding):
                    self._tables.add(tensors[0].name)

    def embed(
        self, weights: LayerWeights, ids: Tensor, positions: Tensor, images: ImageInputs | None
    ) -> tuple[Tensor, tuple[Call, ...]]:
        """Return the first layer's input for tokens (n,), and the arguments of each layer.

        positions  (n,), or (3, n) multimodal positions
        """
        calls: list[tuple[Tensor, Call]] = []
        has_deep = images is not None and images.has_deep

        def collect(i: int, hidden: Tensor, call: Call) -> Tensor:
            added = self._to_rows(hidden) if has_deep and i else None
            calls.append((hidden, call._replace(added=added)))
            # Outputs of zeros isolate the features that the decoder adds before the next layer.
            return torch.zeros_like(hidden) if has_deep else hidden

        self.move_to(ids.device)
        module, more = (self.decoder, {}) if images is None else images[:2]
        with self._given(-1, weights):
            self._forward(module, collect, ids, positions, more)
        return self._to_rows(calls[0][0]), tuple(call for _, call in calls)

    def layer(
        self, i: int, weights: LayerWeights, stored: StoredParts, x: Tensor, context: PassContext
    ) -> Tensor:
        """Apply layer i to hidden states x (n, width)."""
        call: Call = context.row_inputs[i]
        if call.added is not None:
            x = x + call.added
        with self._given(i, weights, stored):
            return self._to_rows(self.run_layer(i, self._of_rows(x), call, context))

    def mlp(self, i: int, weights: LayerWeights, stored: StoredParts, x: Tensor) -> Tensor:
        """Apply the module `mlp` of layer i to normed hidden states x (n, width)."""
        self.move_to(x.device)
        layer: Any = self.layers[i]
        with self._given(i, weights, stored, is_mlp=True):
            out: Tensor = layer.mlp(x[None])
        return out[0]

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Map final hidden states x (n, width) to logits."""
        rows = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        hidden = self._of_rows(x)
        with self._given(-1, weights):
            logits: Tensor = self._forward(self.model, lambda *_: hidden, rows, rows).logits[0]
        return logits

    def normed(self, weight: Tensor, x: Tensor) -> Tensor:
        """Apply the final norm's class with any weight to x (n, width)."""
        table = self.decoder.norm._parameters
        table["weight"] = weight
        out: Tensor = self.decoder.norm(x)
        table["weight"] = None
        return out

    def run_layer(self, i: int, hidden: Tensor, call: Call, context: PassContext) -> Tensor:
        """Run the module of layer i on hidden states in the model's own shape."""
        self.cache.enter(i, context)
        out = self.layers[i](hidden, *call.args, **call.kwargs)
        self.n_outputs = len(out) if isinstance(out, tuple | list) else 0
        hidden_out: Tensor = out[0] if self.n_outputs else out
        return hidden_out

    def move_to(self, device: torch.device) -> None:
        """Move the computed buffers to the device of a pass."""
        if device != self._device:
            for table, key, value in self._buffers:
                table[key] = value.to(device)
            self._device = device

    @contextmanager
    def _given(
        self, i: int, weights: LayerWeights, stored: StoredParts = WHOLE, is_mlp: bool = False
    ) -> Iterator[None]:
        """Bind the weights of layer i, or for -1 the weights outside the layers; unbind on exit."""
        experts = stored.experts
        mixture = self.mixtures.get(i)
        share = weights.expert_share
        if mixture is not None and (weights.experts or share):
            owned = share.owned if share else range(mixture.n_experts)
            experts = {name: parts[owned.start : owned.stop] for name, parts in experts.items()}
            in_use = weights.experts or LayerExperts(
                lambda n_rows, _: zip(n_rows, repeat(weights), strict=False),
                lambda: None,
                lambda _: None,
            )
            predict = partial(self._choice_of_next, i, in_use)
            touched = Touched(in_use, owned, mixture.name, experts, predict)
            mixture.module.__dict__ |= {"share": share, "touched": touched}
        apart = mixture.parameters if mixture is not None and weights.experts is not None else {}

        def value(tensor: BoundTensor) -> Any:
            name, shape, dtype = tensor[2:]
            module = name.removesuffix(".weight")
            if name in self._tables:
                return Table(module, weights, weights.dtype, self._device)
            if parts := experts.get(name):
                is_fused = self._device.type == "cuda" and name not in self.transposed
                return experts_of(parts, (len(parts), *shape[1:]), weights, is_fused)
            # torch would convert a router of another dtype, and depend on the number of rows.
            if is_mlp and module == "mlp.gate" and self._device.type == "cpu":
                return MatrixOfModules([module], weights)
            if part := stored.split.get(name):
                return torch.cat([weights.tensor(piece, dtype) for piece, _ in part])
            return weights.tensor(name, dtype)

        try:
            with self._bound.bound(self._parts[i], weights, value, apart):
                yield
        finally:
            if mixture is not None:
                mixture.module.__dict__ |= {"share": None, "touched": None}

    def _choice_of_next(self, i: int, experts: LayerExperts, hidden: Tensor) -> Tensor | None:
        """Apply the next expert layer's router to expert inputs (Eliseev and Mazur 2023)."""
        j = min((j for j in self.mixtures if j > i), default=None)
        if j is None or (mixture := self.mixtures[j]).router is None:
            return None
        if (weights := experts.following()) is None:
            return None
        with self._given(j, weights):
            chosen: Tensor = mixture.router(hidden)[mixture.place]
        return chosen

    def _forward(
        self,
        module: nn.Module,
        visit: Callable[[int, Tensor, Call], Tensor],
        ids: Tensor,
        positions: Tensor,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Run the model or its decoder on tokens (n,), calling `visit` in place of each layer."""
        self.visit = visit
        self.positions = positions.unsqueeze(-2)
        more: dict[str, Any] = {self._cache_name: self.cache}
        if self._has_positions:
            more["position_ids"] = self.positions
        return module(ids[None], use_cache=True, **more, **arguments)

    def _visit_place(self, i: int, hidden: Tensor, call: Call) -> Any:
        """Call `visit` in place of layer i; return as many outputs as the layer."""
        if self.has_custom_attention:
            biased = [key for key in ALIBI if call.kwargs.get(key) is not None]
            call.kwargs.update(dict.fromkeys(biased, self.positions))
        out = self.visit(i, hidden, call)
        return (out, *[None] * (self.n_outputs - 1)) if self.n_outputs else out

    def _to_rows(self, hidden: Tensor) -> Tensor:
        """Reshape hidden states from the model's shape to (n, width)."""
        return hidden.movedim(self._row_dim, 0).flatten(1)

    def _of_rows(self, x: Tensor) -> Tensor:
        """Reshape hidden states from (n, width) to the model's shape."""
        before = self.hidden_shape[: self._row_dim]
        # Keep standard strides: with others, torch would copy the weights of a product.
        if math.prod(before) == 1:
            return x.view(*before, len(x), *self.hidden_shape[self._row_dim :])
        return x.view(len(x), *self.hidden_shape).movedim(0, self._row_dim)
