"""Replacements for transformers' cache, attention, masks and parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.masking_utils import AttentionMaskInterface

from offload_rt import ops
from offload_rt.errors import UnsupportedModelError
from offload_rt.models import cpu_experts
from offload_rt.models.architecture import (
    ExpertShare,
    HostWork,
    LayerExperts,
    LayerWeights,
    PassContext,
    StateContext,
    StateShape,
)
from offload_rt.ops import extension
from offload_rt.ops.few_rows import MOST_ROWS, Stack, multiply_stack, serves_stack
from offload_rt.ops.linear import linear

# Registry names in transformers: for passes, which need no masks, and for tracing.
NAME = "offload_rt"
TRACED = "offload_rt_traced"
OTHER_STATE = "keep state other than keys and values"
# Compute capability times ten from which torch's grouped products leave the row counts on the GPU
# (pytorch issues 161407, 186620).
_GROUPED_MM = 90
# Further tensor arguments of attention that are supported or have no effect.
_KNOWN = {"s_aux", "position_ids", "cache_position"}


def register() -> None:
    """Register our attention, mask and expert implementations in transformers."""
    ExpertsInterface.register(NAME, _mixture)
    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(TRACED, _traced_attention)
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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store k and v, and attend with q (1, n_heads, n, dim); returns (1, n, n_heads, v_dim).

        Keys and values shared with an earlier layer are not stored again. The window of the first
        call, during tracing, applies to all later calls.
        """
        assert self._context is not None, "attention runs within a layer"
        number: int | None = getattr(k, "kv_layer", None)
        is_kept = number is not None and getattr(v, "kv_layer", None) == number
        if not is_kept:
            number = self._numbers.setdefault(self._at, len(self._numbers))
        window = self.windows.setdefault(self._at, window)
        assert number is not None
        self.read.setdefault(self._at[0], set()).add(number)
        self._at = (self._at[0], self._at[1] + 1)
        rows = q[0].transpose(0, 1).contiguous()
        new = (None, None) if is_kept else (k[0].transpose(0, 1), v[0].transpose(0, 1))
        out = self._context.attend(
            number, rows, *new, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
        k.kv_layer = v.kv_layer = number  # type: ignore[attr-defined]
        return out[None]


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
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
    shape = StateShape(
        net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim, weight.shape[1]
    )
    out = net.__dict__["pass_cache"].recur(shape, x[0], weight, log_decays[0], beta)
    norm = net.norm if hasattr(net, "norm") else net.o_norm
    project = net.out_proj if hasattr(net, "norm") else net.o_proj
    heads = norm(out.flatten(0, 1), gate.reshape(-1, net.head_v_dim))
    return project(heads.view(*x.shape[:2], -1))  # type: ignore[no-any-return]


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
    unknown = sorted(
        key for key, value in kwargs.items() if isinstance(value, Tensor) and key not in _KNOWN
    )
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


def _mixture(module: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Experts of a mixture, see transformers' ExpertsInterface.

    transformers' own code loops over experts, with a synchronization per expert.
    """
    if hidden.is_meta:
        module.__dict__["pass_cache"].record_experts(module, [hidden, *args, *kwargs.values()])
        return torch.empty_like(hidden)
    share = module.__dict__.get("share")
    touched = module.__dict__.get("touched")
    if grouped := _grouped_products(module, hidden, args[0].numel()):
        mix = grouped if share is None else partial(_renumbered, share.owned, grouped)
    elif touched is None and (products := _cpu_products(module, hidden)):
        mix = products
    elif touched is None:
        mix = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    else:
        mix = touched.mix
    if share is None:
        out: Tensor = mix(module, hidden, *args, **kwargs)
        return out
    return mix_of_all(share, partial(mix, module), hidden, *args, *kwargs.values())


def mix_of_all(
    share: ExpertShare,
    mix: Callable[[Tensor, Tensor, Tensor], Tensor],
    hidden: Tensor,
    chosen: Tensor,
    scores: Tensor,
) -> Tensor:
    """Combine the experts of all ranks; `mix` computes the contribution of this rank's experts.

    chosen, scores  (n_rows, n_used)
    """
    if not share.is_exact:
        return share.all_reduce(mix(hidden, chosen, scores))
    n_rows, n_used = chosen.shape
    # Repeat rows, each with a single expert. Exactly one rank's output is nonzero, so the sum over
    # ranks adds no rounding.
    each = mix(hidden.repeat(n_used, 1), chosen.T.reshape(-1, 1), scores.T.reshape(-1, 1))
    outputs = share.all_reduce(each).view(n_used, n_rows, -1)
    rows = torch.arange(n_rows, device=hidden.device)
    mixed = torch.zeros_like(hidden)
    for places in chosen.argsort(1).T:
        mixed += outputs[places, rows]
    return mixed


def _grouped_products(
    module: Any, hidden: Tensor, n_chosen: int
) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor] | None:
    """Return a mixture with one product of all experts per projection; None if not on a GPU.

    n_chosen  experts chosen by all rows
    """
    stacks = _stacks(module, hidden)
    parameters = [value for value in module._parameters.values() if value is not None]
    is_on_card = hidden.is_cuda and all(getattr(value, "is_cuda", False) for value in parameters)
    if stacks is None:
        return grouped_mm_experts_forward if is_on_card else None
    # torch's kernel for later GPUs multiplies many rows faster, and does not wait for the host.
    is_torch_faster = n_chosen > MOST_ROWS * module.num_experts
    if is_on_card and is_torch_faster and extension.capability(hidden.device) >= _GROUPED_MM:
        return grouped_mm_experts_forward
    return partial(_mix_stacks, stacks)


def _cpu_products(
    module: Any, hidden: Tensor
) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor] | None:
    """Return a mixture with one call per projection for all experts; None if not served."""
    up, down = (module.gate_up_proj if module.has_gate else module.up_proj), module.down_proj
    if hidden.is_cuda or module.has_bias or not isinstance(up, _Experts):
        return None
    return partial(cpu_experts.mix, up.weights, (up.names, down.names))


def _stacks(module: Any, hidden: Tensor) -> tuple[list[Stack], list[Stack]] | None:
    """Return the stacks of both projections if the kernel serves all of them.

    The first projection has two stacks if gate and up matrices are stored separately.
    """
    if not extension.serves(hidden):
        return None
    up, down = (
        _stacks_of(value, module.is_transposed)
        for value in (module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj)
    )
    is_split = len(up) > 1 and module.has_bias
    served = all(stack is not None and serves_stack(hidden.dtype, stack) for stack in (*up, *down))
    return (up, down) if served and not is_split else None  # type: ignore[return-value]  # no None


def _stacks_of(value: Any, is_transposed: bool) -> list[Stack | None]:
    """Return the stacks of a parameter; matrices (n_in, n_out) have no kernel."""
    if isinstance(value, _Experts):
        return value.stacked()
    is_stack = isinstance(value, Tensor) and value.is_cuda and not is_transposed
    return [value if is_stack else None]


def _mix_stacks(
    stacks: tuple[list[Stack], list[Stack]],
    module: Any,
    hidden: Tensor,
    chosen: Tensor,
    scores: Tensor,
) -> Tensor:
    """Compute a mixture with all experts on the GPU. Nothing waits for the router's choice.

    chosen, scores  (n_rows, n_used); experts from `module.num_experts` contribute zeros
    """
    n_rows, n_used = chosen.shape
    numbers, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(module.num_experts, device=hidden.device)
    ends = torch.searchsorted(numbers, experts, right=True, out_int32=True)

    def project(name: str, parts: list[Stack], x: Tensor, rows: Tensor | None) -> Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        outputs = [multiply_stack(x, rows, ends, part, bias) for part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    name = "gate_up_proj" if module.has_gate else "up_proj"
    up = project(name, stacks[0], hidden, order // n_used)
    inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    out = project("down_proj", stacks[1], inner, None)
    out = module.post_expert_norm(out) if module.has_post_expert_norm else out
    weighted = out * scores.flatten()[order, None]
    by_row = torch.empty_like(weighted).index_copy_(0, order, weighted)
    return by_row.view(n_rows, n_used, -1).sum(1).to(hidden.dtype)


def _renumbered(
    owned: range, mix: Any, module: Any, hidden: Tensor, chosen: Tensor, scores: Tensor
) -> Tensor:
    """Run grouped products with this rank's experts, renumbered from 0."""
    is_foreign = (chosen < owned.start) | (chosen >= owned.stop)
    n_experts = module.num_experts
    module.num_experts = len(owned)
    module._is_expert_parallel = True
    numbers = (chosen - owned.start).masked_fill(is_foreign, len(owned))
    out: Tensor = mix(module, hidden, numbers, scores.masked_fill(is_foreign, 0.0))
    module.num_experts = n_experts
    module._is_expert_parallel = False
    return out


class Table:
    """Embedding table; replaces the module's parameter for lookups."""

    def __init__(self, name: str, weights: LayerWeights, device: torch.device) -> None:
        self._name = name
        self._weights = weights
        self.dtype = weights.dtype
        self.device = device

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
    ) -> Tensor:
        assert function is F.embedding, "embedding modules only look up rows"
        ids, table = args[:2]
        rows: Tensor = table._weights.rows(ids.flatten(), table._name)
        return rows.view(*ids.shape, rows.shape[1])


def experts_of(
    names: list[list[str]], shape: tuple[int, ...], weights: LayerWeights, is_card: bool
) -> Any:
    """Return a parameter of this shape that contains the named expert matrices."""
    whole = weights.fused([name for modules in names for name in modules]) if is_card else None
    return _Experts(names, shape, weights) if whole is None else whole.view(shape)


class _Experts:
    """Parameter of an expert module: a matrix, or several concatenated by output, per expert."""

    def __init__(
        self, names: list[list[str]], shape: tuple[int, ...], weights: LayerWeights
    ) -> None:
        self.names = names
        self.shape = shape
        self.weights = weights

    def stacked(self) -> list[Stack | None]:
        """Return a stack of each part of the matrices; None if not stored so."""
        return [self.weights.stacked(names) for names in zip(*self.names, strict=True)]

    def __getitem__(self, expert: Any) -> "_Matrix":
        return _Matrix(self.names[int(expert)], self.weights)


class _Matrix:
    """Matrix with its rows stored in several tensors; supports only `linear` and `matmul`."""

    def __init__(self, names: list[str], weights: LayerWeights) -> None:
        self._names = names
        self._weights = weights

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
    ) -> Tensor:
        x, matrix, *bias = args
        is_product = function in (F.linear, Tensor.matmul) and bias in ([], [None])
        assert is_product, "experts compute products without bias"
        return torch.cat([matrix._weights.linear(x, name) for name in matrix._names], dim=-1)


@dataclass(frozen=True)
class Touched:
    """Experts of a layer, or this rank's part, loaded on demand.

    owned    indices of the experts
    name     module name within the layer
    names    expert modules of each parameter that is stored per expert
    predict  predicts the experts (n_rows, n_used) of the next layer from this layer's inputs
    """

    experts: LayerExperts
    owned: range
    name: str
    names: dict[str, list[list[str]]]
    predict: Callable[[Tensor], Tensor | None]

    def mix(self, module: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """Compute the mixture, experts on the device first. Synchronizes on the router's choice.

        chosen, scores  (n_rows, n_used)
        Outputs are added in expert order, so sums do not depend on the loading order.
        """
        predicted = self.predict(hidden)
        n_used = chosen.shape[1]
        has_host = self.experts.has_host
        choices = [chosen] if predicted is None else [chosen, predicted]
        on_host = ops.to_host([*choices, *([hidden.contiguous()] if has_host else [])])
        n_experts = module.num_experts
        counts = [
            choice.flatten().bincount(minlength=n_experts) for choice in on_host[: len(choices)]
        ]
        part = slice(self.owned.start, self.owned.stop)
        start = sum(counts[0][: self.owned.start].tolist())
        self.experts.expect([] if predicted is None else _ranked(counts[1][part]))
        n_rows = counts[0][part].tolist()
        ends = (start + counts[0][part].cumsum(0)).tolist()

        def places(expert: int, order: Tensor) -> Tensor:
            return order[ends[expert] - n_rows[expert] : ends[expert]]

        order = chosen.flatten().argsort(stable=True)
        order_on_host = on_host[0].flatten().argsort(stable=True)
        outputs = dict[int, tuple[Tensor, Tensor]]()

        def host_rows(expert: int) -> Tensor:
            return on_host[-1][places(expert, order_on_host) // n_used]

        work = HostWork(partial(self._expert, module), host_rows) if has_host else None
        wanted = {expert: n for expert, n in enumerate(n_rows) if n}
        for expert, came in self.experts.arrive(wanted, work):
            at = places(expert, order)
            rows = at // n_used
            out = (
                came
                if isinstance(came, Tensor)
                else self._expert(module, hidden[rows], expert, came)
            )
            out = module.post_expert_norm(out) if module.has_post_expert_norm else out
            outputs[expert] = rows, (out * scores.flatten()[at, None]).to(hidden.dtype)
        mixed = torch.zeros_like(hidden)
        for expert in sorted(outputs):
            mixed.index_add_(0, *outputs[expert])
        return mixed

    def _expert(self, module: Any, x: Tensor, expert: int, weights: LayerWeights) -> Tensor:
        """Compute an expert without a norm after it, by the attributes of transformers' experts."""
        up = self._product(
            module, x, expert, weights, "gate_up_proj" if module.has_gate else "up_proj"
        )
        inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
        return self._product(module, inner, expert, weights, "down_proj")

    def _product(
        self, module: Any, x: Tensor, expert: int, weights: LayerWeights, key: str
    ) -> Tensor:
        name = f"{self.name}.{key}"
        if name in self.names:
            out = torch.cat(
                [weights.linear(x, module_name) for module_name in self.names[name][expert]], dim=-1
            )
        else:
            matrix = weights.tensor(f"{name}.{expert}")
            out = linear(x, matrix.T if module.is_transposed else matrix)
        return out + weights.tensor(f"{name}_bias.{expert}") if module.has_bias else out


def _ranked(counts: Tensor) -> list[int]:
    """Return the indices with nonzero counts, most frequent first."""
    ranked: list[int] = counts.argsort(descending=True, stable=True)[
        : int((counts > 0).sum())
    ].tolist()
    return ranked
