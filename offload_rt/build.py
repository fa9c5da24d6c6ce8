"""Building the parts of an engine from its settings: what is planned, and what is loaded by the plan."""

import math
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload_rt import calibrate, plugins
from offload_rt.config import EngineConfig
from offload_rt.engine.loop import Drafter, Rule
from offload_rt.engine.runner import CHUNK_ROWS, Placing, Runner
from offload_rt.errors import CapacityError, DeviceError, SettingsError
from offload_rt.machine import memory_free, memory_limit
from offload_rt.models._spec import ModelSpec
from offload_rt.stream._streamer import Streamer, Supply
from offload_rt.tiers._placement import Budgets, Need, Plan, least_budget, place
from offload_rt.tiers._tier import read_parallel
from offload_rt.tiers.device import DeviceTier
from offload_rt.tiers.disk import DiskTier
from offload_rt.tiers.host import HostTier
from offload_rt.trace import Trace
from offload_rt.weights import dense
from offload_rt.weights._checkpoint import Checkpoint
from offload_rt.weights._image import LayerImage, host_block, repack

# Part of the free memory that is left to others, and at least so many bytes of it.
_MARGIN, _LEAST_MARGIN = 0.05, 256 << 20
# Part of the budget that the default context may take.
_CACHE_SHARE = 1 / 8
# The default context is never shorter, however small the budget: a refusal is better than a model that forgets at once.
_SHORTEST_CONTEXT = 256

_STREAMERS = {"cpu": "threads", "cuda": "cuda"}

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Blueprint:
    """All that is decided before a weight moves.

    max_model_len  most tokens of a sequence
    cache_rows     rows of keys and values that the plan has room for
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    disk: DiskTier
    plan: Plan
    max_model_len: int
    cache_rows: int


@dataclass(frozen=True)
class Engine:
    """A loaded model, ready to run, and what must be closed behind it."""

    runner: Runner
    streamer: Streamer
    host: HostTier
    resident: DeviceTier


def pick_device(name: str) -> torch.device:
    """The device of a setting. Raises DeviceError if it is cuda and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "--device cuda", need="a CUDA device", have="none that torch can use", change="use --device cpu"
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def pick_drafter(config: EngineConfig) -> tuple[Drafter, Rule]:
    """Drafter and rule of the settings. Raises SettingsError for a combination that does not work."""
    name = "none" if config.drafter == "auto" else config.drafter
    module = plugins.find("drafters", name)
    if config.draft_model is not None and not module.NEEDS_MODEL:
        users = [other for other in plugins.names("drafters") if plugins.find("drafters", other).NEEDS_MODEL]
        raise SettingsError(
            "--draft-model",
            need="a drafter that uses one",
            have=", ".join(users) or "none in this version",
            change="leave it out",
        )
    rule = plugins.find("rules", module.BEST_RULE if config.rule == "auto" else config.rule)
    if rule.NEEDS_LAWS and not module.GIVES_LAWS:
        raise SettingsError(
            f"--rule {config.rule}", need="a drafter with probabilities", have=name, change="use --rule match"
        )
    return module.Drafter(), rule


def draw_up(config: EngineConfig, checkpoint: Checkpoint, drafter: Drafter) -> Blueprint:
    """Decide where everything goes. Raises CapacityError if it cannot go anywhere."""
    spec, device = checkpoint.spec, pick_device(config.device)
    if device.type == "cpu" and config.host_memory is not None:
        raise SettingsError(
            "--host-memory is for pinned memory beside a GPU", change="on a CPU, set --device-memory alone"
        )
    dtype = _pick_dtype(config.dtype, checkpoint)
    names = [name for name, _ in spec.layer_tensors()]
    budgets = _budgets(config, device)
    disk = DiskTier(checkpoint.layers, names)
    layer_nbytes = [disk.layout(i).nbytes for i in range(spec.n_layers)]

    def need(max_len: int) -> Need:
        return _need(checkpoint, dtype, max_len, drafter.max_nodes)

    try:
        max_len = _max_model_len(
            config, spec, dtype.itemsize, budgets.device, lambda n: least_budget(layer_nbytes, need(n))
        )
        plan = place(layer_nbytes, need(max_len), budgets)
        if plan.count("disk") and len(plan.tiers) > plan.count("device"):
            disk = _tuned(disk, checkpoint, names)
    except BaseException:
        disk.close()
        raise
    return Blueprint(checkpoint, device, dtype, disk, plan, max_len, _cache_rows(max_len, drafter.max_nodes))


def load(blueprint: Blueprint, trace: Trace, progress: Progress | None = None) -> Engine:
    """Load what the plan keeps in memory and start the streamer.

    progress  told (bytes so far, bytes in all) while loading, from several threads
    Raises LinkError if a weight cannot be read.
    """
    plan, disk, checkpoint = blueprint.plan, blueprint.disk, blueprint.checkpoint
    in_memory = [i for i, name in enumerate(plan.tiers) if name != "disk"]
    meter = _Meter(plan.need.outer + sum(disk.nbytes(i) for i in in_memory), progress)
    outer = _outer(checkpoint, blueprint.dtype, meter)
    resident, host = DeviceTier(), HostTier(register=blueprint.device.type == "cuda")
    try:
        for i in in_memory:
            tier = {"device": resident, "host": host}[plan.tiers[i]]
            tier.put(i, _read(disk, i, blueprint.device, plan.tiers[i], meter))
    except BaseException:
        host.close()
        raise
    streamed = tuple({"device": None, "host": host, "disk": disk}[name] for name in plan.tiers)
    supply = Supply(resident, streamed, plan.n_slots)
    streamer = plugins.find("stream", _STREAMERS[blueprint.device.type]).open_streamer(supply, trace, blueprint.device)
    runner = Runner(checkpoint.spec, streamer, outer, dense.View, Placing(blueprint.device, blueprint.dtype), trace)
    return Engine(runner, streamer, host, resident)


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


def _budgets(config: EngineConfig, device: torch.device) -> Budgets:
    free = memory_free()
    spare = max(free - max(int(free * _MARGIN), _LEAST_MARGIN), 0)
    if device.type == "cpu":
        return Budgets(_within(config.device_memory, "--device-memory", spare, memory_limit()))
    on_card, all_of_card = torch.cuda.mem_get_info(device)
    card = on_card - max(int(on_card * _MARGIN), _LEAST_MARGIN)
    return Budgets(
        _within(config.device_memory, "--device-memory", card, all_of_card),
        _within(config.host_memory, "--host-memory", spare, memory_limit()),
    )


def _within(asked: int | None, flag: str, default: int, limit: int) -> int:
    if asked is not None and asked > limit:
        raise CapacityError(
            f"{flag} is more than there is", need=f"{asked} bytes", have=f"{limit}", change=f"lower {flag}"
        )
    return default if asked is None else asked


def _max_model_len(
    config: EngineConfig, spec: ModelSpec, itemsize: int, budget: int, least: Callable[[int], int]
) -> int:
    """The setting, or the longest context whose cache takes its share of the budget and leaves room for the rest.

    least  the smallest budget that would do for a context
    """
    limit, asked = spec.max_positions, config.max_model_len
    if asked is not None and asked > limit:
        raise CapacityError("--max-model-len", need=str(asked), have=f"a model of {limit} positions", change="lower it")
    if asked is not None:
        return asked
    shortest = min(_SHORTEST_CONTEXT, limit)
    lengths = range(shortest, limit + 1)
    fits = bisect_right(lengths, budget, key=lambda n: max(least(n), int(n * spec.kv_nbytes(itemsize) / _CACHE_SHARE)))
    return max(shortest, shortest + fits - 1)


def _cache_rows(max_len: int, max_nodes: int) -> int:
    """Rows of one sequence of the longest kind: all its tokens but the last, and a tree."""
    return max_len - 1 + max_nodes


def _need(checkpoint: Checkpoint, dtype: torch.dtype, max_len: int, max_nodes: int) -> Need:
    """Bytes on the device besides layers, for sequences of up to `max_len` tokens and trees of up to `max_nodes`."""
    spec = checkpoint.spec
    hidden = 2 * (max_len + max_nodes) * spec.hidden_size * dtype.itemsize
    records = [record for records in (*checkpoint.layers, checkpoint.outer) for record in records]
    converted = max((math.prod(record.shape) for record in records if record.torch_dtype() != dtype), default=0)
    rows = min(CHUNK_ROWS, max_len + max_nodes)
    return Need(
        outer=sum(record.stop - record.start for record in checkpoint.outer),
        cache=_cache_rows(max_len, max_nodes) * spec.kv_nbytes(dtype.itemsize),
        scratch=hidden + converted * dtype.itemsize + spec.scratch_nbytes(rows, max_nodes, dtype.itemsize),
    )


def _tuned(disk: DiskTier, checkpoint: Checkpoint, names: list[str]) -> DiskTier:
    settings = calibrate.read_settings(checkpoint.layers, names)
    disk.close()
    return DiskTier(checkpoint.layers, names, settings)


def _read(disk: DiskTier, i: int, device: torch.device, tier: str, meter: _Meter) -> LayerImage:
    """Layer i in memory of its own: as it lies in the file on a CPU, packed for a GPU."""
    image = LayerImage(host_block(disk.layout(i).nbytes), disk.layout(i))
    read_parallel(disk.reads(i, image.block), disk.n_parallel, meter)
    if device.type == "cpu":
        return image
    image = repack(image)
    return LayerImage(image.block.to(device), image.layout) if tier == "device" else image


def _outer(checkpoint: Checkpoint, dtype: torch.dtype, meter: _Meter) -> dense.View:
    tier = DiskTier([checkpoint.outer], [name for name, _ in checkpoint.spec.outer_tensors()])
    try:
        block = host_block(tier.layout(0).nbytes)
        read_parallel(tier.reads(0, block), tier.n_parallel, meter)
    finally:
        tier.close()
    return dense.View(tier.layout(0), block, dtype)
