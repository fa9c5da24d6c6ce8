"""Experts of traced mixtures: computed together, or loaded on demand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import grouped_mm_experts_forward

from offload_rt import ops
from offload_rt.models.layers import ExpertShare, HostWork, LayerExperts, LayerWeights
from offload_rt.ops import extension
from offload_rt.ops.few_rows import Stack, multiply_stack, serves_stack
from offload_rt.ops.linear import linear
from offload_rt.packing import CODED_ROWS

# Stacks of both projections; two stacks if gate and up matrices are stored separately.
_Stacks = tuple[list[Stack], list[Stack]]
# Maps module, hidden states, chosen experts and scores to mixed outputs.
_Mix = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def mixture(module: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
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
        mix = getattr(type(module).forward, "__wrapped__", _mix_chosen)
    else:
        mix = touched.mix
    if share is None:
        out: Tensor = mix(module, hidden, *args, **kwargs)
        return out
    return mix_of_all(share, partial(mix, module), hidden, *args, *kwargs.values())


def choose_llama4_experts(module: Any) -> None:
    """Make a mixture of Llama 4 compute only the chosen experts; transformers computes all."""
    experts = module.experts
    experts.is_transposed = experts.has_gate = True
    experts.has_bias = experts.has_post_expert_norm = False
    experts._apply_gate = partial(_gated, experts.act_fn)
    module.forward = partial(_llama4, module)


def _gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return up * activation(gate)


def _llama4(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Forward of Llama4TextMoe: scores multiply the inputs of experts, not their outputs."""
    x = hidden_states.reshape(-1, module.hidden_dim)
    _, logits = module.router(x)
    top, chosen = logits.topk(module.top_k, dim=1)
    scores = top.float().sigmoid().to(x.dtype)
    rows = (x[:, None] * scores[..., None]).flatten(0, 1)
    outputs = mixture(module.experts, rows, chosen.view(-1, 1), torch.ones_like(rows[:, :1]))
    mixed = outputs.view(len(x), module.top_k, -1).sum(1)
    return module.shared_expert(x) + mixed, logits


def _mix_chosen(module: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Compute a mixture with a resident expert per row; see `choose_llama4_experts`."""
    mixed = torch.zeros_like(hidden)
    for expert in sorted(set(chosen[:, 0].tolist())):
        rows = torch.where(chosen[:, 0] == expert)[0]
        inner = module._apply_gate(hidden[rows] @ module.gate_up_proj[expert])
        mixed[rows] = inner @ module.down_proj[expert]
    return mixed


def mix_of_all(
    share: ExpertShare, mix: Callable[..., Tensor], hidden: Tensor, chosen: Tensor, scores: Tensor
) -> Tensor:
    """Combine the experts of all ranks; `mix` computes the contribution of this rank's experts.

    mix             receives hidden, chosen and scores
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


def _grouped_products(module: Any, hidden: Tensor, n_chosen: int) -> _Mix | None:
    """Return a mixture with one product of all experts per projection; None if not on a GPU."""
    stacks = _stacks(module, hidden)
    parameters = [value for value in module._parameters.values() if value is not None]
    is_on_card = hidden.is_cuda and all(getattr(value, "is_cuda", False) for value in parameters)
    if stacks is None:
        return grouped_mm_experts_forward if is_on_card else None
    # torch's kernel for later GPUs multiplies many rows faster, and does not wait for row counts
    # (pytorch issues 161407, 186620).
    is_torch_faster = n_chosen > CODED_ROWS * module.num_experts
    if is_on_card and is_torch_faster and extension.capability(hidden.device) >= 90:
        return grouped_mm_experts_forward
    return partial(_mix_stacks, stacks)


def _cpu_products(module: Any, hidden: Tensor) -> _Mix | None:
    """Return a mixture with one call per projection for all experts; None if not served."""
    up, down = _projections(module)
    if hidden.is_cuda or module.has_bias or not isinstance(up, _Experts):
        return None
    return partial(_mix_on_cpu, up, down)


def _mix_on_cpu(
    up: "_Experts", down: "_Experts", module: Any, hidden: Tensor, chosen: Tensor, scores: Tensor
) -> Tensor:
    """Compute a mixture; outputs are added in expert order, as in `Touched.mix`."""
    n_rows, n_used = chosen.shape
    numbers, order = chosen.flatten().sort(stable=True)
    n_chosen = Counter(numbers.tolist())
    experts = list(n_chosen)
    ends = list(accumulate(n_chosen.values()))
    x = hidden if n_rows == 1 else hidden[order // n_used]
    inner = _activated(module, up.weights.linear_experts(x, ends, up.names, experts))
    out = down.weights.linear_experts(inner, ends, down.names, experts)
    out = module.post_expert_norm(out) if module.has_post_expert_norm else out
    weighted = (out * scores.flatten()[order, None]).to(hidden.dtype)
    if n_rows > 1:
        weighted = weighted[(order // n_used).argsort(stable=True)]
    mixed = torch.zeros_like(hidden)
    for part in weighted.view(n_rows, n_used, -1).unbind(1):
        mixed += part
    return mixed


def _stacks(module: Any, hidden: Tensor) -> _Stacks | None:
    """Return the stacks of both projections if the kernel serves all of them."""
    if not extension.serves(hidden):
        return None
    up, down = (_stacks_of(value, module.is_transposed) for value in _projections(module))
    is_split = len(up) > 1 and module.has_bias
    served = all(stack is not None and serves_stack(hidden.dtype, stack) for stack in (*up, *down))
    return (up, down) if served and not is_split else None  # type: ignore[return-value]  # no None


def _projections(module: Any) -> tuple[Any, Any]:
    return (module.gate_up_proj if module.has_gate else module.up_proj), module.down_proj


def _activated(module: Any, up: Tensor) -> Tensor:
    out: Tensor = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    return out


def _stacks_of(value: Any, is_transposed: bool) -> list[Stack | None]:
    """Return the stacks of a parameter; matrices (n_in, n_out) have no kernel."""
    if isinstance(value, _Experts):
        return value.stacked()
    return [value if isinstance(value, Tensor) and value.is_cuda and not is_transposed else None]


def _mix_stacks(
    stacks: _Stacks, module: Any, hidden: Tensor, chosen: Tensor, scores: Tensor
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
    inner = _activated(module, project(name, stacks[0], hidden, order // n_used))
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


def experts_of(
    names: list[list[str]], shape: tuple[int, ...], weights: LayerWeights, is_card: bool
) -> Any:
    """Return a parameter of this shape that contains the named expert matrices."""
    whole = weights.fused([name for modules in names for name in modules]) if is_card else None
    return _Experts(names, shape, weights) if whole is None else whole.view(shape)


@dataclass(frozen=True)
class _Experts:
    """Parameter of an expert module: a matrix, or several concatenated by output, per expert."""

    names: list[list[str]]
    shape: tuple[int, ...]
    weights: LayerWeights

    def stacked(self) -> list[Stack | None]:
        """Return a stack of each part of the matrices; None if not stored so."""
        return [self.weights.stacked(names) for names in zip(*self.names, strict=True)]

    def __getitem__(self, expert: Any) -> "MatrixOfModules":
        return MatrixOfModules(self.names[int(expert)], self.weights)


@dataclass(frozen=True)
class MatrixOfModules:
    """Matrix with its rows stored in several tensors; supports only `linear` and `matmul`."""

    names: list[str]
    weights: LayerWeights

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...], kwargs: Any = None
    ) -> Tensor:
        x, matrix, *bias = args
        is_product = function in (F.linear, Tensor.matmul) and bias in ([], [None])
        assert is_product, "modules compute products without bias"
        return torch.cat([matrix.weights.linear(x, name) for name in matrix.names], dim=-1)


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
        counts = on_host[0].flatten().bincount(minlength=module.num_experts)
        part = slice(self.owned.start, self.owned.stop)
        self.experts.expect([] if predicted is None else _ranked(on_host[1], self.owned))
        n_rows = counts[part].tolist()
        ends = counts.cumsum(0)[part].tolist()

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
            if isinstance(came, Tensor):
                out = came
            else:
                out = self._expert(module, hidden[rows], expert, came)
            out = module.post_expert_norm(out) if module.has_post_expert_norm else out
            outputs[expert] = rows, (out * scores.flatten()[at, None]).to(hidden.dtype)
        mixed = torch.zeros_like(hidden)
        for expert in sorted(outputs):
            mixed.index_add_(0, *outputs[expert])
        return mixed

    def _expert(self, module: Any, x: Tensor, expert: int, weights: LayerWeights) -> Tensor:
        """Compute an expert without a norm after it, by the attributes of transformers' experts."""
        key = "gate_up_proj" if module.has_gate else "up_proj"
        inner = _activated(module, self._product(module, x, expert, weights, key))
        return self._product(module, inner, expert, weights, "down_proj")

    def _product(
        self, module: Any, x: Tensor, expert: int, weights: LayerWeights, key: str
    ) -> Tensor:
        name = f"{self.name}.{key}"
        if name in self.names:
            out = torch.cat([weights.linear(x, part) for part in self.names[name][expert]], dim=-1)
        else:
            matrix = weights.tensor(f"{name}.{expert}")
            out = linear(x, matrix.T if module.is_transposed else matrix)
        return out + weights.tensor(f"{name}_bias.{expert}") if module.has_bias else out


def _ranked(chosen: Tensor, owned: range) -> list[int]:
    """Return the experts of choices (n_rows, n_used) by frequency, numbered within `owned`.

    Equally frequent experts keep the order of the router, which is by probability.
    """
    counts = Counter(chosen.T.flatten().tolist())
    return [expert - owned.start for expert, _ in counts.most_common() if expert in owned]
