"""Forecasts of a model on a machine, with the engine's placement, tree choice and cost model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from offload_rt.config import EngineConfig
from offload_rt.cost.card import Card
from offload_rt.cost.decoding import Decoding, PairTimes, predict_decoding, select_topology
from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import (
    DECODE_GBPS,
    ComputeTimes,
    MachineProfile,
    PassBytes,
    transfer_s,
)
from offload_rt.cost.roofline import Roof
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.dtypes import DType
from offload_rt.engine.draft_rounding import KEPT_TOKENS, plan_draft
from offload_rt.engine.memory_plan import DRIVER, LIBRARIES, MemoryPlan, less_margin, plan_memory
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import CapacityError
from offload_rt.offload.placement import MemoryBudget, Plan
from offload_rt.planning.acceptance import DEMO_PAIR, RECYCLE, Assumed
from offload_rt.planning.ranks import ALONE, Parallelism
from offload_rt.planning.sizes import decoded_nbytes, is_plain
from offload_rt.speculate.select import pick_drafter
from offload_rt.tree.topology import Topology
from offload_rt.weights.formats import Matrix

# Seconds of a GPU pass outside layers and head: embedding, sampling, verification (assumed).
_FIXED_S = 0.01
# Seconds between two levels of a draft on a GPU (assumed): the host wakes up, chooses nodes, and
# launches the next level. Trees of 256 nodes needed 1.25 ms of CPU time per level on busy cores,
# including products and sorting that a GPU computes itself.
LEVEL_S = 5e-4
# GB/s of decoded weights (assumed); a CPU thread decodes lossless layers at 2.8 to 5.4.
CPU_DECODE_GBPS = 3.0
# GB/s at which a CPU computes experts from its memory (assumed): two channels of DDR5-5600 have
# 89.6. Sixteen threads multiply MXFP4 and 4-bit integers at that rate, about 7 billion weights per
# second each (`python -m bench.compute`).
RAM_GBPS = 60.0
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
class Machine:
    """A machine to plan for.

    links        ("disk", GB/s) and ("host", GB/s)
    roof         compute and memory rates by dtype, and with a matrix by its measured products
    times_codes  whether `roof` measures products of quantised matrices, which then need no decoding
    ram_gbps     GB/s at which a GPU machine's CPU computes experts; 0: the GPU computes all
    ranks        division of the model; all figures are for a single rank
    passes       measured pass times of the target; None to derive them from `roof`
    sources      origin of the figures, a sentence each
    """

    title: str
    budget: MemoryBudget
    links: tuple[tuple[str, float], ...]
    roof: Callable[[DType, Matrix | None], Roof]
    fixed_s: float = 0.0
    level_s: float = 0.0
    decode_gbps: float = DECODE_GBPS
    times_codes: bool = False
    ram_gbps: float = RAM_GBPS
    ranks: Parallelism = ALONE
    passes: ComputeTimes | None = None
    sources: tuple[str, ...] = ()

    @classmethod
    def with_card(
        cls,
        card: Card,
        ram: int,
        disk_gbps: float,
        device_memory: int | None = None,
        link_gbps: float | None = None,
    ) -> "Machine":
        """Describe a machine with a GPU, by host memory in bytes and disk rate.

        device_memory  budget on the GPU; None: its memory less a margin
        link_gbps      GB/s of its link; None: the published rate of the link type
        """
        device = less_margin(card.free_nbytes) if device_memory is None else device_memory
        return cls(
            title=card.title,
            budget=MemoryBudget(
                device, less_margin(ram), LIBRARIES, has_card=True, most=card.free_nbytes - DRIVER
            ),
            links=(("disk", disk_gbps), ("host", link_gbps or card.link.gbps)),
            roof=lambda *_: Roof.from_card(card),
            fixed_s=_FIXED_S,
            level_s=LEVEL_S,
            sources=(
                f"card: {card.source}",
                "host link: set by --link"
                if link_gbps
                else f"{card.link.name}: {card.link.source}",
            ),
        )

    def costs(self, target: Sizes, draft: Sizes | None, plan: Plan) -> PairTimes:
        """Return the compute times. CUDA graphs replay draft models and resident native targets."""
        is_encoded = [target.link is not None and tier != "device" for tier in plan.tiers]
        decode_s = transfer_s(decoded_nbytes(target, is_encoded), self.decode_gbps)
        target_times = self.passes or self._times(
            target, plan.is_resident, self.ranks, sum(target.layer_nbytes), decode_s=decode_s
        )
        draft_times, n_at_once = None, 1
        if draft is not None:
            n_at_once = draft.spec.n_at_once
            coded = 1 - plan.tiers.count("device") / len(plan.tiers) if draft.stand_in else 1.0
            ranks = self.ranks if draft.stand_in or self.ranks.split_draft else ALONE
            draft_times = self._times(draft, True, ranks, draft_nbytes(draft, plan), coded=coded)
        return PairTimes(target_times, draft_times, self.level_s, n_at_once)

    def with_host_experts(self, moved: PassBytes) -> PassBytes:
        """Compute experts of host memory on the CPU of a GPU machine."""
        experts = moved.experts
        if experts is None or experts.tier != "host" or not self.ram_gbps:
            return moved
        times = ComputeTimes((1,), (0,), ((transfer_s(experts.nbytes, self.ram_gbps),),))
        return replace(moved, experts=replace(experts, host=times))

    def _times(
        self,
        sizes: Sizes,
        is_replayed: bool,
        ranks: Parallelism,
        nbytes: int,
        decode_s: float = 0.0,
        coded: float = 1.0,
    ) -> ComputeTimes:
        """Return the compute times of a rank's shard.

        nbytes    stored bytes of the layers
        decode_s  seconds of decoding lossless layers
        coded     share of the layers with quantised matrices, if any
        """
        spec = ranks.with_part_of_head(sizes.spec)
        itemsize = sizes.dtype.itemsize
        plain = layers = self.roof(sizes.dtype, None)
        share = 1.0
        if sizes.matrix is not None and self.times_codes:
            layers = plain.mixed(self.roof(sizes.dtype, sizes.matrix), coded)
        elif sizes.matrix is not None:
            share = nbytes / decoded_nbytes(sizes)
            layers = replace(
                plain,
                decode_s=transfer_s(itemsize, self.decode_gbps),
                n_coded_rows=sizes.matrix.n_coded_rows(sizes.dtype),
            )
        return plain.compute_times(
            spec, sizes.dtype, is_replayed and spec.supports_graphs, share,
            lambda n_rows: decode_s + ranks.exchange_s(sizes.spec, itemsize, n_rows),
            sizes.head_share, layers,
        )  # fmt: skip

    def of_rank(self, ranks: Parallelism) -> "Machine":
        """Return the share of each GPU; for a pipeline, total memory and a single link."""
        if ranks.n == 1:
            return self
        n = ranks.n_parts
        n_cards = ranks.n // ranks.n_parts
        links = dict(self.links)
        budget = replace(
            self.budget,
            device=n_cards * self.budget.device,
            libraries=n_cards * self.budget.libraries,
            host=self.budget.host // n,
            most=self.budget.most and n_cards * self.budget.most,
        )
        rates = (
            ("disk", links["disk"] / n),
            ("host", links["host"] / (2 if ranks.shared_link and n > 1 else 1)),
        )
        title = f"{ranks.n} x {self.title}"
        sources = (*self.sources, ranks.source)
        return replace(self, title=title, budget=budget, links=rates, sources=sources, ranks=ranks)


def draft_nbytes(draft: Sizes, plan: Plan) -> int:
    """Return the layer bytes of a draft level; self-drafting reads resident layers and copies."""
    return plan.on("device") + plan.copies_nbytes if draft.stand_in else sum(draft.layer_nbytes)


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
    run        decoding with trees
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
    row_s, compute_s = costs.target.at(np.array([1, len(topology)]), context).tolist()
    return Forecast(
        request=request,
        machine=machine,
        memory_plan=fitted,
        topology=topology,
        run=predict_decoding(cost, costs, topology, by_rank, context, request.tokens, tokens_ratio),
        single=predict_decoding(cost, costs, Topology.chain(1), by_rank, context, 1),
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
