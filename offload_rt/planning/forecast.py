"""Forecasts of a model on a machine, with the engine's placement, tree choice and cost model."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from offload_rt.config import EngineConfig
from offload_rt.cost.decoding import Decoding, PairTimes, predict_decoding, select_topology
from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import MachineProfile, PassBytes, transfer_s
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.engine.draft_rounding import KEPT_TOKENS, plan_draft
from offload_rt.engine.memory_plan import MemoryPlan, plan_memory
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import CapacityError
from offload_rt.planning.acceptance import DEMO_PAIR, RECYCLE, Assumed
from offload_rt.planning.machine import Machine, draft_nbytes
from offload_rt.planning.sizes import is_plain
from offload_rt.speculate.select import pick_drafter
from offload_rt.tree.topology import Topology

# How a pass reads the weights of a mixture.
WHOLE_LAYERS = "whole layers"
ON_DEMAND = "experts on demand"
ON_CPU = "experts on demand, some computed by the CPU"
# Least tokens per second of a comfortable and of a slow conversation.
INTERACTIVE = 5.0
SLOW = 0.5
# Ratio to the time of a single row above which a pass is limited by matrix products, not by reading
# weights.
_PRODUCTS_RATIO = 1.5


@dataclass(frozen=True)
class PlanRequest:
    """Input of a forecast.

    context  tokens before the first pass
    most_levels  largest number of tree levels; None for the drafter's default
    """

    config: EngineConfig
    models: tuple[Sizes, Sizes | None]
    acceptance: Assumed
    context: int
    tokens: int
    most_levels: int | None = None


class DraftLevel(NamedTuple):
    """Time and weight bytes of a draft level; `ratio` is relative to reading the weights."""

    seconds: float
    nbytes: int
    gbps: float
    ratio: float


@dataclass(frozen=True)
class Forecast:
    """Predicted placement, tree and speed.

    topology   draft tree; a single node for plain decoding
    run        decoding with trees in the drafted share of the passes
    single     decoding without trees, with this placement
    moved      bytes that cross each link in a pass
    draft_s    seconds of drafting a tree
    compute_s  seconds of layers and head per pass
    row_s      the same for a single row
    exchange_s seconds of `compute_s` spent in exchanges between ranks
    """

    request: PlanRequest
    machine: Machine
    memory_plan: MemoryPlan
    topology: Topology
    run: Decoding
    single: Decoding
    moved: dict[str, int]
    draft_s: float
    compute_s: float
    row_s: float
    exchange_s: float

    @cached_property
    def plain(self) -> Decoding:
        """Plain decoding; without a draft model, more layers stay on the device."""
        if self.request.models[1] is None:
            return self.single
        return predict(without_draft(self.request), self.machine).single

    @property
    def verdict(self) -> str:
        """What the predicted speed is good for."""
        rate = 1 / self.run.seconds_per_token
        return "interactive" if rate >= INTERACTIVE else "slow" if rate >= SLOW else "batch only"

    @property
    def mode(self) -> str:
        """How a pass of the run reads the weights of a mixture; empty for other models."""
        if self.request.models[0].spec.mixture is None:
            return ""
        if self.memory_plan.plan.experts is None:
            return WHOLE_LAYERS
        experts = self.machine.with_host_experts(self.memory_plan.plan.pass_bytes).experts
        return ON_DEMAND if experts is None or experts.host is None else ON_CPU

    @property
    def acceptance_source(self) -> str:
        """Source of the acceptance, with the correction for a quantised draft model."""
        draft = self.request.models[1]
        source = self.request.acceptance.source
        if draft is None or draft.rounding == "none":
            return source
        kept_tokens = KEPT_TOKENS[draft.rounding]
        return f"{source}; times {kept_tokens} for a draft in {draft.rounding}, {DEMO_PAIR}"

    @property
    def level(self) -> DraftLevel | None:
        """Mean draft level; None without a draft model."""
        draft = self.request.models[1]
        if draft is None or len(self.topology) == 1:
            return None
        head = draft.spec.vocab_size * draft.spec.hidden_size * draft.dtype.itemsize
        nbytes = draft_nbytes(draft, self.memory_plan.plan) + int(draft.head_share * head)
        roof = self.machine.roof(draft.dtype, None)
        seconds = self.draft_s / (self.topology.n_levels - 1)
        ratio = seconds / roof.seconds(0.0, nbytes)
        return DraftLevel(seconds, nbytes, roof.bandwidth / 1e9, ratio)

    @property
    def link_s(self) -> dict[str, float]:
        """Busy seconds of each link per pass."""
        rates = dict(self.machine.links)
        return {name: transfer_s(nbytes, rates[name]) for name, nbytes in self.moved.items()}

    @property
    def busy(self) -> dict[str, float]:
        """Busy share of each link per pass."""
        return {name: seconds / self.run.pass_s for name, seconds in self.link_s.items()}

    @property
    def bound(self) -> str:
        """Bottleneck of a pass, with the busy seconds of all resources."""
        is_compute_bound = self.compute_s > _PRODUCTS_RATIO * self.row_s
        resource = "matrix products" if is_compute_bound else "memory bandwidth"
        drafting = "drafting and " if self.draft_s > self.compute_s / 4 else ""
        names = {"host": "the host-to-card link", "disk": "the disk"}
        shares = {names[name]: seconds for name, seconds in self.link_s.items()}
        device_s = self.draft_s + self.compute_s - self.exchange_s
        shares[f"{drafting}the device's {resource}"] = device_s
        if self.exchange_s:
            shares["the exchange between ranks"] = self.exchange_s
        slowest, *faster = sorted(shares, key=lambda name: shares[name], reverse=True)
        rest = ", ".join(f"{name} {shares[name]:.2f} s" for name in faster)
        return f"{slowest}: busy {shares[slowest]:.2f} s per pass" + (f" ({rest})" if rest else "")


def predict(
    request: PlanRequest, machine: Machine, run: tuple[MemoryPlan, PassBytes] | None = None
) -> Forecast:
    """Plan memory, choose the tree, and predict the speed.

    run  memory plan and traffic of a run on this machine; None to plan memory here
    Raises CapacityError if the model does not fit.
    """
    config = request.config
    target, draft = request.models
    context = request.context
    if run is None:
        drafting = pick_drafter(config)

        def fit(draft: Sizes | None, config: EngineConfig) -> MemoryPlan:
            return plan_memory(config, drafting, (target, draft), target.dtype, machine.budget)

        is_alone = machine.ranks.n == 1 or config.draft_quantize != "auto"
        can_round = draft is not None and not draft.stand_in and is_plain(draft) and is_alone
        draft, fitted = plan_draft(config, draft, can_round, machine.budget.has_card, fit)
        request = replace(request, models=(target, draft))
        run = fitted, fitted.plan.pass_bytes
    fitted, moved = run
    if context + request.tokens > fitted.max_model_len:
        raise CapacityError(
            "the context is too long", need=f"{context} tokens and {request.tokens} more",
            have=f"room for {fitted.max_model_len}",
            change="lower --context or --max-new-tokens, or raise --max-model-len",
        )  # fmt: skip
    costs = machine.costs(target, draft, fitted.plan)
    itemsize = target.dtype.itemsize
    exchanged = machine.ranks.crossing(target.spec, itemsize) if fitted.plan.streamed_nbytes else 0
    profile = MachineProfile(machine.links, 1.0, machine.fixed_s, costs.target)
    moved = replace(machine.with_host_experts(moved), exchanged=exchanged)
    cost = CostEstimator(profile, moved)
    by_rank = request.acceptance.by_rank
    kept_tokens = 1.0 if draft is None else KEPT_TOKENS[draft.rounding]
    tokens_ratio = kept_tokens * request.acceptance.dynamic_ratio
    topology = select_topology(cost, costs, by_rank, _limits(request, fitted, costs), context)
    trees = predict_decoding(cost, costs, topology, by_rank, context, request.tokens, tokens_ratio)
    single = predict_decoding(cost, costs, Topology.chain(1), by_rank, context, request.tokens)
    row_s, compute_s = costs.target.at(np.array([1, len(topology)]), context).tolist()
    return Forecast(
        request=request,
        machine=machine,
        memory_plan=fitted,
        topology=topology,
        run=trees.mixed(single, request.acceptance.drafted),
        single=single,
        moved=_link_nbytes(moved, dict(machine.links), context, len(topology)),
        draft_s=costs.draft_s(topology, context),
        compute_s=compute_s,
        row_s=row_s,
        exchange_s=machine.ranks.exchange_s(target.spec, itemsize, len(topology)),
    )


def _limits(request: PlanRequest, fitted: MemoryPlan, costs: PairTimes) -> DraftLimits:
    """Return tree limits within the depth of the request and of drafters of several tokens.

    A single node without a draft model: most drafters without one have no published acceptance.
    """
    if request.models[1] is None and request.config.drafter != RECYCLE:
        return replace(fitted.limits, n_nodes=1)
    n_levels = min(fitted.limits.n_levels, request.most_levels or fitted.limits.n_levels)
    if costs.n_at_once > 1:
        n_levels = min(n_levels, costs.n_at_once + 1)
    return replace(fitted.limits, n_levels=n_levels)


def _link_nbytes(
    moved: PassBytes, links: dict[str, float], context: int, n_rows: int
) -> dict[str, int]:
    """Return the bytes per link; experts that the processor computes cross no link."""
    nbytes = moved.at(context, n_rows)
    experts = moved.experts
    if experts is not None and experts.host is not None:
        rows = np.array(n_rows)
        on_cpu = experts.pass_nbytes(rows) - experts.pass_nbytes(rows, links[experts.tier])
        nbytes[experts.tier] -= int(on_cpu)
    return {name: n for name, n in nbytes.items() if n}


def plain_config(config: EngineConfig) -> EngineConfig:
    """Return the settings for plain decoding, without all settings of drafts."""
    return replace(
        config, drafter="none", draft_model=None, draft_quantize="auto", learn_draft="off",
        tree_size=None, tree_depth=None,
    )  # fmt: skip


def without_draft(request: PlanRequest) -> PlanRequest:
    """Return the request for plain decoding."""
    config = plain_config(request.config)
    return replace(request, config=config, models=(request.models[0], None))


def predict_if_it_fits(request: PlanRequest, machine: Machine) -> Forecast | None:
    """Return the forecast; None if the model does not fit."""
    try:
        return predict(request, machine)
    except CapacityError:
        return None
