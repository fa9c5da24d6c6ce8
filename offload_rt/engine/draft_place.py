"""Where a draft model is among ranks: on the first one or divided among all, by what is measured before a weight moves."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
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

    def draft_s(self, dtype: torch.dtype, device: torch.device) -> float:
        """Seconds of drafting a tree of all levels that it may have, each of as many rows; called by all ranks."""
        draft, n_levels = self.drafting.draft, self.plan.limits.n_levels if self.plan else 1
        if draft is None:
            return 0.0
        n_rows = -(-self.n_nodes // n_levels)
        return (n_levels - 1) * level_seconds(draft, self.drafting.draft_dtype(dtype), device, n_rows)

    def step_s(self, draft_s: float, machine: MachineProfile) -> float:
        """Seconds of a step of this rank."""
        assert self.plan is not None, "it fits"
        return pass_time(machine, self.plan.plan.pass_bytes, self.n_nodes, between_s=draft_s)


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
    ways, sizes = [], list[int]()
    for one in options:
        plan = None
        try:
            plan = fit(one)
        except CapacityError:
            if len(options) == 1:
                raise
        sizes += (plan.max_model_len, plan.limits.n_nodes, "disk" not in plan.plan.tiers) if plan else (0, 0, False)
        ways.append((one, plan))
    least = iter(ranks.least(*sizes))
    agreed = [Way(*one, next(least), next(least), bool(next(least))) for one in ways]
    found = [one for one in agreed if one.is_in_memory] or [one for one in agreed if one.n_nodes] or agreed[-1:]
    if len(found) == 1:
        return found[0]
    drafts_s = ranks.least(*(-one.draft_s(*of) for one in found))
    streams = any(one.plan and not one.plan.plan.is_resident for one in found)
    machine = profile.profile(disk, 1, *of) if streams else MachineProfile("passes are alike", False, (), 1.0)
    steps_s = ranks.least(*(-one.step_s(-draft_s, machine) for one, draft_s in zip(found, drafts_s, strict=True)))
    return found[steps_s.index(max(steps_s))]


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
