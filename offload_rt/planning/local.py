"""Description of this machine by measurements."""

import math
import time
from dataclasses import replace
from functools import cache, partial
from statistics import median

import numpy as np
import psutil
import torch

from offload_rt.config import EngineConfig, format_size, parse_size
from offload_rt.cost.pass_times import DECODE_GBPS
from offload_rt.cost.roofline import Roof
from offload_rt.dtypes import DType
from offload_rt.engine import profile
from offload_rt.engine.device import memory_budget, pick_device
from offload_rt.engine.engine_spec import EngineSpec
from offload_rt.engine.memory_plan import less_margin, reserved_memory
from offload_rt.errors import CapacityError
from offload_rt.llm import LLM
from offload_rt.offload.placement import MemoryBudget, least_budget
from offload_rt.ops.dequantize import Weight
from offload_rt.ops.linear import linear
from offload_rt.planning.forecast import plain_config
from offload_rt.planning.machine import CPU_DECODE_GBPS, LEVEL_S, Machine
from offload_rt.system.machine import busy_cpus
from offload_rt.weights.formats import Matrix
from offload_rt.weights.layout import host_block, packed_layout

# Columns of the timed matrix, row counts, and seconds after which larger row counts are skipped.
_N_COLUMNS = 4096
_WIDTHS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_PATIENCE_S = 0.5
# Most bytes of resident weights that a plan reads to time them.
_READ_WHOLE = 2 << 30
# Timed passes of plain decoding.
_N_PLAIN = 16
# Bytes of timed quantised matrices. As a scale in any dtype they are a normal number.
_CODE = 0x3C
# Other programs that use a smaller share of the CPUs do not distort the rates.
_IDLE_SHARE = 0.1


def this_machine(
    config: EngineConfig, disk_gbps: float, disk_source: str, ram: str | None = None
) -> Machine:
    """Describe this machine; products are timed per dtype and quantised matrix, when needed.

    disk_source  origin of the disk's rate, in words
    ram          memory instead of this machine's: of the host, on a CPU of the whole run
    Raises CapacityError for a budget above the memory.
    """
    device = pick_device(config.device)
    host_gbps = profile.upload_gbps(device) if device.type == "cuda" else 1.0
    roof = cache(lambda dtype, matrix: measure_roof(dtype, device, matrix))
    n_cpus = psutil.cpu_count() or 1
    n_busy = busy_cpus()
    sources = ["compute: timed products", disk_source]
    if n_busy >= _IDLE_SHARE * n_cpus:
        load = f"other programs use {n_busy:.1f} of {n_cpus} CPUs"
        sources.append(f"{load}: the measured rates are too low")
    return Machine(
        title=f"this machine, {device.type}",
        budget=_budget(config, device, ram),
        links=(("disk", disk_gbps), ("host", host_gbps)),
        roof=roof,
        level_s=LEVEL_S if device.type == "cuda" else 0.0,
        decode_gbps=DECODE_GBPS if device.type == "cuda" else CPU_DECODE_GBPS,
        times_codes=device.type == "cpu",
        sources=tuple(sources),
    )


def with_measured_passes(machine: Machine, config: EngineConfig, spec: EngineSpec) -> Machine:
    """Measure passes of the target's local weights on a CPU, as a run does.

    A layer of each kind is read. Resident weights up to _READ_WHOLE are read whole: adjacent layers
    are faster than single ones, and whole passes show the time between passes.
    """
    target, memory = spec.target.sizes, spec.memory
    reserved = reserved_memory(target, None, target.dtype, False, memory.max_model_len, 1)
    is_whole = not memory.plan.streamed_nbytes and target.nbytes <= _READ_WHOLE
    budget = least_budget(target.layer_nbytes, reserved, target.link)
    lean = replace(
        plain_config(config), device_memory=config.device_memory if is_whole else budget,
        max_num_seqs=1, max_model_len=memory.max_model_len,
    )  # fmt: skip
    with LLM.open(lean) as llm:
        llm.load()
        rows = memory.limits.n_nodes, memory.max_model_len - 2
        measured = profile.pass_profile(llm.engine.runner, llm.spec.pass_bytes, rows)
        assert measured.compute is not None, "a profile of passes has their times"
        fixed_s = 0.0
        if is_whole:
            context = measured.compute.contexts[0]
            pass_s = median(llm.time_plain(context, _N_PLAIN))
            fixed_s = max(pass_s - float(measured.compute.at(np.array([1]), context)[0]), 0.0)
    sources = ("target: timed passes", *machine.sources)
    return replace(machine, passes=measured.compute, fixed_s=fixed_s, sources=sources)


def _budget(config: EngineConfig, device: torch.device, ram: str | None) -> MemoryBudget:
    if ram is None:
        return memory_budget(config, device)
    if device.type == "cuda":
        return memory_budget(replace(config, host_memory=ram), device)
    available = less_margin(parse_size(ram))
    if (config.device_nbytes or 0) > available:
        problem = f"--device-memory={config.device_memory}"
        need = f"at most {format_size(available)} of {ram}"
        raise CapacityError(problem, need=need, change="lower it, or raise --ram")
    return MemoryBudget(config.device_nbytes or available)


@torch.inference_mode()
def measure_roof(
    dtype: DType, device: torch.device, matrix: Matrix | tuple[int, int] | None = None
) -> Roof:
    """Measure products with increasing rows, for a second or two.

    matrix  quantised matrix, or shape of plain matrices; None for a large plain matrix
    """
    weights: list[Weight]
    if isinstance(matrix, Matrix):
        weights = _coded_weights(matrix, dtype)
    else:
        n_weights = profile.beyond_caches(device) // dtype.itemsize
        height, width = matrix or (n_weights // _N_COLUMNS, _N_COLUMNS)
        # Repeat a single row: generating a random matrix is slower than all products.
        row = torch.randn(1, width, device=device).to(dtype.torch)
        n_copies = max(n_weights // (height * width), 1)
        weights = [row.expand(height, width).contiguous() for _ in range(n_copies)]
    n_weights = sum(math.prod(weight.shape) for weight in weights)

    def multiply(rows: torch.Tensor) -> None:
        for weight in weights:
            linear(rows, weight)

    products: list[tuple[int, float]] = []
    started = time.perf_counter()
    for n_rows in _WIDTHS:
        rows = torch.randn(n_rows, weights[0].shape[1], device=device).to(dtype.torch)
        seconds = min(profile.timed(device, partial(multiply, rows), 2))
        products.append((n_rows, max(seconds / n_weights, products[-1][1] if products else 0.0)))
        if time.perf_counter() - started > _PATIENCE_S:
            break
    n_rows, seconds = products[-1]
    roof = Roof(2 * n_rows / seconds, dtype.itemsize / products[0][1], products=tuple(products))
    return roof.on_card() if device.type == "cuda" else roof


def _coded_weights(matrix: Matrix, dtype: DType) -> list[Weight]:
    """Return copies of a matrix on the CPU, together larger than the caches."""
    layout = packed_layout((part.name, part.shape, part.dtype or dtype) for part in matrix.tensors)
    n_copies = -(-profile.beyond_caches(torch.device("cpu")) // layout.nbytes)
    blocks = (host_block(layout.nbytes).fill_(_CODE) for _ in range(n_copies))
    return [matrix.weight(layout.views(block)) for block in blocks]
