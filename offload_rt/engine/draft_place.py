"""Where a draft model is among ranks: on the first one or divided among all, by what is measured before a weight moves."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from statistics import median

import torch

from offload_rt.engine import profile
from offload_rt.engine.loader import Loader, Meter
from offload_rt.engine.memory_plan import MemoryPlan
from offload_rt.errors import CapacityError
from offload_rt.executor.cuda_graphs import CudaCapture, GraphShape
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.streamer import LayerSources
from offload_rt.speculate.select import Drafting
from offload_rt.system.machine import MachineProfile, pass_time
from offload_rt.system.ranks import Ranks
from offload_rt.system.trace import Trace
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import PAGE, PackedLayer, align_up

# Times of which the median counts.
_N_TIMES = 3


@dataclass(frozen=True)
class Way:
    """What this rank drafts with and its memory plan, None where it does not fit; and the least sizes of any rank, or 0."""

    drafting: Drafting
    plan: MemoryPlan | None
    max_model_len: int
    n_nodes: int
    is_in_memory: bool


def agree(
    options: Sequence[Drafting], fit: Callable[[Drafting], MemoryPlan], disk: DiskTier, ranks: Ranks,
    of: tuple[torch.dtype, torch.device],
) -> Way:  # fmt: skip
    """The option whose steps take least, by drafting and by what a draft leaves to the target's layers; the same for all ranks.

    options  what this rank may draft with
    fit      its memory plan. Raises CapacityError as this does where there is one option alone
    of       dtype of the target, and the device
    What comes from a disk takes longest: options for which nothing does come first.
    """
    plans = [_fitted(fit, one) for one in options] if options[1:] else [fit(options[0])]
    least = ranks.least(*(n for one in plans for n in _sizes(one)))
    ways = [Way(one, plan, *least[3 * i :][:3]) for i, (one, plan) in enumerate(zip(options, plans, strict=True))]
    found = [one for one in ways if one.is_in_memory] or [one for one in ways if one.n_nodes] or ways[-1:]
    if len(found) == 1:
        return found[0]
    drafts_s = ranks.least(*(-_draft_s(one, *of) for one in found))
    machine = _machine(found, disk, *of)
    steps_s = ranks.least(*(-_step_s(one, -draft_s, machine) for one, draft_s in zip(found, drafts_s, strict=True)))
    return found[steps_s.index(max(steps_s))]


def _fitted(fit: Callable[[Drafting], MemoryPlan], option: Drafting) -> MemoryPlan | None:
    with suppress(CapacityError):
        return fit(option)
    return None


def _sizes(plan: MemoryPlan | None) -> tuple[int, int, bool]:
    return (0, 0, False) if plan is None else (plan.max_model_len, plan.limits.n_nodes, "disk" not in plan.plan.tiers)


def _draft_s(way: Way, dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of drafting a tree of all levels that it may have, each of as many rows."""
    draft, n_levels = way.drafting.draft, way.plan.limits.n_levels if way.plan else 1
    if draft is None:
        return 0.0
    return (n_levels - 1) * level_seconds(draft, way.drafting.draft_dtype(dtype), device, -(-way.n_nodes // n_levels))


def _step_s(way: Way, draft_s: float, machine: MachineProfile) -> float:
    assert way.plan is not None, "it fits"
    return pass_time(machine, way.plan.plan.pass_bytes, way.n_nodes, between_s=draft_s)


def _machine(ways: Sequence[Way], disk: DiskTier, dtype: torch.dtype, device: torch.device) -> MachineProfile:
    """Rates of the links of these plans; where nothing is streamed, passes are alike."""
    tiers = {tier for one in ways if one.plan for tier in one.plan.plan.pass_bytes.at(one.max_model_len)}
    gbps = {one: profile.link_gbps(disk, 1) if one == "disk" else profile.upload_gbps(device) for one in tiers}
    memory_gbps = profile.memory_gbps(dtype, device) if tiers else 1.0
    return MachineProfile("this machine", True, tuple(gbps.items()), memory_gbps)


def level_seconds(draft: Checkpoint, dtype: torch.dtype, device: torch.device, n_rows: int) -> float:
    """Seconds of a pass of so many rows, called by all ranks where the model is divided among them.

    Nothing is read: weights are zeros, of which there are no more than caches of the device do not hold.
    """
    spec = draft.spec
    with ExitStack() as closes:
        files = closes.enter_context(closing(DiskTier([*draft.layers, draft.non_layer], packed=device.type == "cuda")))
        resident = closes.enter_context(closing(MemoryTier()))
        *layers, rest = (files.layout(i) for i in range(spec.n_layers + 1))
        size = align_up(max(one.nbytes for one in layers), PAGE)
        n_blocks = min(-(-profile.beyond_caches(device) // size), len(layers))
        zeros = torch.empty(n_blocks * size + rest.nbytes, dtype=torch.uint8, device=device).zero_()
        for i, layout in enumerate((*layers, rest)):
            start = size * (n_blocks if layout is rest else i % n_blocks)
            resident.put(i, PackedLayer(zeros[start : start + layout.nbytes], layout))
        sources = LayerSources(resident, (None,) * spec.n_layers, 0)
        loader = Loader(device, resident, Meter(0, None), closes, frozenset())
        runner = loader.runner(spec, draft.format, dtype, sources, Trace(on=False))
        if device.type == "cuda":
            runner.use_graphs(GraphShape(2 * n_rows, 2 * n_rows + 1, n_rows), CudaCapture())
        return median(profile.seconds_of_passes(runner, [(n_rows, n_rows)] * _N_TIMES))
