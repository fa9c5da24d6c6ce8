"""Replacements for transformers' cache, attention, masks, parameters and layers.

`Trace` records on shapes how a model calls its layers, attention and experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.layers import (
    Attention,
    KVShape,
    LayerWeights,
    PassContext,
    StateContext,
    StateShape,
)
from offload_rt.models.traced_experts import mixture

# Registry names in transformers: for passes, which need no masks, and for tracing.
NAME = "offload_rt"
TRACED = "offload_rt_traced"
# For passes of models whose own code reads masks.
MASKED = "offload_rt_masked"
OTHER_STATE = "keep state other than keys and values"
OWN_CODE = "use custom attention code"


def register() -> None:
    """Register our attention, mask and expert implementations in transformers."""
    ExpertsInterface.register(NAME, mixture)
    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(MASKED, _attention)
    AttentionInterface.register(TRACED, _traced_attention)
    AttentionMaskInterface.register(MASKED, _mask)
    AttentionMaskInterface.register(TRACED, _mask)


class PassCache(Cache):
    """Cache seen by a transformers model; connects its attention to the current pass.

    Cache layers are numbered in the order of the first attention calls.
    windows  by (layer, attention call): number of visible positions
    chosen   by layer, during tracing: expert modules and their arguments
    states   by layer: number among the layers with a recurrent state
    read     by layer: cache layers read by attention
    """

    def __init__(self) -> None:
        self.layers = []
        self.windows: dict[tuple[int, int], int | None] = {}
        self.chosen: dict[int, list[tuple[nn.Module, list[Tensor]]]] = {}
        self._context: PassContext | None = None
        self._numbers: dict[tuple[int, int], int] = {}
        self.states: dict[int, int] = {}
        self.read: dict[int, set[int]] = {}
        self._at = (0, 0)  # layer, attention calls so far

    def enter(self, layer: int, context: PassContext) -> None:
        """Start a layer of the model."""
        self._context = context
        self._at = (layer, 0)

    def record_experts(self, module: nn.Module, given: list[Tensor]) -> None:
        """Record the experts of a traced layer."""
        self.chosen.setdefault(self._at[0], []).append((module, given))

    def of_layer(self, layer: int) -> list[int]:
        """Return the cache layers of a model layer."""
        return [number for (i, _), number in self._numbers.items() if i == layer]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new rows unchanged; `attend` stores the final keys and values."""
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        """Return 0: positions are passed explicitly."""
        return 0

    def get_mask_sizes(self, query_length: int, *args: Any) -> tuple[int, int]:
        """Return sizes without cached rows: passes create no masks."""
        return query_length, 0

    get_query_offset = get_seq_length  # type: ignore[assignment]

    def recur(self, shape: StateShape, *rows: Tensor) -> Tensor:
        """See `StateContext.recur`."""
        context = cast("StateContext", self._context)
        return context.recur(self.states.setdefault(self._at[0], len(self.states)), shape, *rows)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Store k and v, and attend with q (1, n_heads, n, dim); returns (1, n, n_heads, v_dim).

        Keys and values shared with an earlier layer are not stored again. The window of the first
        call, during tracing, applies to all later calls.
        """
        assert self._context is not None, "attention runs within a layer"
        number: Any = getattr(k, "kv_layer", None)
        is_kept = number is not None and getattr(v, "kv_layer", None) == number
        if not is_kept:
            number = self._numbers.setdefault(self._at, len(self._numbers))
        window = self.windows.setdefault(self._at, window)
        self.read.setdefault(self._at[0], set()).add(number)
        self._at = (self._at[0], self._at[1] + 1)
        rows = q[0].transpose(0, 1).contiguous()
        new_k, new_v = (None if is_kept else part[0].transpose(0, 1) for part in (k, v))
        asked = Attention(number, rows, new_k, new_v, scale, window, softcap=softcap, sinks=sinks)
        out = self._context.attend(asked)
        k.kv_layer = v.kv_layer = number  # type: ignore[attr-defined]
        return out[None]


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention for passes, see transformers' AttentionInterface; s_aux are sinks."""
    cache: PassCache = module.__dict__["pass_cache"]
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.attend(q, k, v, scale, sliding_window, softcap, s_aux), None


def delta_net(net: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Forward of a gated delta net, using its modules; inputs have no padding."""
    if hasattr(net, "in_proj_qkvz"):
        qkvz = net.in_proj_qkvz(hidden_states)
        parts = net.fix_query_key_value_ordering(qkvz, net.in_proj_ba(hidden_states))
        x = torch.cat([part.flatten(2) for part in parts[:3]], -1)
        gate, b, a = parts[3:]
    elif hasattr(net, "in_proj_qkv"):
        x, gate, b, a = (
            getattr(net, f"in_proj_{name}")(hidden_states) for name in ("qkv", "z", "b", "a")
        )
    else:  # OLMo Hybrid
        *parts, gate, b, a = (getattr(net, f"{name}_proj")(hidden_states) for name in "qkvgba")
        x = torch.cat(parts, -1)
    beta = b[0].sigmoid() * (2 if getattr(net, "allow_neg_eigval", False) else 1)
    log_decays = -net.A_log.float().exp() * F.softplus(a.float() + net.dt_bias)
    weight = net.conv1d.weight.squeeze(1)
    heads = net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim
    shape = StateShape(*heads, weight.shape[1])
    out = net.__dict__["pass_cache"].recur(shape, x[0], weight, log_decays[0], beta)
    norm = net.norm if hasattr(net, "norm") else net.o_norm
    project = net.out_proj if hasattr(net, "norm") else net.o_proj
    normed = norm(out.flatten(0, 1), gate.reshape(-1, net.head_v_dim))
    return project(normed.view(*x.shape[:2], -1))  # type: ignore[no-any-return]


def _traced_attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention for tracing. Raises UnsupportedModelError for unsupported attention."""
    tensors = {key for key, value in kwargs.items() if isinstance(value, Tensor)}
    # Further tensor arguments that are supported or have no effect.
    unknown = sorted(tensors - {"s_aux", "position_ids", "cache_position"})
    is_ours = attention_mask is None or hasattr(attention_mask, "window")
    if unknown or not is_ours or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"its attention uses {(unknown or ['a custom mask'])[0]}")
    if k.shape[2] != q.shape[2]:
        raise UnsupportedModelError("its layers combine the keys of several tokens")
    # Windows named by layers serve kernels without masks and may be missing; masks are decisive.
    window = getattr(attention_mask, "window", sliding_window)
    return _attention(module, q, k, v, None, sliding_window=window, **kwargs)


def _mask(
    q_length: int,
    kv_length: int,
    device: torch.device,
    use_vmap: bool = False,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Mask for tracing: records only the window, unless the model has a custom mask function."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    if not use_vmap:
        mask.window = local_size  # type: ignore[attr-defined]
    return mask


@dataclass(frozen=True)
class Table:
    """Embedding table; replaces the module's parameter for lookups."""

    name: str
    weights: LayerWeights
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
    ) -> Tensor:
        assert function is F.embedding, "embedding modules only look up rows"
        ids, table = args[:2]
        rows: Tensor = table.weights.rows(ids.flatten(), table.name)
        return rows.view(*ids.shape, rows.shape[1])


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
            problem = "it computes between its layers, or calls them out of order"
            raise UnsupportedModelError(problem)
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
    kinds = {(mixture.n_used, *mixture.parameters.values()) for mixture in mixtures.values()}
    return mixtures if len(kinds) == 1 else {}
