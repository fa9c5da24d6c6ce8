"""Building an engine by its plan: models are loaded, streamers started, and the drafter is
opened.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import MachineProfile
from offload_rt.dtypes import DType
from offload_rt.engine import profile
from offload_rt.engine.engine import Engine
from offload_rt.engine.engine_plan import EnginePlan
from offload_rt.engine.loader import Loader, Meter, Progress, open_files
from offload_rt.engine.scheduler import Scheduler
from offload_rt.executor.cuda_graphs import CudaCapture, GraphShape
from offload_rt.executor.rank_runner import PipelineRunner, RankRunner
from offload_rt.executor.runner import Runner
from offload_rt.kv.split import state_rows
from offload_rt.models.heads import Head
from offload_rt.offload.memory import MemoryTier
from offload_rt.ops import extension
from offload_rt.parallel.tensor_parallel import SharedWeights, TensorParallelModel
from offload_rt.speculate.draft_model import SelfDraftModel
from offload_rt.speculate.learner import Learner
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.protocols import (
    ROWS_PER_NODE,
    Drafter,
    DraftParts,
    draft_rows,
)
from offload_rt.system.numa import cpus_near
from offload_rt.system.ranks import joined
from offload_rt.system.trace import Trace
from offload_rt.weights import int4

# Spent at most on capturing passes of a model before its first one.
_CAPTURING_S = 1.0

# Of a token that the target has drafted by a part of its cache, before any was seen: .79 to .84 was
# published for 512 rows of 4,000 to 100,000 (MagicDec).
_SELF_ACCEPTANCE = 0.8

_REFUSED = (
    "the driver pins no more memory of the host: layers go through a few pinned slots, "
    "which costs CPU time and some speed; raise the limit of locked memory, or lower --host-memory"
)


def load(engine_plan: EnginePlan, trace: Trace, progress: Progress | None = None) -> Engine:  # noqa: PLR0915
    """Load what the plan keeps in memory, start the streamer, and measure what passes cost where a
    drafter asks.

    progress  told (bytes so far, bytes in all) while loading, from several threads
    Raises LinkError if a weight cannot be read. The plan's files are closed with the engine, or
    here where loading fails.
    """
    plan = engine_plan.plan
    disk = engine_plan.disk
    device = engine_plan.device
    checkpoint = engine_plan.layers
    draft = engine_plan.drafting.draft
    with ExitStack() as closes, ExitStack() as loading:
        closes.callback(engine_plan.close)
        if device.type == "cuda":
            closes.callback(torch.cuda.empty_cache)
            _cap_device_memory(plan.budget.device, device, closes)
            _sum_in_float32(closes)
        host = closes.enter_context(closing(MemoryTier(register=device.type == "cuda")))
        models = (checkpoint,) if draft is None else (checkpoint, draft)
        files = [
            loading.enter_context(closing(open_files(one, disk.settings, device))) for one in models
        ]
        sources = {"device": files[0], "host": disk if engine_plan.link.sidecar else files[0]}
        n_bytes = sum(
            sources[name].nbytes(i)
            for i, name in enumerate((*plan.tiers, "device"))
            if name != "disk"
        )
        n_bytes += sum(files[1].nbytes(i) for i in range(draft.spec.n_layers + 1)) if draft else 0
        # what is not in memory as it is in the file is read for its copy
        if engine_plan.drafting.type.resources.copies_target:
            again = ("disk",) if engine_plan.link.sizes is None else ("disk", "host")
            n_bytes += sum(files[0].nbytes(i) for i, name in enumerate(plan.tiers) if name in again)
        if (
            engine_plan.experts is not None
            and device.type == "cuda"
            and not engine_plan.pass_bytes.disk_experts
        ):
            n_bytes += sum(
                engine_plan.experts.tier.nbytes(i) for i in range(len(engine_plan.experts.records))
            )
        loader = Loader(device, host, Meter(n_bytes, progress), closes, cpus_near(device))
        capture = CudaCapture() if device.type == "cuda" else None
        n_nodes = engine_plan.limits.n_nodes
        # Passes of a draft are in the trace as levels of a tree; layer by layer they would fill it.
        draft_runner = None
        untraced = Trace(on=False)
        if draft is not None:
            draft_dtype = engine_plan.drafting.draft_dtype(DType.of(engine_plan.dtype)).torch
            draft_runner = loader.runner(
                draft.spec, draft.format, draft_dtype, loader.sources(draft, files[1]), untraced
            )
        target = loader.sources(checkpoint, files[0], engine_plan)
        if engine_plan.drafting.type.resources.copies_target:
            copies = loader.copies(target, files[0])
            draft_runner = loader.runner(
                checkpoint.spec, int4.Format(), int4.DTYPE.torch, copies, untraced
            )
        # Before the streamer of the target begins to copy.
        if draft_runner is not None and capture is not None:
            n_keys = draft_rows(engine_plan.max_model_len, n_nodes)
            draft_runner.use_graphs(
                GraphShape(n_nodes, n_keys, ROWS_PER_NODE * n_nodes), capture, _CAPTURING_S
            )
        runner = loader.runner(
            checkpoint.spec, checkpoint.format, engine_plan.dtype, target, trace, engine_plan
        )
        part = runner.spec if isinstance(runner.spec, TensorParallelModel) else None
        beside = (
            SharedWeights(runner.non_layer, part, device) if part is not None else runner.non_layer
        )
        if draft_runner is not None and isinstance(draft_runner.spec, Head):
            runner.taps = draft_runner.spec.taps
            draft_runner.taps = (1,)
            draft_runner.non_layer = draft_runner.spec.weights_beside(
                draft_runner.non_layer, beside, device
            )
        if capture is not None and plan.is_resident:
            # Where the target drafts itself, its passes have the rows of trees under way.
            n_tree_rows = (
                n_nodes
                if engine_plan.drafting.type.resources.view is None
                else ROWS_PER_NODE * n_nodes
            )
            runner.use_graphs(
                GraphShape(n_nodes, engine_plan.cache_rows, n_tree_rows), capture, _CAPTURING_S
            )
        _compute_together((runner, beside, draft_runner), closes)
        drafter, cost = _open_drafter(engine_plan, runner, draft_runner, trace, closes)
        states = engine_plan.n_sequences, state_rows(checkpoint.spec, engine_plan.dtype.itemsize)
        scheduler = Scheduler(
            engine_plan.cache_rows, engine_plan.limits.n_nodes, plan.split, *states
        )
        is_captured = device.type == "cpu" or not isinstance(runner, PipelineRunner)
        uncaptured = "" if is_captured else "passes of a pipeline are not captured as CUDA graphs"
        notice = "\n".join(
            filter(
                None, (_REFUSED if host.is_refused else "", uncaptured, extension.notice(device))
            )
        )
        rule = engine_plan.drafting.rule
        return Engine(
            runner=runner,
            drafter=drafter,
            scheduler=scheduler,
            rule=rule,
            cost=cost,
            trace=trace,
            closes=closes.pop_all(),
            draft=draft_runner,
            notice=notice,
        )


def _compute_together(several: Sequence[Any], closes: ExitStack) -> None:
    """Let other ranks do what rank 0 does with what is divided, until it has ended, and end their
    processes.
    """
    if (ranks := joined()) is None:
        return
    ranks.has_begun = True
    if ranks.rank > 0:
        for number, method, args, kwargs in ranks.told():
            getattr(several[number], method)(*args, **kwargs)
        raise SystemExit
    closes.callback(ranks.leave)
    for number, one in enumerate(several):
        if isinstance(one, SharedWeights | RankRunner):
            one.send = partial(ranks.telling, number)


def _cap_device_memory(nbytes: int, device: torch.device, closes: ExitStack) -> None:
    """Let torch take no more than the budget until `closes`, so that a larger card behaves as a
    smaller one.
    """
    _, all_of_card = torch.cuda.mem_get_info(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    closes.callback(torch.cuda.set_per_process_memory_fraction, before, device)
    torch.cuda.set_per_process_memory_fraction(min(nbytes / all_of_card, 1.0), device)


def _sum_in_float32(closes: ExitStack) -> None:
    """Let cuBLAS add the parts of a product in float32 until `closes`; by default it may round them
    to 16 bits before.
    """
    products = torch.backends.cuda.matmul
    for name in (
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_reduced_precision_reduction",
    ):
        closes.callback(setattr, products, name, getattr(products, name))
        setattr(products, name, False)


def _open_drafter(
    engine_plan: EnginePlan, runner: Runner, draft: Runner | None, trace: Trace, closes: ExitStack
) -> tuple[Drafter, CostEstimator]:
    drafting = engine_plan.drafting
    limits = engine_plan.limits
    moved = engine_plan.pass_bytes
    if limits.n_nodes == 1:
        machine = MachineProfile("not measured", False, (("disk", 1.0), ("host", 1.0)), 1.0)
    else:
        split = engine_plan.plan.split
        longest = engine_plan.max_model_len - 2
        if split is not None:  # computing is timed with all rows on the device
            longest = min(longest, split.n_on_device - limits.n_nodes - 1)
        disk = engine_plan.disk if engine_plan.device.type == "cpu" else None
        if moved.disk_experts is not None and engine_plan.experts is not None:
            disk = engine_plan.experts.tier
        machine = profile.pass_profile(runner, moved, (limits.n_nodes, longest), disk)
        if isinstance(runner, PipelineRunner) and machine.compute and not machine.link_gbps:
            runner.overlap(machine.compute)
            machine = replace(machine, compute=machine.compute.of_stages(runner.ranks.size))
    if (
        moved.experts is not None
        and runner.experts is not None
        and (host := runner.experts.host) is not None
    ):
        host.is_on = True  # passes have been timed without what it computes
        moved = replace(moved, experts=replace(moved.experts, host=host.times))
    resources = drafting.type.resources
    n_levels = limits.n_levels
    draft_nbytes = (
        drafting.draft.nbytes
        if drafting.draft
        else runner.spec.n_layers * engine_plan.plan.reserved.stand_in
    )
    draft_model = None
    self_model = None
    pair_stats = PairStats()
    target = engine_plan.checkpoint.identity
    n_slots = engine_plan.plan.n_expert_slots
    experts = profile.experts_bias(target, n_slots, closes) if n_slots else None
    cost = CostEstimator(machine, moved, draft_nbytes, drafting.view_rows or None, experts)
    if draft is not None:
        draft_model = resources.open_model(
            draft, runner.spec.vocab_size, n_levels, trace, resources.draft_context
        )
        pair_stats = PairStats.load(
            target, drafting.draft.identity if drafting.draft else int4.Format.name
        )
    if resources.view is not None:
        self_model = SelfDraftModel(
            runner, n_levels, trace, resources.view, drafting.view_rows, engine_plan.view_rows
        )
        pair_stats = PairStats.load(
            target, f"{drafting.name} {drafting.view_rows}", _SELF_ACCEPTANCE
        )
    learner = None
    if draft is not None and drafting.learning != "off":
        learner = Learner(
            draft, runner.streamer.meter, pair_stats.pair if drafting.learning == "keep" else None
        )
        runner.meanwhile = learner.work
    parts = DraftParts(
        limits,
        cost,
        drafting.child_sampling,
        drafting.rule.coupled_up_to,
        draft_model,
        self_model,
        pair_stats,
        learner=learner,
    )
    return drafting.type.open(parts), cost
