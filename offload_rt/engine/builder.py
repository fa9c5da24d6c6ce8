"""Build an engine from its specification: load models, start streamers, open the drafter."""

from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial

import torch

from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import MachineProfile
from offload_rt.engine import profile
from offload_rt.engine.device import prepare_cuda
from offload_rt.engine.engine import Engine
from offload_rt.engine.engine_spec import EngineSpec
from offload_rt.engine.link_rates import copy_chunk
from offload_rt.engine.loader import Loader, Progress, open_files, summed
from offload_rt.engine.sequence_pool import Scheduler
from offload_rt.executor.captured_passes import capture_passes
from offload_rt.executor.cuda_graphs import Capture, CudaCapture, GraphShape
from offload_rt.executor.runner import Runner
from offload_rt.kv.split import state_rows
from offload_rt.offload.copy_device import CHUNK
from offload_rt.offload.memory import MemoryTier
from offload_rt.ops import extension
from offload_rt.speculate.rows import ROWS_PER_NODE, draft_rows
from offload_rt.system.numa import cpus_near
from offload_rt.system.trace import Trace

# Time limit for capturing likely passes of a model before its first pass.
_CAPTURING_S = 1.0

_REFUSED = (
    "the driver pins no more memory of the host: layers go through a few pinned slots, "
    "which costs CPU time and some speed; raise the limit of locked memory, or lower --host-memory"
)


def load(spec: EngineSpec, trace: Trace, progress: Progress | None = None) -> Engine:
    """Load the weights that stay in memory, start the streamer, and measure passes for the drafter.

    progress  receives (loaded bytes, total bytes) from several threads
    Raises LinkError if a weight cannot be read. The spec's files are closed with the engine, or
    here if loading fails.
    """
    memory = spec.memory
    on_card = spec.device.type == "cuda"
    with ExitStack() as closes:
        closes.callback(spec.files.close)
        is_streamed = on_card and not spec.plan.is_resident
        chunk_nbytes = copy_chunk(spec.device) if is_streamed else CHUNK
        if on_card:
            prepare_cuda(spec.plan.budget.device, spec.device, closes)
        host = closes.enter_context(closing(MemoryTier(register=on_card)))
        loader = Loader(spec.device, host, closes, cpus_near(spec.device), chunk_nbytes)
        # Draft and target share the memory pool of captured passes.
        capture = CudaCapture() if on_card else None
        runner, draft = _load_models(spec, loader, capture, trace, progress)
        shared = spec.ranks.shared_weights(runner, spec.device)
        spec.draft.connect(runner, draft, shared)
        if capture is not None and spec.plan.is_resident:
            # A self-drafting target also computes growing trees.
            is_view = spec.draft.drafting.type.resources.view is not None
            n_rows = (ROWS_PER_NODE if is_view else 1) * memory.limits.n_nodes
            shape = GraphShape(memory.limits.n_nodes, memory.cache_rows, n_rows)
            capture_passes(runner, shape, capture, _CAPTURING_S)
        spec.ranks.compute_together((runner, shared, draft), closes)
        cost = _measure(spec, runner, closes)
        drafter = spec.draft.open_drafter(memory, runner, draft, cost, trace)
        per_state = state_rows(runner.spec, spec.target.dtype.itemsize)
        scheduler = Scheduler(
            memory.cache_rows, memory.limits.n_nodes, spec.plan.split, memory.n_sequences, per_state
        )
        if is_streamed:
            reserved = spec.plan.reserved
            draft_nbytes = max(reserved.draft - spec.draft.weights_nbytes(spec.plan), 0)
            _gather_memory(reserved.cache + reserved.scratch + draft_nbytes, spec.device)
        is_captured = not on_card or spec.ranks.pipeline == 1
        notices = (
            _REFUSED if host.is_refused else "",
            "" if is_captured else "passes of a pipeline are not captured as CUDA graphs",
            extension.notice(spec.device),
        )
        return Engine(
            runner=runner,
            drafter=drafter,
            scheduler=scheduler,
            rule=spec.draft.drafting.rule,
            cost=cost,
            trace=trace,
            closes=closes.pop_all(),
            draft=draft,
            notice="\n".join(filter(None, notices)),
        )


def _load_models(
    spec: EngineSpec,
    loader: Loader,
    capture: Capture | None,
    trace: Trace,
    progress: Progress | None,
) -> tuple[Runner, Runner | None]:
    """Load both models; the draft's passes are captured before the target starts to copy."""
    target = spec.target
    plan = spec.plan
    open_packed = partial(open_files, settings=spec.files.disk.settings, device=spec.device)
    with ExitStack() as loading:
        files = open_packed(spec.files.checkpoint, mirrors=target.mirrors)
        stored = loading.enter_context(closing(files))
        draft_files = None
        if spec.draft.checkpoint is not None:
            draft_files = loading.enter_context(closing(open_packed(spec.draft.checkpoint)))
        if progress:
            n_bytes = target.loaded_nbytes(plan, spec.files, stored)
            n_bytes += spec.draft.loaded_nbytes(plan, draft_files, stored)
            loader = replace(loader, loaded=summed(n_bytes, progress))
        draft = spec.draft.build(loader, draft_files)
        sources = target.load(loader, plan, spec.files, stored)
        if spec.draft.copies_target:
            draft = spec.draft.build_copies(loader, sources, stored)
        if draft is not None and capture is not None:
            n_nodes = spec.memory.limits.n_nodes
            n_keys = draft_rows(spec.memory.max_model_len, n_nodes)
            shape = GraphShape(n_nodes, n_keys, ROWS_PER_NODE * n_nodes)
            capture_passes(draft, shape, capture, _CAPTURING_S)
        return target.build(loader, plan, spec.files, sources, trace), draft


def _gather_memory(nbytes: int, device: torch.device) -> None:
    """Leave one free block of torch's memory to caches and activations.

    Passes then take no memory from the driver. It would wait for all queued copies, also those of
    the next pass: on an H200, each pass of a 70B ended after three layers of the next.
    """
    torch.cuda.empty_cache()
    with suppress(torch.OutOfMemoryError):
        torch.empty(nbytes, dtype=torch.uint8, device=device)


def _measure(spec: EngineSpec, runner: Runner, closes: ExitStack) -> CostEstimator:
    moved = spec.pass_bytes
    machine = MachineProfile((("disk", 1.0), ("host", 1.0)), 1.0)
    memory = spec.memory
    n_nodes = memory.limits.n_nodes
    if n_nodes > 1:
        longest = memory.max_model_len - 2
        if spec.plan.split is not None:  # measured with all rows on the device
            longest = min(longest, spec.plan.split.n_on_device - n_nodes - 1)
        disk = spec.files.disk if spec.device.type == "cpu" else None
        if moved.disk_experts is not None and spec.files.experts is not None:
            disk = spec.files.experts
        machine = profile.pass_profile(runner, moved, (n_nodes, longest), disk)
    host = None if runner.experts is None else runner.experts.host
    if moved.experts is not None and host is not None:
        host.is_on = True  # the pass times exclude the host's computation
        moved = replace(moved, experts=replace(moved.experts, host=host.times))
    n_slots = spec.plan.n_expert_slots
    identity = spec.target.checkpoint.identity
    experts = profile.experts_bias(identity, n_slots, closes) if n_slots else None
    view_rows = spec.draft.drafting.view_rows or None
    return CostEstimator(machine, moved, spec.draft.weights_nbytes(spec.plan), view_rows, experts)
