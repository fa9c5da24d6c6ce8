"""Measurements of the machine: disk read settings, transfer rates, compute times."""

import hashlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from copy import copy
from functools import partial
from itertools import cycle, islice, pairwise, takewhile
from operator import itemgetter
from statistics import median
from typing import Any

import numpy as np
import torch

from offload_rt.cost.pass_times import ComputeTimes, MachineProfile, PassBytes
from offload_rt.cost.tree_size import ExpertsBias
from offload_rt.executor.runner import Runner
from offload_rt.executor.step import Step
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.memory import pinned_block
from offload_rt.offload.streamer import LayerView
from offload_rt.offload.tier import Tier, read_parallel
from offload_rt.ops.linear import linear
from offload_rt.parallel.model_part import ModelPart
from offload_rt.system.files import read_cached, write_cached
from offload_rt.system.machine import cache_nbytes, memory_free
from offload_rt.tree.topology import Topology
from offload_rt.weights.layout import BlockRecord, host_block

_CANDIDATES = (
    ReadSettings(1 << 20, 4),
    ReadSettings(4 << 20, 2),
    ReadSettings(512 << 10, 8),
    ReadSettings(2 << 20, 4),
)
_ROUNDS = 3
_PASSES = "passes.json"
_PASSES_VERSION = 8
# Rows of timed passes. CPU products compute groups of four and eight rows: nine take as long as 13.
_WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
_REPEATS = 2
_EXPERTS = "experts.json"
# Maximum seconds of adjacent layers in a measurement: the call of a slower layer does not count.
_RUN_S = 0.05
# Cached times are measured again if they differ from the current time by this factor.
_STALE = 1.3
# A setting replaces the first only if faster by this factor: less is noise on a shared disk.
_MARGIN = 1.05


def read_settings(layers: Sequence[BlockRecord]) -> ReadSettings:
    """Return the fastest read settings for these blocks, measured once per disk and cached."""
    disk = str(layers[0].tensors[0].path.stat().st_dev)
    return ReadSettings(*remembered("disk.json", 1, disk, partial(_measure_settings, layers[:2])))


def remembered(file: str, version: int, key: str, measure: Callable[[], Any]) -> Any:
    """Return a measured value from a file of the cache, measured if absent."""
    known = read_cached(file, version)
    if key not in known:
        known[key] = measure()
        write_cached(file, version, known)
    return known[key]


def processor() -> tuple[object, ...]:
    """Return the processor and its threads, for keys of cached measurements."""
    return platform.machine(), platform.processor(), os.cpu_count(), torch.get_num_threads()


def link_gbps(tier: Tier, n_layers: int, seconds: float = 0.5) -> float:
    """Measure the GB/s of a tier by reading whole blocks in turn for about `seconds`."""
    block = host_block(max(tier.layout(i).nbytes for i in range(n_layers)))
    started = time.perf_counter()
    nbytes = 0
    for i in cycle(range(n_layers)):
        nbytes += read_parallel(tier.reads(i, block), tier.n_parallel)
        elapsed = time.perf_counter() - started
        if elapsed >= seconds:
            break
    return nbytes / elapsed / 1e9


def beyond_caches(device: torch.device) -> int:
    """Return a size far above the device's caches, at most a quarter of the free memory."""
    if device.type == "cuda":
        # the L2 cache of an RTX 4090 has 72 MB
        return min(1 << 30, torch.cuda.mem_get_info(device)[0] // 4)
    return min(max(256 << 20, 4 * cache_nbytes()), memory_free() // 4)


def memory_gbps(dtype: torch.dtype, device: torch.device, n_rows: int = 1) -> float:
    """Measure the GB/s of reading a matrix in a product with `n_rows` vectors."""
    width = 4096
    height = beyond_caches(device) // dtype.itemsize // width // n_rows
    matrix = torch.ones(height, width, dtype=dtype, device=device)
    vectors = torch.ones(n_rows, width, dtype=dtype, device=device)
    return matrix.nbytes / median(timed(device, lambda: linear(vectors, matrix))) / 1e9


def upload_gbps(device: torch.device, nbytes: int = 256 << 20) -> float:
    """Measure the GB/s of copies from pinned host memory to a GPU."""
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    with pinned_block(nbytes, device) as source:
        return nbytes / min(timed(device, lambda: target.copy_(source, non_blocking=True))) / 1e9


def timed(device: torch.device, work: Callable[[], object], n_times: int = 3) -> list[float]:
    """Measure the seconds of each repetition after a warm-up, by events on a GPU."""
    seconds = []
    for _ in range(1 + n_times):
        if device.type == "cuda":
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - started)
    return seconds[1:]


def pass_profile(
    runner: Runner, moved: PassBytes, rows: tuple[int, int], disk: Tier | None = None
) -> MachineProfile:
    """Measure the cost of passes of a loaded model.

    Compute times are cached per machine, model and dtype. The link is measured in each run.
    rows  maximum rows of a pass, and maximum context
    disk  files of the layers, to measure a disk that holds only KV rows or experts
    """
    # Adjacent layers are one call unless they are streamed.
    is_streamed = bool(runner.streamer.order)
    stored = (runner.format.name, runner.format.arithmetic)
    model = (runner.spec, *stored, runner.dtype, str(runner.device), rows, is_streamed)
    key = _hashed(*processor(), torch.__version__, *model)
    known = read_cached(_PASSES, _PASSES_VERSION)
    seconds = tuple(map(tuple, known.get(key, ())))
    compute = ComputeTimes(*_grid(*rows), seconds)
    if not seconds or not runner.do(_still_holds, compute):
        compute = runner.do(compute_times, *rows)
        write_cached(_PASSES, _PASSES_VERSION, {**known, key: compute.seconds})
    streamed = {tier for tier, nbytes in moved.streamed if nbytes}
    other_tiers = {part.tier for part in (moved.rows, moved.experts) if part is not None}
    rate = disk_rate = 0.0
    if streamed:
        rate = runner.do(_arrival_gbps, max(nbytes for _, nbytes in moved.streamed))
    if disk is not None and other_tiers and (not rate or moved.disk_experts is not None):
        disk_rate = link_gbps(disk, runner.spec.n_layers)
    if other_tiers and not rate:
        rate = upload_gbps(runner.device) if runner.device.type == "cuda" else disk_rate
    links = dict.fromkeys(sorted(streamed | other_tiers), rate)
    if moved.disk_experts is not None:
        links["disk"] = disk_rate
    compute_gbps = moved.computed / compute.seconds[0][0] / 1e9
    if not links:
        compute = runner.overlap(compute)
    return MachineProfile(tuple(links.items()), compute_gbps, 0.0, compute)


def experts_bias(target: str, n_slots: int, closes: ExitStack) -> ExpertsBias:
    """Read the cached statistics of a checkpoint with `n_slots` slots; `closes` saves them."""
    key = _hashed(target, n_slots)
    counts = read_cached(_EXPERTS, 1).get(key)
    bias = ExpertsBias.restore(*counts) if counts else ExpertsBias()

    closes.callback(
        lambda: write_cached(_EXPERTS, 1, read_cached(_EXPERTS, 1) | {key: bias.counts()})
    )
    return bias


def _hashed(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _arrival_gbps(runner: Runner, nbytes: int, n_layers: int = 4) -> float:
    """Measure the GB/s of streaming `nbytes` bytes of all layers without computation.

    The host clock measures, because a meter of events lags behind on a GPU. The first layers may
    have been prefetched, so they do not count.
    """
    order = runner.streamer.order
    seconds = 0.0
    if order:
        n_prefetched = min(3, len(order) - 1)
        moments = [_now(runner)]
        with closing(runner.streamer.sweep()) as sweep:
            streamed = (block for block in sweep if block.i in order)
            moments += [_now(runner) for _ in islice(streamed, n_prefetched + n_layers)]
        timed_s = max(moments[-1] - moments[n_prefetched], 1e-9)
        seconds = timed_s * len(order) / (len(moments) - 1 - n_prefetched)
    return nbytes / runner.sum_over_stages(seconds) / 1e9


def _grid(n_rows: int, max_context: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    widths = {1, *(n for n in _WIDTHS if n < n_rows), n_rows}
    return tuple(sorted(widths)), (min(64, max_context), max(min(max_context, 2048), 65))


def _still_holds(runner: Runner, compute: ComputeTimes) -> bool:
    width = compute.widths[:2][-1]
    context = compute.contexts[0]
    (now,) = seconds_of_passes(runner, [(width, context)])
    return 1 / _STALE < now / float(compute.at(np.array([width]), context)[0]) < _STALE


def compute_times(runner: Runner, n_rows: int, max_context: int) -> ComputeTimes:
    """Time passes of several widths, at a short and a long context.

    The time of attention is linear in width and context. The long context therefore needs only the
    smallest and the largest width.
    """
    widths, contexts = _grid(n_rows, max_context)
    ends = widths[0], widths[-1]
    passes = [(width, contexts[0]) for width in widths] + [(width, contexts[1]) for width in ends]
    *short, first, last = seconds_of_passes(runner, passes)
    more = np.interp(widths, ends, (first - short[0], last - short[-1]))
    long = (np.array(short) + np.maximum(more, 0)).tolist()
    return ComputeTimes(widths, contexts, (tuple(short), tuple(long)))


def seconds_of_passes(runner: Runner, passes: Sequence[tuple[int, int]]) -> list[float]:
    """Measure the seconds of passes without waits for layers.

    Captured passes are replayed. Otherwise the first layers of each kind are measured and
    multiplied.
    passes  rows and previous context of each pass
    """
    seconds = [0.0] * len(passes)
    spec = runner.spec
    cache = runner.new_cache(max(map(sum, passes)) + 1, is_alone=True)
    # Two kinds: layers with and without experts. Later layers may depend on state of earlier
    # layers, and cannot run alone.
    mixed = spec.mixture.layers if spec.mixture else ()
    kinds = [i in mixed for i in range(spec.n_layers)]
    first_layers = {kinds.index(kind): kinds.count(kind) for kind in set(kinds)}
    for i, n_alike in first_layers.items():
        # Without streaming, adjacent layers are one call.
        alike = takewhile(kinds[i].__eq__, kinds[i:])
        n_adjacent = 1 if runner.streamer.order else len(list(alike))
        is_last = i == max(first_layers)
        with closing(runner.streamer.sweep()) as sweep:
            blocks = list(islice(sweep, i, i + n_adjacent))
            # Prefetches of further layers would compete for the processors of a CPU.
            runner.streamer.park()
            # The largest passes come first: they warm up the machine for the shortest.
            for at, (width, context) in sorted(enumerate(passes), key=itemgetter(1), reverse=True):
                # Room for the root and one level: learned position tables end at max_positions.
                n_before = min(context, spec.max_positions - 2)
                runner.assume_context(cache, n_before)
                # Different tokens, because a mixture routes them to different experts.
                tokens = torch.arange(width) % spec.vocab_size
                step = Step(cache, tokens, Topology.star(width), width, n_before)
                if runner.replay is None:
                    layer_s, head_s = _seconds_of_parts(runner, blocks[:1], step)
                    n = runner.least_of_ranks(min(int(_RUN_S / layer_s), n_adjacent))
                    if n > 1:
                        layer_s = _seconds_of_parts(runner, blocks[:n], step)[0] / n
                    seconds[at] += n_alike * layer_s + is_last * head_s
                elif is_last:
                    seconds[at] = _seconds_replayed(runner, step)
    runner.free_cache(cache)
    return [runner.sum_over_stages(pass_s) for pass_s in seconds]


def _seconds_replayed(runner: Runner, step: Step) -> float:
    moments = []
    for _ in range(_REPEATS + 3):  # the first pass is eager, the second is captured
        moments.append(_now(runner))
        runner.forward([step])
        runner.discard(step.cache)
    return min(after - before for before, after in pairwise(moments[2:]))


@torch.inference_mode()
def _seconds_of_parts(runner: Runner, blocks: list[LayerView], step: Step) -> list[float]:
    best = [float("inf"), float("inf")]
    alone = copy(runner)
    if isinstance(runner.spec, ModelPart):
        alone.spec = runner.spec.alone()
    for _ in range(_REPEATS):
        hidden, chunks = alone.embed(*alone.upload([step]))
        moments = [_now(runner)]
        alone.layers(blocks, hidden, chunks)
        moments.append(_now(runner))
        alone.logits(hidden, [step])
        moments.append(_now(runner))
        best = [min(old, b - a) for old, (a, b) in zip(best, pairwise(moments), strict=True)]
    return best


def _now(runner: Runner) -> float:
    runner.finish()
    return time.perf_counter()


def _measure_settings(layers: Sequence[BlockRecord]) -> tuple[int, int]:
    rates: dict[ReadSettings, list[float]] = {settings: [] for settings in _CANDIDATES}
    with ExitStack() as closes:
        tiers = [closes.enter_context(closing(DiskTier(layers, how))) for how in _CANDIDATES]
        numbers = range(len(layers))
        block = host_block(max(tier.layout(i).nbytes for tier in tiers for i in numbers))
        for tier in tiers * _ROUNDS:
            started = time.perf_counter()
            nbytes = sum(read_parallel(tier.reads(i, block), tier.n_parallel) for i in numbers)
            rates[tier.settings].append(nbytes / (time.perf_counter() - started))
    best = max(rates, key=lambda settings: median(rates[settings]))
    if median(rates[best]) <= _MARGIN * median(rates[_CANDIDATES[0]]):
        best = _CANDIDATES[0]
    return best.request_nbytes, best.n_parallel
