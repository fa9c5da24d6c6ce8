"""Record how a model of transformers calls its layers, attention and experts on shapes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.layers import Attention, KVShape, PassContext, StateShape
from offload_rt.models.stand_ins import OTHER_STATE, TRACED

OWN_CODE = "use custom attention code"


class Call(NamedTuple):
    """Arguments of a layer besides the hidden states.

    added  (n, width) added to the hidden states first; None for nothing
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    added: Tensor | None = None


class Place(nn.Module):
    """Replacement of a layer that forwards attribute access to it.

    visit  called with hidden states and arguments in place of the layer
    """

    def __init__(self, layer: nn.Module, visit: Callable[[Tensor, Call], Any]) -> None:
        super().__init__()
        self.__dict__ |= {"_layer": layer, "_visit": visit}  # no submodules

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call `visit`."""
        hidden = args[0] if args else kwargs.pop("hidden_states")
        return self._visit(hidden, Call(args[1:], kwargs))


def make_model(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Create a model; older models choose an attention class by the implementation's name."""
    try:
        model: PreTrainedModel = kind._from_config(config, attn_implementation=TRACED)
    except KeyError:
        model = kind._from_config(config, attn_implementation="eager")
        model.config._attn_implementation = TRACED
    return model


class LayerMixture(NamedTuple):
    """Experts of a layer.

    name        module name, without the layer's prefix
    parameters  shapes of tensors with a row per expert, by name within the layer
    n_used      experts per row
    router      module that selects experts by output number `place`; None if not identifiable
    """

    module: nn.Module
    name: str
    parameters: dict[str, tuple[int, ...]]
    n_used: int
    router: nn.Module | None
    place: int

    @property
    def n_experts(self) -> int:
        """Number of experts."""
        return next(iter(self.parameters.values()))[0]


class Trace:
    """Recorder of a traced model's layers; implements `PassContext` for them.

    run_layer  runs the module of a layer within a context
    """

    row_inputs = ()

    def __init__(self, run_layer: Callable[[int, Tensor, Call, PassContext], Tensor]) -> None:
        self._run_layer = run_layer
        self.shapes: dict[int, KVShape] = {}
        self.state_shapes: list[StateShape] = []
        self.n_layers = 0
        self._n_calls = 0
        self.first = torch.empty(0)
        self._hidden = self.first

    def attend(self, asked: Attention) -> Tensor:
        """Record the shapes of keys and values; see `PassContext.attend`."""
        self._n_calls += 1
        if asked.k is not None and asked.v is not None:
            shape = KVShape(asked.k.shape[1], asked.k.shape[2], asked.v.shape[2])
            self.shapes[asked.layer] = shape
        return asked.q.new_empty(*asked.q.shape[:2], self.shapes[asked.layer].v_dim)

    def recur(self, layer: int, shape: StateShape, x: Tensor, *rows: Tensor) -> Tensor:
        """Record the shape of the state; see `StateContext.recur`."""
        self._n_calls += 1
        self.state_shapes.append(shape)
        return x.new_empty(len(x), shape.n_v_heads, shape.v_dim)

    def visit(self, i: int, hidden: Tensor, call: Call) -> Tensor:
        """Run a layer. Raises UnsupportedModelError if layers cannot run separately in order."""
        if i != self.n_layers or (i > 0 and hidden is not self._hidden):
            raise UnsupportedModelError(
                "it computes between its layers, or calls them out of order"
            )
        self.first = hidden if i == 0 else self.first
        n_before = self._n_calls
        self._hidden = hidden
        try:
            self._hidden = self._run_layer(i, hidden, call, self)
        except (NotImplementedError, RuntimeError):  # some mixtures read values, after attention
            if self._n_calls == n_before:
                raise
        if self._n_calls == n_before:
            raise UnsupportedModelError(f"its layers {OWN_CODE}, or {OTHER_STATE}")
        self.n_layers += 1
        return self._hidden


def find_mixtures(
    layers: Sequence[nn.Module],
    chosen_experts: Mapping[int, Sequence[tuple[nn.Module, Sequence[Tensor]]]],
    outputs: Sequence[tuple[nn.Module, tuple[Any, ...]]],
) -> dict[int, LayerMixture]:
    """Describe the experts of layers; empty unless all have the standard form and equal shapes.

    chosen_experts  by layer: expert modules and their arguments
    outputs         modules of layers with a single argument, and their outputs; a module is a
                    router if the experts receive its output
    """
    mixtures: dict[int, LayerMixture] = {}
    parts = [(module, n, part) for module, out in outputs for n, part in enumerate(out)]
    for i, ((module, given), *later) in chosen_experts.items():
        if later or len(given) != 3 or len(given[0].shape) != 2 or given[1].shape != given[2].shape:
            return {}
        chosen = given[1]
        name = next(name for name, inner in layers[i].named_modules() if inner is module)
        parameters = module.named_parameters(recurse=False)
        shapes = {f"{name}.{key}": tuple(tensor.shape) for key, tensor in parameters}
        n = module.num_experts
        if not shapes or any(len(shape) < 2 or shape[0] != n for shape in shapes.values()):
            return {}
        routers = ((source, n) for source, n, part in parts if part is chosen)
        router, place = next(routers, (None, 0))
        mixtures[i] = LayerMixture(module, name, shapes, chosen.shape[1], router, place)
    kinds = {
        (mixture.n_experts, mixture.n_used, *mixture.parameters.values())
        for mixture in mixtures.values()
    }
    return mixtures if len(kinds) == 1 else {}
