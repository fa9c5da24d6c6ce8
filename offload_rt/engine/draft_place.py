"""Where a draft model is among ranks: on the first one or divided among all, by what is measured
before a weight moves.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from statistics import median

import torch

from offload_rt.cost.pass_times import MachineProfile, pass_time
from offload_rt.dtypes import DType
from offload_rt.engine import profile
from offload_rt.engine.loader import Loader, Meter
from offload_rt.engine.memory_plan import MemoryPlan
from offload_rt.errors import CapacityError
from offload_rt.executor.cuda_graphs import CudaCapture, GraphShape
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.streamer import LayerSources
from offload_rt.speculate.select import Drafting
from offload_rt.system.ranks import Ranks
from offload_rt.system.trace import Trace
from offload_rt.weights.layout import PAGE, PackedLayer, align_up

# Times of which the median counts.
_N_TIMES = 3


@dataclass(frozen=True)
class Way:
    """What this rank drafts with and its memory plan, None where it does not fit; and the least
    sizes of any rank, or 0.
    """

    drafting: Drafting
    plan: MemoryPlan | None
    max_model_len: int
    n_nodes: int
    is_in_memory: bool


def agree(
    options: Sequence[Drafting], fit: Callable[[Drafting], MemoryPlan], disk: DiskTier,
    ranks: Ranks,
    of: tuple[DType, torch.device],
) -> Way:  # fmt: skip
    """The option whose steps take least, by drafting and by what a draft leaves to the target's
    layers; the same for all ranks.

    options  what this rank may draft with
    fit      its memory plan. Raises CapacityError
    of       dtype of the target, and the device A disk is slowest: options that need none come
             first. A step has the deepest tree, with as many rows on each level, and takes as long
             as on the slowest rank.
    """
    plans = list[MemoryPlan | None]()
    sizes = list[int]()
    for one in options:
        plan = None
        with suppress(CapacityError):
            plan = fit(one)
        sizes += (
            (plan.max_model_len, plan.limits.n_nodes, "disk" not in plan.plan.tiers)
            if plan
            else (0, 0, False)
        )
        plans.append(plan)
    least = iter(ranks.least(*sizes))
    ways = [
        Way(*both, next(least), next(least), bool(next(least)))
        for both in zip(options, plans, strict=True)
    ]
    found = (
        [one for one in ways if one.is_in_memory]
        or [one for one in ways if one.n_nodes]
        or ways[-1:]
    )
    if len(found) == 1:
        return found[0]
    known = [(one, one.plan.limits.n_levels, one.plan.plan) for one in found if one.plan]
    levels_s = [level_seconds(one.drafting, *of, -(-one.n_nodes // n)) for one, n, _ in known]
    torch.cuda.empty_cache()
    streams = any(not plan.is_resident for _, _, plan in known)
    machine = (
        profile.profile(disk, 1, of[0].torch, of[1])
        if streams
        else MachineProfile("passes are alike", False, (), 1.0)
    )
    steps_s = [
        -pass_time(machine, plan.pass_bytes, one.n_nodes, between_s=(n - 1) * level_s)
        for level_s, (one, n, plan) in zip(levels_s, known, strict=True)
    ]
    agreed = ranks.least(*steps_s)
    return found[agreed.index(max(agreed))]


def level_seconds(drafting: Drafting, dtype: DType, device: torch.device, n_rows: int) -> float:
    """Seconds of a pass of a draft of so many rows, called by all ranks where the model is divided
    among them; else 0.

    Nothing is read: weights are zeros, of which there are no more than caches of the device do not
    hold.
    """
    draft = drafting.draft
    if draft is None:
        return 0.0
    with ExitStack() as closes:
        files = closes.enter_context(
            closing(DiskTier([*draft.layers, draft.non_layer], packed=device.type == "cuda"))
        )
        layouts = [files.layout(i) for i in range(len(draft.layers) + 1)]
        size = align_up(max(one.nbytes for one in layouts), PAGE)
        n_blocks = min(-(-profile.beyond_caches(device) // size), len(layouts))
        zeros = torch.empty(n_blocks, size, dtype=torch.uint8, device=device).zero_()
        resident = closes.enter_context(closing(MemoryTier()))
        for i, layout in enumerate(layouts):
            resident.put(i, PackedLayer(zeros[i % n_blocks, : layout.nbytes], layout))
        loader = Loader(device, resident, Meter(0, None), closes, frozenset())
        sources = LayerSources(resident, (None,) * len(draft.layers), 0)
        runner = loader.runner(
            draft.spec, draft.format, drafting.draft_dtype(dtype).torch, sources, Trace(on=False)
        )
        if device.type == "cuda":
            runner.use_graphs(GraphShape(2 * n_rows, 2 * n_rows + 1, n_rows), CudaCapture())
        return median(profile.seconds_of_passes(runner, [(n_rows, n_rows)] * _N_TIMES))
