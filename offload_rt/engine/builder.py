"""Building the parts of an engine from its settings: what is planned, and what is loaded by the plan."""

import os
import platform
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

import torch

from offload_rt.config import EngineConfig
from offload_rt.engine import profile
from offload_rt.engine.engine import Engine
from offload_rt.engine.link import Link, choose_link
from offload_rt.engine.memory_plan import LIBRARIES, READ_BUFFERS, MemoryPlan, Sizes, less_margin, plan_memory
from offload_rt.engine.scheduler import Scheduler
from offload_rt.errors import CapacityError, DeviceError, SettingsError
from offload_rt.executor.cost import CostEstimator
from offload_rt.executor.cuda_graphs import CudaCapture, GraphShape
from offload_rt.executor.runner import Runner
from offload_rt.models.architecture import Architecture
from offload_rt.models.heads import Head
from offload_rt.offload import stream_cuda, stream_threads
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.far_rows import FileRows, HostRows
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.placement import MemoryBudget, Plan, with_host_slots
from offload_rt.offload.sidecar import SidecarTier
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.streamer import LayerSources
from offload_rt.offload.tier import done_ahead, read_parallel
from offload_rt.speculate.draft_model import ROWS_PER_NODE, SelfDraftModel, draft_rows
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.protocols import Drafter, DraftParts
from offload_rt.speculate.select import Drafting
from offload_rt.system.machine import MachineProfile, cards, memory_free, memory_limit
from offload_rt.system.numa import Cpus, cpus_near
from offload_rt.system.trace import Trace
from offload_rt.weights import int4
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.formats import WeightFormat
from offload_rt.weights.header import TensorRecord
from offload_rt.weights.layout import PAGE, PackedLayer, align_up, host_block
from offload_rt.weights.lossless import EncodedImage, EncodedLayer, decoded_layout, encode_layer

Progress = Callable[[int, int], None]

# Spent at most on capturing passes of a model before its first one.
_CAPTURING_S = 1.0

# Of a token that the target has drafted by a part of its cache, before any was seen: .79 to .84 was published for 512 rows of
# 4,000 to 100,000 (MagicDec).
_SELF_ACCEPTANCE = 0.8

_REFUSED = (
    "the driver pins no more memory of the host: layers go through a few pinned slots, "
    "which costs CPU time and some speed; raise the limit of locked memory, or lower --host-memory"
)


@dataclass(frozen=True)
class EnginePlan(MemoryPlan):
    """All that is decided before a weight moves.

    disk    the target's layers, opened
    link    how those that are streamed come
    notice  what the user should know of device and weights; empty if nothing
    """

    checkpoint: Checkpoint
    drafting: Drafting
    device: torch.device
    dtype: torch.dtype
    disk: DiskTier | SidecarTier
    link: Link
    notice: str


def pick_device(name: str) -> torch.device:
    """The device of a setting. Raises DeviceError if it is cuda and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        need = "a CUDA device that torch can use"
        raise DeviceError("--device cuda", need=need, have=_why_no_card(), change="use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    _expand_segments()
    return torch.device("cuda", torch.cuda.current_device())


def _expand_segments() -> None:
    """Let torch's blocks on the card grow, unless the user has set the allocator's variable or CUDA has begun.

    Otherwise what is left between blocks of varying sizes counts against a tight cap. Not in WSL, where the driver refuses
    such memory (pytorch/pytorch 192330).
    """
    has_begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types there
    is_set = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if not (has_begun or is_set or "microsoft" in platform.release().lower()):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _why_no_card() -> str:
    """What torch says of a card that it cannot use: no driver, one that is too old, a build without CUDA."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch gives it no types
    except (RuntimeError, AssertionError) as error:
        return f"none ({str(error).splitlines()[0].split('. ')[0].rstrip('.')})"
    return "none"


def _notice(asked: str, device: torch.device) -> str:
    """Says so where a card is there and a CPU computes although nobody asked for it."""
    found = cards() if asked == "auto" and device.type == "cpu" else []
    if not found:
        return ""
    return f"computing on the CPU: there is a {found[0]}, but torch can use {_why_no_card()}; --device cpu if that is meant"


def _kv_notice(plan: Plan) -> str:
    """Says so where the output is not exactly the model's."""
    if plan.split is None or not plan.split.format.is_fp8:
        return ""
    return f"keys and values on the {plan.kv_tier} are rounded to fp8: the output is not exactly the model's"


def plan_engine(config: EngineConfig, checkpoint: Checkpoint, drafting: Drafting) -> EnginePlan:
    """Decide where everything goes. Raises CapacityError if it cannot go anywhere."""
    device = pick_device(config.device)
    if device.type == "cpu" and config.host_memory is not None:
        problem = "--host-memory is for pinned memory beside a GPU"
        raise SettingsError(problem, change="on a CPU, set --device-memory alone")
    dtype = _pick_dtype(config.dtype, checkpoint)
    budget = memory_budget(config, device)
    link = choose_link(config, checkpoint, device)
    disk: DiskTier | SidecarTier = DiskTier(checkpoint.layers)
    try:
        draft = _draft_sizes(checkpoint, drafting, dtype, device)
        layer_nbytes = tuple(disk.layout(i).nbytes for i in range(checkpoint.spec.n_layers))
        packed = tuple(align_up(decoded_layout(layer).nbytes, PAGE) for layer in checkpoint.layers)
        if device.type == "cuda" or link.sizes:  # also packed; only slots on the host hold layers as they lie in files
            layer_nbytes = tuple(map(max, layer_nbytes, packed))
        if link.encodes:  # a layer is read whole before it is encoded
            budget = replace(budget, buffers=budget.buffers + max(packed))
        target = replace(Sizes.of_checkpoint(checkpoint, dtype), layer_nbytes=layer_nbytes, link=link.sizes)
        memory = plan_memory(config, drafting, (target, draft), dtype, budget)
        _check_resident(memory.plan, drafting)
        if link.encodes and memory.plan.tiers.count("disk"):
            raise CapacityError(
                "layers that stay on the disk are not encoded as they are loaded",
                have=f"{memory.plan.tiers.count('disk')} of them",
                change="run offload-rt convert first, raise --host-memory, or use --link-format raw",
            )
        reads_disk = "disk" in memory.plan.pass_bytes.at(memory.max_model_len)
        if reads_disk or link.sidecar:
            settings = profile.read_settings(checkpoint.layers) if reads_disk else disk.settings
            disk.close()
            decodes = device.type == "cpu"
            disk = (
                SidecarTier(link.sidecar, settings, decodes) if link.sidecar else DiskTier(checkpoint.layers, settings)
            )
    except BaseException:
        disk.close()
        raise
    of_weights = checkpoint.format.notice, checkpoint.spec.notice, link.notice
    notices = (_notice(config.device, device), *of_weights, _kv_notice(memory.plan))
    return EnginePlan(
        memory.plan, memory.limits, memory.max_model_len, memory.cache_rows, memory.view_rows,
        checkpoint, drafting, device, dtype, disk, link,
        "\n".join(filter(None, notices)),
    )  # fmt: skip


def _draft_sizes(checkpoint: Checkpoint, drafting: Drafting, dtype: torch.dtype, device: torch.device) -> Sizes | None:
    """Of what drafts: another model, or copies of the target's layers; None where neither does."""
    if drafting.draft is not None:
        return Sizes.of_checkpoint(drafting.draft, drafting.draft_dtype(dtype))
    if not drafting.type.drafts_by_copy:
        return None
    if checkpoint.format.name != "dense":
        have, change = f"weights of format {checkpoint.format.name}", "leave it out, or give a draft model"
        raise SettingsError(f"--drafter {drafting.name}", need="unquantised weights", have=have, change=change)
    spec, view_nbytes = checkpoint.spec, Sizes.of_checkpoint(checkpoint, int4.DTYPE).view_nbytes
    stand_in = max(int4.copy_layout(decoded_layout(layer), device).nbytes for layer in checkpoint.layers)
    return Sizes(spec, (0,) * spec.n_layers, 0, int4.DTYPE, view_nbytes, stand_in)


def _check_resident(plan: Plan, drafting: Drafting) -> None:
    """Raises CapacityError where the target is to draft itself and its layers do not stay: a draft would take a whole pass."""
    n_streamed = len(plan.tiers) - plan.tiers.count("device")
    if drafting.type.view is not None and n_streamed:
        raise CapacityError(
            f"--drafter {drafting.name}", need="all layers on the device", have=f"{n_streamed} of {len(plan.tiers)} elsewhere",
            change="raise --device-memory, or use another drafter",
        )  # fmt: skip


def _open_files(checkpoint: Checkpoint, settings: ReadSettings, device: torch.device) -> DiskTier:
    """Layers and the rest of a model, to be read to where they stay: as they lie in the file for a CPU, packed for a GPU."""
    return DiskTier([*checkpoint.layers, checkpoint.non_layer], settings, packed=device.type == "cuda")


def load(engine_plan: EnginePlan, trace: Trace, progress: Progress | None = None) -> Engine:
    """Load what the plan keeps in memory, start the streamer, and measure what passes cost where a drafter asks.

    progress  told (bytes so far, bytes in all) while loading, from several threads
    Raises LinkError if a weight cannot be read. The plan's files are closed with the engine, or here where loading fails.
    """
    plan, disk, device = engine_plan.plan, engine_plan.disk, engine_plan.device
    checkpoint, draft = engine_plan.checkpoint, engine_plan.drafting.draft
    with ExitStack() as closes, ExitStack() as loading:
        closes.callback(disk.close)
        if device.type == "cuda":
            closes.callback(torch.cuda.empty_cache)
            _cap_device_memory(plan.budget.device, device, closes)
            _sum_in_float32(closes)
        host = closes.enter_context(closing(MemoryTier(register=device.type == "cuda")))
        models = (checkpoint,) if draft is None else (checkpoint, draft)
        files = [loading.enter_context(closing(_open_files(one, disk.settings, device))) for one in models]
        sources = {"device": files[0], "host": disk if engine_plan.link.sidecar else files[0]}
        n_bytes = sum(sources[name].nbytes(i) for i, name in enumerate((*plan.tiers, "device")) if name != "disk")
        n_bytes += sum(files[1].nbytes(i) for i in range(draft.spec.n_layers + 1)) if draft else 0
        loader = _Loader(device, host, _Meter(n_bytes, progress), closes, cpus_near(device))
        capture, n_nodes = CudaCapture() if device.type == "cuda" else None, engine_plan.limits.n_nodes
        # Passes of a draft are in the trace as levels of a tree; layer by layer they would fill it.
        draft_runner, untraced = None, Trace(on=False)
        if draft is not None:
            draft_dtype = engine_plan.drafting.draft_dtype(engine_plan.dtype)
            draft_runner = loader.runner(
                draft.spec, draft.format, draft_dtype, loader.sources(draft, files[1]), untraced
            )
        target = loader.sources(checkpoint, files[0], engine_plan)
        if engine_plan.drafting.type.drafts_by_copy:
            copies = loader.copies(target, files[0])
            draft_runner = loader.runner(checkpoint.spec, int4.Format(), int4.DTYPE, copies, untraced)
        # Before the streamer of the target begins to copy. Hidden states that go from row to row have no fixed addresses: the
        # one layer of a head runs as it is.
        if draft_runner is not None and not draft_runner.spec.taps and capture is not None:
            n_keys = draft_rows(engine_plan.max_model_len, n_nodes)
            draft_runner.use_graphs(GraphShape(n_nodes, n_keys, ROWS_PER_NODE * n_nodes), capture, _CAPTURING_S)
        runner = loader.runner(checkpoint.spec, checkpoint.format, engine_plan.dtype, target, trace, engine_plan)
        if draft_runner is not None and isinstance(draft_runner.spec, Head):
            runner.taps, draft_runner.taps = draft_runner.spec.taps, (1,)
            draft_runner.non_layer = draft_runner.spec.weights_beside(draft_runner.non_layer, runner.non_layer, device)
        if capture is not None and plan.is_resident:
            # Where the target drafts itself, its passes have the rows of trees under way.
            n_tree_rows = n_nodes if engine_plan.drafting.type.view is None else ROWS_PER_NODE * n_nodes
            runner.use_graphs(GraphShape(n_nodes, engine_plan.cache_rows, n_tree_rows), capture, _CAPTURING_S)
        drafter, cost = _open_drafter(engine_plan, runner, draft_runner, trace)
        scheduler = Scheduler(engine_plan.cache_rows, engine_plan.limits.n_nodes, plan.split)
        notice, rule = _REFUSED if host.is_refused else "", engine_plan.drafting.rule
        return Engine(runner, drafter, rule, cost, trace, scheduler, closes.pop_all(), draft_runner, notice)


def _cap_device_memory(nbytes: int, device: torch.device, closes: ExitStack) -> None:
    """Let torch take no more than the budget until `closes`, so that a larger card behaves as a smaller one."""
    _, all_of_card = torch.cuda.mem_get_info(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    closes.callback(torch.cuda.set_per_process_memory_fraction, before, device)
    torch.cuda.set_per_process_memory_fraction(min(nbytes / all_of_card, 1.0), device)


def _sum_in_float32(closes: ExitStack) -> None:
    """Let cuBLAS add the parts of a product in float32 until `closes`; by default it may round them to 16 bits before."""
    products = torch.backends.cuda.matmul
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        closes.callback(setattr, products, name, getattr(products, name))
        setattr(products, name, False)


def _open_drafter(
    engine_plan: EnginePlan, runner: Runner, draft: Runner | None, trace: Trace
) -> tuple[Drafter, CostEstimator]:
    drafting, limits, moved = engine_plan.drafting, engine_plan.limits, engine_plan.plan.pass_bytes
    if limits.n_nodes == 1:
        machine = MachineProfile("not measured", False, (("disk", 1.0), ("host", 1.0)), 1.0)
    else:
        split, longest = engine_plan.plan.split, engine_plan.max_model_len - 2
        if split is not None:  # computing is timed with all rows on the device
            longest = min(longest, split.n_on_device - limits.n_nodes - 1)
        disk = engine_plan.disk if engine_plan.device.type == "cpu" else None
        machine = profile.pass_profile(runner, moved, (limits.n_nodes, longest), disk)
    view, n_levels = drafting.type.view, limits.n_levels
    draft_nbytes = (
        drafting.draft.nbytes if drafting.draft else runner.spec.n_layers * engine_plan.plan.reserved.stand_in
    )
    cost = CostEstimator(machine, moved, draft_nbytes, drafting.view_rows or None)
    model, small, pair_stats, target = None, None, PairStats(), engine_plan.checkpoint.identity
    if draft is not None:
        model = drafting.type.model(draft, runner.spec.vocab_size, n_levels, trace, drafting.type.draft_context)
        pair_stats = PairStats.load(target, drafting.draft.identity if drafting.draft else int4.Format.name)
    if view is not None:
        small, model = model, SelfDraftModel(runner, n_levels, trace, view, drafting.view_rows, engine_plan.view_rows)
        pair_stats = PairStats.load(target, f"{drafting.name} {drafting.view_rows}", _SELF_ACCEPTANCE)
    parts = DraftParts(limits, cost, drafting.child_sampling, drafting.rule.coupled_up_to, model, small, pair_stats)
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


@dataclass(frozen=True)
class _Loader:
    """Loads models for a device.

    host    takes the layers that stay in memory of the host
    closes  releases what is opened here
    cpus    processors near the device; empty: all are
    """

    device: torch.device
    host: MemoryTier
    meter: _Meter
    closes: ExitStack
    cpus: Cpus

    def sources(self, checkpoint: Checkpoint, files: DiskTier, streamed: EnginePlan | None = None) -> LayerSources:
        """A model read from `files`: its layers, then the rest. All lies on the device, or where a plan says."""
        n, blocks = checkpoint.spec.n_layers, [*checkpoint.layers, checkpoint.non_layer]
        resident = self.closes.enter_context(closing(MemoryTier()))
        tiers = streamed.plan.tiers if streamed else ("device",) * n

        def work(tier: str, i: int) -> Callable[[], PackedLayer]:
            if streamed and tier == "host" and streamed.link.encodes:
                return partial(self._encode, files, i, streamed.plan.host_slot_nbytes)
            source = streamed.disk if streamed and tier == "host" and streamed.link.sidecar else files
            return partial(self._read, source, i, self._new_block(tier, source.layout(i).nbytes))

        self._fill({"device": resident, "host": self.host}, list(zip((*tiers, "device"), blocks, strict=True)), work)
        return self._sources(resident, streamed) if streamed else LayerSources(resident, (None,) * n, 0)

    def copies(self, sources: LayerSources, files: DiskTier) -> LayerSources:
        """The resident layers of a model in `files` and the rest of it, and small copies of its streamed layers."""
        resident = self.closes.enter_context(closing(MemoryTier()))
        for i, tier in enumerate((*sources.streamed, None)):
            if tier is None:
                resident.put(i, sources.resident.image(i))
                continue
            layer = tier.image(i) if isinstance(tier, MemoryTier) else None
            if layer is None or isinstance(layer, EncodedImage):
                layer = self._read(files, i, host_block(files.layout(i).nbytes))
            resident.put(i, int4.packed(layer, self.device))
        return LayerSources(resident, (None,) * len(sources.streamed), 0)

    def runner(
        self,
        spec: Architecture,
        format: WeightFormat,
        dtype: torch.dtype,
        sources: LayerSources,
        trace: Trace,
        streamed: EnginePlan | None = None,
    ) -> Runner:
        """A model whose weights are there; what lies outside of its layers is behind them in the resident tier."""
        n, rest = spec.n_layers, sources.resident.image(spec.n_layers)
        open_streamer = (stream_cuda if self.device.type == "cuda" else stream_threads).open_streamer
        streamer = open_streamer(sources, trace, self.device)
        runner = Runner(spec, streamer, format.view(rest.layout, rest.block, dtype), format, self.device, dtype, trace)
        self.closes.enter_context(closing(runner))
        if streamed and (split := streamed.plan.split) is not None:
            if isinstance(streamer, CudaStreamer):
                runner.far = HostRows(split, n, streamer, self.cpus)
            else:
                runner.far = FileRows(split, n, streamer, streamed.disk.settings)
        return runner

    def _sources(self, resident: MemoryTier, engine_plan: EnginePlan) -> LayerSources:
        """Where the layers of a plan are, which gives up layers on the host where the driver has refused to pin some."""
        plan, link = engine_plan.plan, engine_plan.link
        now = with_host_slots(plan) if self.host.is_refused else plan
        if link.encodes and now.tiers != plan.tiers:
            change = "run offload-rt convert first, or use --link-format raw"
            raise DeviceError("the driver pins too little memory of the host for layers encoded at load", change=change)
        for i, (before, after) in enumerate(zip(plan.tiers, now.tiers, strict=True)):
            if before != after:
                self.host.drop(i)
        streamed = tuple({"device": None, "host": self.host, "disk": engine_plan.disk}[name] for name in now.tiers)
        encoded: dict[int, EncodedLayer] = {}
        for i in (i for i, tier in enumerate(streamed) if tier is not None and self.device.type == "cuda"):
            image = self.host.image(i) if link.encodes else None
            if isinstance(image, EncodedImage):
                encoded[i] = image.encoded
            elif link.sidecar:
                encoded[i] = link.sidecar[i].encoded
        return LayerSources(resident, streamed, now.n_slots, now.n_host_slots, self.cpus, encoded)

    def _fill(
        self,
        to: dict[str, MemoryTier],
        blocks: list[tuple[str, tuple[TensorRecord, ...]]],
        work: Callable[[str, int], Callable[[], PackedLayer]],
    ) -> None:
        """Put each block, of a tier's name and its tensors, into its tier; the same bytes of a file are kept once.

        work  gives what brings a block to a tier, by the tier's name and the number of the block
        The next one is read while one is pinned.
        """
        same: dict[tuple[str, tuple[TensorRecord, ...]], list[int]] = {}
        for i, block in enumerate(blocks):
            if block[0] in to:
                same.setdefault(block, []).append(i)
        with closing(done_ahead((work(name, one[0]) for (name, _), one in same.items()), "loads")) as images:
            for (name, _), numbers in same.items():
                image = next(images)
                for i in numbers:
                    to[name].put(i, image)

    def _new_block(self, tier: str, nbytes: int) -> torch.Tensor:
        on_card = tier == "device" and self.device.type == "cuda"
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device) if on_card else host_block(nbytes)

    def _read(self, files: DiskTier | SidecarTier, i: int, block: torch.Tensor) -> PackedLayer:
        read_parallel(files.reads(i, block), files.n_parallel, self.meter, self.cpus)
        return PackedLayer(block, files.layout(i))

    def _encode(self, files: DiskTier, i: int, planned: int) -> PackedLayer:
        """A layer that is encoded once it is read. Raises CapacityError if it takes more than was planned."""
        image = encode_layer(self._read(files, i, host_block(files.layout(i).nbytes)), files.n_parallel)
        if len(image.block) > planned:
            raise CapacityError(
                f"layer {i} shrinks less than a sample of it", need=f"{len(image.block)} bytes", have=f"{planned} planned",
                change="run offload-rt convert first, or use --link-format raw",
            )  # fmt: skip
        return image


def _pick_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype:
    if name == "auto":
        name = checkpoint.spec.dtype_name or str(checkpoint.dtype).removeprefix("torch.")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def memory_budget(config: EngineConfig, device: torch.device) -> MemoryBudget:
    """The settings, or what is free, less a margin. Raises CapacityError for more than there is."""
    spare = less_margin(memory_free())
    if device.type == "cpu":
        return MemoryBudget(_within(config.device_nbytes, "--device-memory", spare, memory_limit()))
    torch.cuda.empty_cache()  # what an engine that was closed has left to torch is free as well
    on_card, all_of_card = torch.cuda.mem_get_info(device)
    of_card = _within(config.device_nbytes, "--device-memory", less_margin(on_card), all_of_card)
    of_host = _within(config.host_nbytes, "--host-memory", spare, memory_limit())
    return MemoryBudget(of_card, of_host, LIBRARIES, has_card=True, buffers=READ_BUFFERS)


def _within(asked: int | None, flag: str, default: int, limit: int) -> int:
    if asked is not None and asked > limit:
        need = f"{asked} bytes"
        raise CapacityError(f"{flag} is more than there is", need=need, have=str(limit), change=f"lower {flag}")
    return default if asked is None else asked
