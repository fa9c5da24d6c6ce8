"""Building the parts of an engine from its settings: what is planned, and what is loaded by the plan."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

import torch

from offload_rt.config import EngineConfig
from offload_rt.engine import profile
from offload_rt.engine.engine import Engine, Parts
from offload_rt.engine.memory_plan import LIBRARIES, Sizes, less_margin, plan_memory
from offload_rt.engine.scheduler import Scheduler
from offload_rt.errors import CapacityError, DeviceError, SettingsError
from offload_rt.executor.cost import CostEstimator
from offload_rt.executor.cuda_graphs import CudaCapture, GraphShape
from offload_rt.executor.runner import Placing, Runner
from offload_rt.models.architecture import LayerWeights
from offload_rt.offload import stream_cuda, stream_threads
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.placement import MemoryBudget, Plan
from offload_rt.offload.streamer import LayerSources
from offload_rt.offload.tier import done_ahead, read_parallel
from offload_rt.speculate.draft_model import ROWS_PER_NODE, DraftModel, draft_rows
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.protocols import Drafter, DraftLimits, DraftParts
from offload_rt.speculate.select import Drafting, warm_up
from offload_rt.system.machine import MachineProfile, cards, memory_free, memory_limit
from offload_rt.system.trace import Trace
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.header import TensorRecord
from offload_rt.weights.layout import PackedLayer, host_block, pack

Progress = Callable[[int, int], None]

_REFUSED = (
    "the driver pins no more memory of the host: layers go through a few pinned slots, "
    "which costs CPU time and some speed; raise the limit of locked memory, or lower --host-memory"
)


@dataclass(frozen=True)
class EnginePlan:
    """All that is decided before a weight moves.

    max_model_len  most tokens of a sequence
    cache_rows     rows of keys and values that the plan has room for
    notice         what its user should know of the device; empty if nothing
    """

    checkpoint: Checkpoint
    drafting: Drafting
    limits: DraftLimits
    device: torch.device
    dtype: torch.dtype
    disk: DiskTier
    plan: Plan
    max_model_len: int
    cache_rows: int
    notice: str = ""


def pick_device(name: str) -> torch.device:
    """The device of a setting. Raises DeviceError if it is cuda and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "--device cuda", need="a CUDA device that torch can use", have=_why_no_card(), change="use --device cpu"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _why_no_card() -> str:
    """What torch says of a card that it cannot use: no driver, one that is too old, a build without CUDA."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"none ({str(error).splitlines()[0].split('. ')[0].rstrip('.')})"
    return "none"


def _notice(asked: str, device: torch.device) -> str:
    """Says so where a card is there and a CPU computes although nobody asked for it."""
    found = cards() if asked == "auto" and device.type == "cpu" else []
    if not found:
        return ""
    return f"computing on the CPU: there is a {found[0]}, but torch can use {_why_no_card()}; --device cpu if that is meant"


def plan_engine(config: EngineConfig, checkpoint: Checkpoint, drafting: Drafting) -> EnginePlan:
    """Decide where everything goes. Raises CapacityError if it cannot go anywhere."""
    spec, device = checkpoint.spec, pick_device(config.device)
    if device.type == "cpu" and config.host_memory is not None:
        raise SettingsError(
            "--host-memory is for pinned memory beside a GPU", change="on a CPU, set --device-memory alone"
        )
    dtype = _pick_dtype(config.dtype, checkpoint)
    budget = memory_budget(config, device)
    target = Sizes.of_checkpoint(checkpoint, dtype)
    draft = None
    if drafting.draft is not None:
        draft = Sizes.of_checkpoint(drafting.draft, drafting.draft.dtype)
    disk = DiskTier(checkpoint.layers)
    try:
        target = replace(target, layer_nbytes=tuple(disk.layout(i).nbytes for i in range(spec.n_layers)))
        fitted = plan_memory(config, drafting, (target, draft), dtype, budget)
        if fitted.plan.tiers.count("disk"):
            disk = _tuned(disk, checkpoint)
    except BaseException:
        disk.close()
        raise
    return EnginePlan(
        checkpoint, drafting, fitted.limits, device, dtype, disk, fitted.plan, fitted.max_model_len, fitted.cache_rows,
        _notice(config.device, device),
    )  # fmt: skip


def load(engine_plan: EnginePlan, trace: Trace, progress: Progress | None = None) -> Engine:
    """Load what the plan keeps in memory, start the streamer, and measure what passes cost where a drafter asks.

    progress  told (bytes so far, bytes in all) while loading, from several threads
    Raises LinkError if a weight cannot be read. The plan's files are closed with the engine, or here where loading fails.
    """
    plan, disk, draft = engine_plan.plan, engine_plan.disk, engine_plan.drafting.draft
    is_cuda = engine_plan.device.type == "cuda"
    in_memory = [i for i, name in enumerate(plan.tiers) if name != "disk"]
    n_bytes = plan.reserved.non_layer + sum(disk.nbytes(i) for i in in_memory)
    meter = _Meter(n_bytes + (draft.nbytes if draft else 0), progress)
    with ExitStack() as closes:
        closes.callback(disk.close)
        if is_cuda:
            closes.callback(torch.cuda.empty_cache)
            _cap_device_memory(plan.budget.device, engine_plan.device, closes)
        host, resident = MemoryTier(register=is_cuda), MemoryTier()
        closes.callback(host.close)
        closes.callback(resident.close)
        place = Placing(engine_plan.device, engine_plan.dtype)
        non_layer = _load_non_layer(engine_plan.checkpoint, place, meter)
        _fill({"device": resident, "host": host}, engine_plan, meter)
        streamed = tuple({"device": None, "host": host, "disk": disk}[name] for name in plan.tiers)
        sources = LayerSources(resident, streamed, plan.n_slots)
        runner = _runner(place, engine_plan.checkpoint, sources, non_layer, trace)
        closes.callback(runner.close)
        draft_runner = _load_draft(engine_plan, draft, meter, trace) if draft else None
        if draft_runner is not None:
            closes.callback(draft_runner.close)
        if is_cuda:
            _capture_passes(engine_plan, runner, draft_runner)
        drafter, cost = _open_drafter(engine_plan, runner, draft_runner, trace)
        parts = Parts(runner, drafter, engine_plan.drafting.rule, cost, trace, draft_runner, closes.pop_all())
    scheduler = Scheduler(engine_plan.cache_rows, engine_plan.limits.n_nodes)
    return Engine(parts, scheduler, _REFUSED if host.is_refused else "")


def _cap_device_memory(nbytes: int, device: torch.device, closes: ExitStack) -> None:
    """Let torch take no more than the budget until `closes`, so that a larger card behaves as a smaller one."""
    _, all_of_card = torch.cuda.mem_get_info(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    closes.callback(torch.cuda.set_per_process_memory_fraction, before, device)
    torch.cuda.set_per_process_memory_fraction(min(nbytes / all_of_card, 1.0), device)


def _capture_passes(engine_plan: EnginePlan, runner: Runner, draft: Runner | None) -> None:
    """Let models that lie on the card as a whole compute by CUDA graphs."""
    capture, n_nodes = CudaCapture(), engine_plan.limits.n_nodes
    if runner.is_resident:
        runner.use_graphs(GraphShape(n_nodes, engine_plan.cache_rows, n_nodes), capture)
    if draft is not None:
        n_keys = draft_rows(engine_plan.max_model_len, n_nodes)
        draft.use_graphs(GraphShape(n_nodes, n_keys, ROWS_PER_NODE * n_nodes), capture)


def _runner(
    place: Placing, checkpoint: Checkpoint, sources: LayerSources, non_layer: LayerWeights, trace: Trace
) -> Runner:
    open_streamer = stream_cuda.open_streamer if place.device.type == "cuda" else stream_threads.open_streamer
    streamer = open_streamer(sources, trace, place.device)
    return Runner(checkpoint.spec, streamer, non_layer, checkpoint.format, place, trace)


def _load_draft(engine_plan: EnginePlan, draft: Checkpoint, meter: "_Meter", trace: Trace) -> Runner:
    """The draft model, all of it on the device, in its own dtype."""
    layers = MemoryTier()
    with closing(DiskTier(draft.layers)) as disk:
        for i in range(draft.spec.n_layers):
            layers.put(i, _on(engine_plan.device, _read(disk, i, engine_plan.device, meter)))
    place = Placing(engine_plan.device, draft.dtype)
    non_layer = _load_non_layer(draft, place, meter)
    # Its passes are in the trace as levels of a tree; layer by layer they would fill it.
    sources = LayerSources(layers, (None,) * draft.spec.n_layers, 0)
    return _runner(place, draft, sources, non_layer, Trace(on=False))


def _open_drafter(
    engine_plan: EnginePlan, runner: Runner, draft: Runner | None, trace: Trace
) -> tuple[Drafter, CostEstimator]:
    drafting, limits, moved = engine_plan.drafting, engine_plan.limits, engine_plan.plan.pass_bytes
    if limits.n_nodes == 1:
        machine = MachineProfile("not measured", False, (("disk", 1.0), ("host", 1.0)), 1.0)
    else:
        warm_up(drafting.rule)
        machine = profile.pass_profile(runner, moved, (limits.n_nodes, engine_plan.max_model_len))
    cost = CostEstimator(machine, moved)
    model, pair_stats = None, PairStats()
    if draft is not None and drafting.draft is not None:
        model = DraftModel(draft, runner.spec.vocab_size, limits.n_levels, trace)
        pair_stats = PairStats.load(engine_plan.checkpoint.identity, drafting.draft.identity)
    parts = DraftParts(limits, cost, drafting.child_sampling, model, pair_stats)
    return drafting.type.open(parts), cost


class _Meter:
    """Adds up what several threads have loaded."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done = total, progress, 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress:
                self._progress(self._done, self._total)


def _pick_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    if name == "auto":
        name = checkpoint.spec.dtype_name or str(checkpoint.dtype).removeprefix("torch.")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}[
        name
    ]


def memory_budget(config: EngineConfig, device: torch.device) -> MemoryBudget:
    """The settings, or what is free, less a margin. Raises CapacityError for more than there is."""
    spare = less_margin(memory_free())
    if device.type == "cpu":
        return MemoryBudget(_within(config.device_nbytes, "--device-memory", spare, memory_limit()))
    torch.cuda.empty_cache()  # what an engine that was closed has left to torch is free as well
    on_card, all_of_card = torch.cuda.mem_get_info(device)
    return MemoryBudget(
        _within(config.device_nbytes, "--device-memory", less_margin(on_card), all_of_card),
        _within(config.host_nbytes, "--host-memory", spare, memory_limit()),
        LIBRARIES,
        has_card=True,
    )


def _within(asked: int | None, flag: str, default: int, limit: int) -> int:
    if asked is not None and asked > limit:
        raise CapacityError(
            f"{flag} is more than there is", need=f"{asked} bytes", have=f"{limit}", change=f"lower {flag}"
        )
    return default if asked is None else asked


def _tuned(disk: DiskTier, checkpoint: Checkpoint) -> DiskTier:
    settings = profile.read_settings(checkpoint.layers)
    disk.close()
    return DiskTier(checkpoint.layers, settings)


def _read(disk: DiskTier, i: int, device: torch.device, meter: _Meter) -> PackedLayer:
    """Layer i in memory of the host: as it lies in the file where a CPU computes, packed for a GPU."""
    image = PackedLayer(host_block(disk.layout(i).nbytes), disk.layout(i))
    read_parallel(disk.reads(i, image.block), disk.n_parallel, meter)
    return image if device.type == "cpu" else pack(image.layout.views(image.block))


def _on(device: torch.device, image: PackedLayer) -> PackedLayer:
    return PackedLayer(image.block.to(device), image.layout)


def _fill(tiers: dict[str, MemoryTier], engine_plan: EnginePlan, meter: _Meter) -> None:
    """Put every layer that the plan keeps in memory where it belongs; layers that are the same bytes of a file are kept once.

    The next one is read while one is packed, pinned or brought to the device.
    """
    same: dict[tuple[str, tuple[TensorRecord, ...]], list[int]] = {}
    for i, name in enumerate(engine_plan.plan.tiers):
        if name != "disk":
            same.setdefault((name, tuple(engine_plan.checkpoint.layers[i])), []).append(i)

    reads = (partial(_read, engine_plan.disk, layers[0], engine_plan.device, meter) for layers in same.values())
    with closing(done_ahead(reads, "loads")) as images:
        for (name, _), layers in same.items():
            image = next(images)
            if name == "device":
                image = _on(engine_plan.device, image)
            for i in layers:
                tiers[name].put(i, image)


def _load_non_layer(checkpoint: Checkpoint, place: Placing, meter: _Meter) -> LayerWeights:
    tier = DiskTier([checkpoint.non_layer])
    try:
        image = _on(place.device, _read(tier, 0, place.device, meter))
    finally:
        tier.close()
    return checkpoint.format.view(image.layout, image.block, place.dtype)
