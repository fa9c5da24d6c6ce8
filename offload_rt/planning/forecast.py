"""What a model would do on a machine: the engine's own placement and choice of tree, run on the simulator's virtual clock."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from offload_rt.config import EngineConfig
from offload_rt.engine.memory_plan import LIBRARIES, MemoryPlan, Sizes, less_margin, plan_memory, reserved_memory
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.executor.cost import CostEstimator
from offload_rt.offload.placement import MemoryBudget, least_budget
from offload_rt.planning.acceptance import Assumed
from offload_rt.planning.hardware import Card
from offload_rt.planning.roofline import Roof, head_share
from offload_rt.planning.simulate import Costs, Generation, StreamSchedule, generate
from offload_rt.speculate.protocols import DraftLimits
from offload_rt.speculate.select import pick_drafter
from offload_rt.system.machine import MachineProfile
from offload_rt.tree.choose import choose, sizes_up_to
from offload_rt.tree.search import search
from offload_rt.tree.topology import Topology

# Seconds of a pass on a card besides its layers and its head: embedding, sampling, verification (assumed).
_FIXED_S = 0.01
# Seconds between two levels of a draft on a card (assumed): the host wakes up, chooses nodes, and launches the next level. Of
# trees of 256 nodes 1.25 ms of CPU time were counted, on busy cores and with products and sorting that a card does.
LEVEL_S = 5e-4
# Points of a curve.
_N_POINTS = 12
# Choosing a tree asks what a level of the draft takes, and that depends on the tree.
_ROUNDS = 3
# A pass so much longer than one of a single row is limited by its products, not by reading the weights.
_OF_PRODUCTS = 1.5


@dataclass(frozen=True)
class Machine:
    """A machine to plan for.

    budget      bytes that may be used
    links       ("disk", GB/s) and ("host", GB/s)
    roof        what it reaches with numbers of a dtype
    level_s     see `Costs`
    contention  see `StreamSchedule`
    sources     where its figures are from, a sentence each
    """

    title: str
    budget: MemoryBudget
    links: tuple[tuple[str, float], ...]
    roof: Callable[[torch.dtype], Roof]
    fixed_s: float = 0.0
    level_s: float = 0.0
    contention: float = 0.0
    sources: tuple[str, ...] = ()

    @classmethod
    def with_card(
        cls, card: Card, ram: int, disk_gbps: float, device_memory: int | None = None, link_gbps: float | None = None
    ) -> "Machine":
        """A card in a machine with so much memory and such a disk.

        device_memory  budget on the card; None: all of it, less a margin
        link_gbps      GB/s of its link; None: what such a link reaches
        """
        device = less_margin(card.memory_nbytes) if device_memory is None else device_memory
        return cls(
            title=card.title,
            budget=MemoryBudget(device, less_margin(ram), LIBRARIES, has_card=True),
            links=(("disk", disk_gbps), ("host", link_gbps or card.link.gbps)),
            roof=lambda _: Roof.of(card),
            fixed_s=_FIXED_S,
            level_s=LEVEL_S,
            contention=1.0 / card.memory_gbps,
            sources=(
                f"card: {card.source}",
                "its link: given" if link_gbps else f"{card.link.name}: {card.link.source}",
            ),
        )

    def costs(self, target: Sizes, draft: Sizes | None, is_resident: bool) -> Costs:
        """What computing takes. A draft model is replayed as graphs, and so is a target that is resident as a whole."""
        of_target = self.roof(target.dtype).compute_times(target.spec, target.dtype, is_resident)
        of_draft = self.roof(draft.dtype).compute_times(draft.spec, draft.dtype) if draft else None
        return Costs(of_target, of_draft, head_share(target.spec), self.fixed_s, self.level_s)


@dataclass(frozen=True)
class PlanRequest:
    """What is to be predicted.

    models   the target and the draft model
    context  tokens before the first pass
    tokens   that are generated
    """

    config: EngineConfig
    models: tuple[Sizes, Sizes | None]
    acceptance: Assumed
    context: int
    tokens: int


@dataclass(frozen=True)
class DraftLevel:
    """A level of the draft: its seconds, the bytes of weights that it reads, and GB/s at which the device reads."""

    seconds: float
    nbytes: int
    gbps: float

    @property
    def ratio(self) -> float:
        """Of its time to that of reading its bytes."""
        return self.seconds / (self.nbytes / self.gbps / 1e9)


@dataclass(frozen=True)
class Forecast:
    """What would happen.

    topology   of the trees; one node for plain decoding
    run        on the virtual clock, with trees
    plain      on the virtual clock, without
    link_s     seconds for which a pass keeps each link busy
    draft_s    seconds of drafting a tree, compute_s of layers and head
    level      the mean level of a tree; None where no model drafts
    bound      what a pass waits for, in words
    """

    request: PlanRequest
    machine: Machine
    memory_plan: MemoryPlan
    topology: Topology
    run: Generation
    plain: Generation
    link_s: dict[str, float]
    draft_s: float
    compute_s: float
    level: DraftLevel | None
    bound: str

    @property
    def busy(self) -> dict[str, float]:
        """Part of a pass in which each link is busy."""
        return {name: seconds / self.run.pass_s for name, seconds in self.link_s.items()}


def predict(request: PlanRequest, machine: Machine) -> Forecast:
    """Place the model, choose the tree, and run the loop. Raises CapacityError where it does not fit."""
    config, (target, draft), context = request.config, request.models, request.context
    fitted = plan_memory(config, pick_drafter(config), request.models, target.dtype, machine.budget)
    if context + request.tokens > fitted.max_model_len:
        raise CapacityError(
            "the context is too long", need=f"{context} tokens and {request.tokens} more",
            have=f"room for {fitted.max_model_len}", change="lower --context or --max-new-tokens, or raise --max-model-len",
        )  # fmt: skip
    costs = machine.costs(target, draft, is_resident=fitted.plan.is_resident)
    schedule = StreamSchedule.of(fitted.plan, machine.links, machine.contention)
    profile = MachineProfile(machine.title, False, machine.links, 1.0, machine.fixed_s, costs.target)
    moved = fitted.plan.pass_bytes
    topology = _tree(request, fitted.limits, costs, CostEstimator(profile, moved))
    by_rank, draft_s = request.acceptance.by_rank, costs.draft_s(topology, context)
    one_row_s, compute_s = costs.target.at(np.array([1, len(topology)]), context).tolist()
    at = moved.at(context, len(topology))
    link_s = {name: nbytes / profile.link(name) / 1e9 for name, nbytes in at.items()}
    return Forecast(
        request=request,
        machine=machine,
        memory_plan=fitted,
        topology=topology,
        run=generate(schedule, costs, (topology, by_rank), (context, context + request.tokens)),
        plain=generate(schedule, costs, (Topology.chain(1), by_rank), (context, context + 1)),
        link_s=link_s,
        draft_s=draft_s,
        compute_s=compute_s,
        level=_level(topology, draft, draft_s, machine),
        bound=_bound(link_s, draft_s, compute_s, compute_s / one_row_s),
    )


def _level(topology: Topology, draft: Sizes | None, draft_s: float, machine: Machine) -> DraftLevel | None:
    if draft is None or len(topology) == 1:
        return None
    nbytes = sum(draft.layer_nbytes) + draft.spec.vocab_size * draft.spec.hidden_size * draft.dtype.itemsize
    return DraftLevel(draft_s / (topology.n_levels - 1), nbytes, machine.roof(draft.dtype).bandwidth / 1e9)


def _tree(request: PlanRequest, limits: DraftLimits, costs: Costs, cost: CostEstimator) -> Topology:
    """The tree with the least time for a token, by the cost model, as drafters of a chosen shape choose it."""
    if costs.draft is None or limits.n_nodes == 1:
        return Topology.chain(1)
    table = search(request.acceptance.by_rank, limits.n_nodes, limits.n_levels)
    sizes = np.array([limits.n_nodes]) if limits.fixed_size else sizes_up_to(limits.n_nodes)
    least_levels = limits.n_levels if limits.fixed_depth else 1 + limits.fixed_size
    topology = Topology.chain(2)
    for _ in range(_ROUNDS):
        level_s = costs.draft_s(topology, request.context) / max(topology.n_levels - 1, 1)
        seconds = cost.seconds(sizes[:, None], request.context, level_s * np.arange(limits.n_levels))
        n_nodes, n_levels, _ = choose(table.values, sizes, seconds, least_levels)
        topology = table.topology(n_nodes, n_levels)
        if len(topology) == 1:
            break
    return topology


def _bound(link_s: dict[str, float], draft_s: float, compute_s: float, widening: float) -> str:
    """What a pass waits for, and by how much.

    widening  seconds of computing it, over those of computing one row
    """
    of_device = "matrix products" if widening > _OF_PRODUCTS else "memory bandwidth"
    links = {f"the {'host-to-card link' if name == 'host' else 'disk'}": seconds for name, seconds in link_s.items()}
    device = f"drafting and the device's {of_device}" if draft_s > compute_s / 4 else f"the device's {of_device}"
    shares = {**links, device: draft_s + compute_s}
    first, *others = sorted(shares, key=lambda name: shares[name], reverse=True)
    rest = ", ".join(f"{name} {shares[name]:.2f} s" for name in others)
    return f"{first}: busy {shares[first]:.2f} s a pass" + (f" ({rest})" if rest else "")


@dataclass(frozen=True)
class Sweep:
    """A curve: what x is, and for each x, ascending, what would happen; None where the model does not fit."""

    what: str
    points: tuple[tuple[float, Forecast | None], ...]


def sweep(over: str, request: PlanRequest, machine: Machine) -> Sweep:
    """Predict along "ram" or "memory". Raises SettingsError for "ram" where there is no card beside it."""
    (target, draft), config, budget = request.models, request.config, machine.budget
    if over == "ram":
        if not budget.has_card:
            need = "a card beside that memory"
            raise SettingsError("--sweep ram", need=need, have=machine.title, change="use --sweep memory")
        what = "GiB of memory for weights beside the card"
        sizes = np.linspace(0, 1.2 * sum(target.layer_nbytes), _N_POINTS + 1)[1:]
        budgets = [replace(budget, host=int(nbytes)) for nbytes in sizes]
    else:
        context = config.max_model_len or request.context + request.tokens
        fixed = reserved_memory(target, draft, target.dtype, context, config.tree_size or 8)
        least, most = least_budget(target.layer_nbytes, fixed), fixed.total + sum(target.layer_nbytes)
        what = "GiB of memory on the device"
        sizes = np.linspace(1.02 * least, 1.1 * most, _N_POINTS)
        budgets = [replace(budget, device=int(nbytes)) for nbytes in sizes]
    forecasts = (_predict_if_it_fits(request, replace(machine, budget=one)) for one in budgets)
    return Sweep(what, tuple(zip((sizes / 2**30).tolist(), forecasts, strict=True)))


def _predict_if_it_fits(request: PlanRequest, machine: Machine) -> Forecast | None:
    try:
        return predict(request, machine)
    except CapacityError:
        return None
