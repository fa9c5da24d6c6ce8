"""What the modules of a model of transformers meet in place of their cache, attention, masks and parameters."""

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
from offload_rt.models.architecture import (
    ExpertShare,
    HostWork,
    LayerExperts,
    LayerWeights,
    PassContext,
    StateContext,
    StateShape,
)
from offload_rt.ops.linear import linear

# Names under which transformers finds what is ours: in passes, where nobody makes masks, and while a model is traced.
NAME, TRACED = "offload_rt", "offload_rt_traced"
OTHER_STATE = "keep state that is not keys and values"
# Tensors that models give to attention besides queries, keys, values and a mask, and that are used or change nothing.
_KNOWN = {"s_aux", "position_ids", "cache_position"}


def register() -> None:
    """Let models of transformers find what is ours."""
    ExpertsInterface.register(NAME, _mixture)
    AttentionInterface.register(NAME, _attention)
    AttentionInterface.register(TRACED, _traced_attention)
    AttentionMaskInterface.register(TRACED, _mask)


class PassCache(Cache):
    """The pass under way: to a model its cache, to the attention of its layers the way to the context.

    Layers of the cache are numbered in the order in which attention is first computed.
    windows  by layer of the model and attention in it: how many positions back a row sees
    chosen   by layer, while a model is traced: modules of experts, and what each is called with
    """

    def __init__(self) -> None:
        self.layers = []
        self.windows: dict[tuple[int, int], int | None] = {}
        self.chosen: dict[int, list[tuple[nn.Module, list[Tensor]]]] = {}
        self._context: PassContext | None = None
        self._numbers: dict[tuple[int, int], int] = {}
        self.states: dict[int, int] = {}  # by layer of the model
        self.read: dict[int, set[int]] = {}  # layers of the cache, by layer of the model
        self._at = (0, 0)

    def enter(self, layer: int, context: PassContext) -> None:
        """A layer of the model begins."""
        self._context, self._at = context, (layer, 0)

    def choose(self, module: nn.Module, given: list[Tensor]) -> None:
        """A traced layer has come to its experts."""
        self.chosen.setdefault(self._at[0], []).append((module, given))

    def of_layer(self, layer: int) -> list[int]:
        """Layers of the cache that a layer of the model keeps keys and values in."""
        return [number for (i, _), number in self._numbers.items() if i == layer]

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

    def recur(self, shape: StateShape, *rows: Tensor) -> Tensor:
        """See `StateContext.recur`."""
        context = cast("StateContext", self._context)
        return context.recur(self.states.setdefault(self._at[0], len(self.states)), shape, *rows)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Attention (1, n, n_heads, v_dim) of q (1, n_heads, n, dim) to the rows of the cache that k and v become part of.

        Keys and values that another layer has attended to with are there already. What attention is first called with for
        its window holds from then on.
        """
        assert self._context is not None, "a layer is called within a pass"
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
        out = self._context.attend(number, rows, *new, scale=scale, window=window, softcap=softcap, sinks=sinks)
        k.kv_layer = v.kv_layer = number  # type: ignore[attr-defined]
        return out[None]


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What models call for attention, see transformers' AttentionInterface; s_aux are sinks."""
    cache: PassCache = module.__dict__["pass_cache"]
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.attend(q, k, v, scale, sliding_window, softcap, s_aux), None


def delta_net(net: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """What stands for the forward of a gated delta net, whose modules it calls; rows are not padded."""
    if hasattr(net, "in_proj_qkvz"):
        parts = net.fix_query_key_value_ordering(net.in_proj_qkvz(hidden_states), net.in_proj_ba(hidden_states))
        x, (gate, b, a) = torch.cat([one.flatten(2) for one in parts[:3]], -1), parts[3:]
    elif hasattr(net, "in_proj_qkv"):
        x, gate, b, a = (getattr(net, f"in_proj_{one}")(hidden_states) for one in ("qkv", "z", "b", "a"))
    else:  # OLMo Hybrid
        *parts, gate, b, a = (getattr(net, f"{one}_proj")(hidden_states) for one in "qkvgba")
        x = torch.cat(parts, -1)
    beta = b[0].sigmoid() * (2 if getattr(net, "allow_neg_eigval", False) else 1)
    log_decays = -net.A_log.float().exp() * F.softplus(a.float() + net.dt_bias)
    weight = net.conv1d.weight.squeeze(1)
    shape = StateShape(net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim, weight.shape[1])
    out = net.__dict__["pass_cache"].recur(shape, x[0], weight, log_decays[0], beta)
    norm, project = (net.norm, net.out_proj) if hasattr(net, "norm") else (net.o_norm, net.o_proj)
    heads = norm(out.flatten(0, 1), gate.reshape(-1, net.head_v_dim))
    return project(heads.view(*x.shape[:2], -1))  # type: ignore[no-any-return]


def _traced_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None,
    sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The same while a model is traced. Raises UnsupportedModelError where attention is not what passes compute."""
    others = sorted(key for key, one in kwargs.items() if isinstance(one, Tensor) and key not in _KNOWN)
    is_ours = attention_mask is None or hasattr(attention_mask, "window")
    if others or not is_ours or not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"its attention takes {(others or ['a mask of its own'])[0]}")
    if k.shape[2] != q.shape[2]:
        raise UnsupportedModelError("its layers keep keys that are not those of single tokens")
    # The windows that layers name are for kernels that take no masks, and may lack; those of masks are what counts.
    window = getattr(attention_mask, "window", sliding_window)
    return _attention(module, q, k, v, None, sliding_window=window, **kwargs)


def _mask(
    q_length: int, kv_length: int, device: torch.device, use_vmap: bool = False, local_size: int | None = None,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """What a traced model takes for a mask: nothing but the window, unless a model masks by a function of its own."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    if not use_vmap:
        mask.window = local_size  # type: ignore[attr-defined]
    return mask


def _mixture(module: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """What models call for the experts of a mixture, see transformers' ExpertsInterface.

    Their own code visits one expert after the other, for each of which the host waits.
    """
    if hidden.is_meta:
        module.__dict__["pass_cache"].choose(module, [hidden, *args, *kwargs.values()])
        return torch.empty_like(hidden)
    share, touched = (module.__dict__.get(name) for name in ("share", "touched"))
    if hidden.is_cuda and all(getattr(one, "is_cuda", False) for one in module._parameters.values() if one is not None):
        mix = grouped_mm_experts_forward if share is None else partial(_grouped, share.own)
    else:
        mix = type(module).forward.__wrapped__ if touched is None else touched.mix  # type: ignore[attr-defined]
    if share is None:
        out: Tensor = mix(module, hidden, *args, **kwargs)
        return out
    return mix_of_all(share, partial(mix, module), hidden, *args, *kwargs.values())


def mix_of_all(
    share: ExpertShare, mix: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, chosen: Tensor, scores: Tensor
) -> Tensor:
    """The output of a mixture by all ranks, each of which gives with `mix` what its experts add to it.

    chosen, scores  (n_rows, n_used)
    """
    if not share.is_exact:
        return share.all_reduce(mix(hidden, chosen, scores))
    n_rows, n_used = chosen.shape
    # As many rows of one expert each: of their outputs only one rank's is not zero, so their sum is no sum.
    each = mix(hidden.repeat(n_used, 1), chosen.T.reshape(-1, 1), scores.T.reshape(-1, 1))
    outputs, rows = share.all_reduce(each).view(n_used, n_rows, -1), torch.arange(n_rows, device=hidden.device)
    mixed = torch.zeros_like(hidden)
    for places in chosen.argsort(1).T:
        mixed += outputs[places, rows]
    return mixed


def _grouped(own: range, module: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Transformers' grouped products with some of the experts, to which it gives numbers of their own."""
    is_other = (chosen < own.start) | (chosen >= own.stop)
    whole, module.num_experts, module._is_expert_parallel = module.num_experts, len(own), True
    numbers = (chosen - own.start).masked_fill(is_other, len(own))
    out = grouped_mm_experts_forward(module, hidden, numbers, scores.masked_fill(is_other, 0.0))
    module.num_experts, module._is_expert_parallel = whole, False
    return out


class Table:
    """The table of an embedding; to its module, the parameter that rows are looked up in."""

    def __init__(self, name: str, weights: LayerWeights, device: torch.device) -> None:
        self._name, self._weights = name, weights
        self.dtype, self.device = weights.dtype, device

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Tensor:
        assert function is F.embedding, "what an embedding computes"
        ids, table = args[:2]
        rows: Tensor = table._weights.rows(ids.flatten(), table._name)
        return rows.view(*ids.shape, rows.shape[1])


def experts_of(names: list[list[str]], shape: tuple[int, ...], weights: LayerWeights, is_card: bool) -> Any:
    """A parameter of this shape that holds the matrices of experts, which have these names."""
    whole = weights.joined([one for own in names for one in own]) if is_card else None
    return _Experts(names, shape, weights) if whole is None else whole.view(shape)


class _Experts:
    """One matrix for each expert, or several whose outputs follow each other; to a module, its parameter."""

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
        assert function in (F.linear, Tensor.matmul) and bias in ([], [None]), "what the experts of a mixture compute"
        return torch.cat([matrix._weights.linear(x, name) for name in matrix._names], dim=-1)


@dataclass(frozen=True)
class Touched:
    """The experts of a layer, or those of them that a rank has, that come as rows need them.

    own      which they are
    name     of their module in the layer
    names    of each parameter that is stored expert by expert: the modules of each of these
    predict  what rows are likely to take in the next layer, (n_rows, n_used), by what the experts of this one get
    """

    experts: LayerExperts
    own: range
    name: str
    names: dict[str, list[list[str]]]
    predict: Callable[[Tensor], Tensor | None]

    def mix(self, module: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """What transformers' experts compute, those that are there first; the host waits for the router's choice.

        chosen, scores  (n_rows, n_used)
        The outputs are added in the order of the experts, so a sum does not depend on what was there.
        """
        predicted, n_used, has_host = self.predict(hidden), chosen.shape[1], self.experts.has_host
        choices = [chosen] if predicted is None else [chosen, predicted]
        on_host = ops.to_host([*choices, *([hidden.contiguous()] if has_host else [])])
        counts = [one.flatten().bincount(minlength=module.num_experts) for one in on_host[: len(choices)]]
        part, start = slice(self.own.start, self.own.stop), sum(counts[0][: self.own.start].tolist())
        self.experts.expect([] if predicted is None else _ranked(counts[1][part]))
        n_rows, ends = counts[0][part].tolist(), (start + counts[0][part].cumsum(0)).tolist()

        def places(expert: int, order: Tensor) -> Tensor:
            return order[ends[expert] - n_rows[expert] : ends[expert]]

        order, outputs = chosen.flatten().argsort(stable=True), dict[int, tuple[Tensor, Tensor]]()
        order_there, compute = on_host[0].flatten().argsort(stable=True), partial(self._expert, module)
        work = HostWork(compute, lambda one: on_host[-1][places(one, order_there) // n_used])
        for expert, came in self.experts.arrive(
            {one: n for one, n in enumerate(n_rows) if n}, work if has_host else None
        ):
            at = places(expert, order)
            rows = at // n_used
            out = came if isinstance(came, Tensor) else self._expert(module, hidden[rows], expert, came)
            out = module.post_expert_norm(out) if module.has_post_expert_norm else out
            outputs[expert] = rows, (out * scores.flatten()[at, None]).to(hidden.dtype)
        mixed = torch.zeros_like(hidden)
        for expert in sorted(outputs):
            mixed.index_add_(0, *outputs[expert])
        return mixed

    def _expert(self, module: Any, x: Tensor, expert: int, weights: LayerWeights) -> Tensor:
        """One expert on its rows, but for a norm behind it, by the attributes that transformers' own implementations go by."""
        up = self._product(module, x, expert, weights, "gate_up_proj" if module.has_gate else "up_proj")
        inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
        return self._product(module, inner, expert, weights, "down_proj")

    def _product(self, module: Any, x: Tensor, expert: int, weights: LayerWeights, key: str) -> Tensor:
        name = f"{self.name}.{key}"
        if name in self.names:
            out = torch.cat([weights.linear(x, one) for one in self.names[name][expert]], dim=-1)
        else:
            matrix = weights.tensor(f"{name}.{expert}")
            out = linear(x, matrix.T if module.is_transposed else matrix)
        return out + weights.tensor(f"{name}_bias.{expert}") if module.has_bias else out


def _ranked(counts: Tensor) -> list[int]:
    """The numbers that were counted at all, the most frequent first."""
    found: list[int] = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())].tolist()
    return found
