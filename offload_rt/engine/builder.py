"""Building the parts of an engine from its settings: what is planned, and what is loaded by the plan."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

import torch

from offload_rt.config import EngineConfig
from offload_rt.engine import profile
from offload_rt.engine.memory_plan import LIBRARIES, Sizes, less_margin, plan_memory
from offload_rt.errors import CapacityError, DeviceError, SettingsError
from offload_rt.executor.cost import CostEstimator
from offload_rt.executor.cuda_graphs import CudaCapture, GraphShape
from offload_rt.executor.runner import Placing, Runner
from offload_rt.offload import stream_cuda, stream_threads
from offload_rt.offload.device import DeviceTier
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.host import HostTier
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.placement import MemoryBudget, Plan
from offload_rt.offload.streamer import LayerSources, Streamer
from offload_rt.offload.tier import read_parallel
from offload_rt.speculate.draft_model import ROWS_PER_NODE, DraftModel, draft_rows
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.protocols import Drafter, DraftLimits, DraftParts
from offload_rt.speculate.select import Drafting, warm_up
from offload_rt.system.machine import MachineProfile, cards, memory_free, memory_limit
from offload_rt.system.threads import done_ahead
from offload_rt.system.trace import Trace
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.formats import dense
from offload_rt.weights.header import TensorRecord
from offload_rt.weights.layout import PackedLayer, host_block, repack

Progress = Callable[[int, int], None]


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


@dataclass(frozen=True)
class Engine:
    """A loaded model, ready to run, with its drafter, and what must be closed behind it.

    draft  the draft model, itself an engine without a drafter of its own
    """

    runner: Runner
    drafter: Drafter
    cost: CostEstimator
    host: HostTier
    resident: DeviceTier
    draft: Runner | None = None
    draft_layers: DeviceTier | None = None

    @property
    def streamer(self) -> Streamer:
        """What brings the layers."""
        return self.runner.streamer

    @property
    def notice(self) -> str:
        """What its user should know of how it runs; empty if nothing."""
        if not self.host.is_refused:
            return ""
        return (
            "the driver pins no more memory of the host: layers go through a few pinned slots, "
            "which costs CPU time and some speed; raise the limit of locked memory, or lower --host-memory"
        )

    def close(self) -> None:
        """End all transfers and release the weights."""
        for runner in filter(None, (self.runner, self.draft)):
            runner.drop_graphs()
        self.streamer.close()
        self.host.close()
        self.resident.close()
        if self.draft is not None:
            self.draft.streamer.close()
            self.draft_layers.close()


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
    names = [name for name, _ in spec.layer_tensors()]
    budget = memory_budget(config, device)
    target = Sizes.of_checkpoint(checkpoint, dtype)
    draft = drafting.draft and Sizes.of_checkpoint(drafting.draft, drafting.draft.layers[0][0].torch_dtype())
    disk = DiskTier(checkpoint.layers, names)
    try:
        target = replace(target, layer_nbytes=tuple(disk.layout(i).nbytes for i in range(spec.n_layers)))
        fitted = plan_memory(config, drafting, (target, draft), dtype, budget)
        if fitted.plan.count("disk"):
            disk = _tuned(disk, checkpoint, names)
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
    Raises LinkError if a weight cannot be read.
    """
    plan, disk, checkpoint, draft = (
        engine_plan.plan,
        engine_plan.disk,
        engine_plan.checkpoint,
        engine_plan.drafting.draft,
    )
    in_memory = [i for i, name in enumerate(plan.tiers) if name != "disk"]
    n_bytes = plan.reserved.non_layer + sum(disk.nbytes(i) for i in in_memory)
    meter = _Meter(n_bytes + (draft.nbytes if draft else 0), progress)
    resident, host, draft_layers = DeviceTier(), HostTier(register=engine_plan.device.type == "cuda"), DeviceTier()
    with ExitStack() as opened:
        opened.callback(host.close)
        if engine_plan.device.type == "cuda":
            _cap_device_memory(plan.budget.device, engine_plan.device)
        place = Placing(engine_plan.device, engine_plan.dtype)
        non_layer = _load_non_layer(checkpoint, place, meter)
        _fill({"device": resident, "host": host}, engine_plan, meter)
        streamed = tuple({"device": None, "host": host, "disk": disk}[name] for name in plan.tiers)
        runner = _runner(place, checkpoint, LayerSources(resident, streamed, plan.n_slots), non_layer, trace)
        opened.callback(runner.streamer.close)
        draft_runner = _load_draft(engine_plan, draft, draft_layers, meter, trace) if draft else None
        if draft_runner is not None:
            opened.callback(draft_runner.streamer.close)
        if engine_plan.device.type == "cuda":
            _capture_passes(engine_plan, runner, draft_runner)
        engine = _with_drafter(engine_plan, runner, (host, resident), draft_runner, draft_layers, trace)
        opened.pop_all()  # from here on they are the engine's to close
        return engine


def _cap_device_memory(nbytes: int, device: torch.device) -> None:
    """Let torch take no more than the budget, so that a larger card behaves as a smaller one."""
    _, all_of_card = torch.cuda.mem_get_info(device)
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
    place: Placing, checkpoint: Checkpoint, sources: LayerSources, non_layer: dense.View, trace: Trace
) -> Runner:
    open_streamer = stream_cuda.open_streamer if place.device.type == "cuda" else stream_threads.open_streamer
    streamer = open_streamer(sources, trace, place.device)
    return Runner(checkpoint.spec, streamer, non_layer, dense.View, place, trace)


def _load_draft(
    engine_plan: EnginePlan, draft: Checkpoint, layers: DeviceTier, meter: "_Meter", trace: Trace
) -> Runner:
    """The draft model, all of it on the device, in its own dtype."""
    disk = DiskTier(draft.layers, [name for name, _ in draft.spec.layer_tensors()])
    try:
        for i in range(draft.spec.n_layers):
            layers.put(i, _on(engine_plan.device, _read(disk, i, engine_plan.device, meter)))
    finally:
        disk.close()
    place = Placing(engine_plan.device, draft.layers[0][0].torch_dtype())
    non_layer = _load_non_layer(draft, place, meter)
    # Its passes are in the trace as levels of a tree; layer by layer they would fill it.
    return _runner(place, draft, LayerSources(layers, (None,) * draft.spec.n_layers, 0), non_layer, Trace(on=False))


def _with_drafter(
    engine_plan: EnginePlan,
    runner: Runner,
    tiers: tuple[HostTier, DeviceTier],
    draft: Runner | None,
    draft_layers: DeviceTier,
    trace: Trace,
) -> Engine:
    drafting, limits, moved = engine_plan.drafting, engine_plan.limits, engine_plan.plan.pass_bytes
    if limits.n_nodes == 1:
        machine = MachineProfile("not measured", False, (("disk", 1.0), ("host", 1.0)), 1.0)
    else:
        warm_up(drafting.rule)
        machine = profile.pass_profile(runner, moved, (limits.n_nodes, engine_plan.max_model_len))
    cost = CostEstimator(machine, moved)
    model, pair_stats = None, PairStats()
    if draft is not None:
        model = DraftModel(draft, runner.spec.vocab_size, limits.n_levels, trace)
        pair_stats = PairStats.load(engine_plan.checkpoint.identity, drafting.draft.identity)
    parts = DraftParts(limits, cost, drafting.child_sampling, model, pair_stats)
    return Engine(runner, drafting.type.open(parts), cost, *tiers, draft, draft_layers)


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
        name = checkpoint.spec.dtype_name or str(checkpoint.layers[0][0].torch_dtype()).removeprefix("torch.")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}[
        name
    ]


def memory_budget(config: EngineConfig, device: torch.device) -> MemoryBudget:
    """The settings, or what is free, less a margin. Raises CapacityError for more than there is."""
    spare = less_margin(memory_free())
    if device.type == "cpu":
        return MemoryBudget(_within(config.device_memory, "--device-memory", spare, memory_limit()))
    torch.cuda.empty_cache()  # what an engine that was closed has left to torch is free as well
    on_card, all_of_card = torch.cuda.mem_get_info(device)
    return MemoryBudget(
        _within(config.device_memory, "--device-memory", less_margin(on_card), all_of_card),
        _within(config.host_memory, "--host-memory", spare, memory_limit()),
        LIBRARIES,
        has_card=True,
    )


def _within(asked: int | None, flag: str, default: int, limit: int) -> int:
    if asked is not None and asked > limit:
        raise CapacityError(
            f"{flag} is more than there is", need=f"{asked} bytes", have=f"{limit}", change=f"lower {flag}"
        )
    return default if asked is None else asked


def _tuned(disk: DiskTier, checkpoint: Checkpoint, names: list[str]) -> DiskTier:
    settings = profile.read_settings(checkpoint.layers, names)
    disk.close()
    return DiskTier(checkpoint.layers, names, settings)


def _read(disk: DiskTier, i: int, device: torch.device, meter: _Meter) -> PackedLayer:
    """Layer i in memory of the host: as it lies in the file where a CPU computes, packed for a GPU."""
    image = PackedLayer(host_block(disk.layout(i).nbytes), disk.layout(i))
    read_parallel(disk.reads(i, image.block), disk.n_parallel, meter)
    return image if device.type == "cpu" else repack(image)


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


def _load_non_layer(checkpoint: Checkpoint, place: Placing, meter: _Meter) -> dense.View:
    tier = DiskTier([checkpoint.non_layer], [name for name, _ in checkpoint.spec.non_layer_tensors()])
    try:
        image = _on(place.device, _read(tier, 0, place.device, meter))
    finally:
        tier.close()
    return dense.View(image.layout, image.block, place.dtype)
