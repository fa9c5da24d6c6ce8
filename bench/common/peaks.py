"""Measured ceilings of a CPU: float32 multiply-add rate and memory read rate."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from bench.common.measure import timed
from offload_rt.engine.profile import beyond_caches
from offload_rt.ops import cpu

_N_FMA = 2_000_000
_N_TIMES = 8


def fma_gflops() -> float:
    """Return the best float32 GFLOP/s of all threads, by multiply-adds in registers."""
    library = cpu.library()
    assert library is not None, "a C++ compiler builds it"
    n_threads = torch.get_num_threads()
    n_flops = [0.0] * n_threads

    def run(i: int) -> None:
        n_flops[i] = library.offload_rt_fma_rate(_N_FMA, ctypes.byref(ctypes.c_double()))

    with ThreadPoolExecutor(n_threads) as pool:
        seconds = _least_s(lambda: list(pool.map(run, range(n_threads))))
    return sum(n_flops) / seconds / 1e9


def read_gbps() -> float:
    """Return the best read rate beyond the caches, of a maximum and a dot product.

    MKL's matrix-vector product reaches half of this rate on an EPYC 9004.
    """
    numbers = torch.ones(beyond_caches(torch.device("cpu")) // 4)
    seconds = min(_least_s(numbers.max), _least_s(lambda: torch.dot(numbers, numbers)))
    return numbers.nbytes / seconds / 1e9


def _least_s(work: Callable[[], object]) -> float:
    """Return the minimum seconds of several repetitions, as disturbances only add time."""
    return min(timed(work) for _ in range(_N_TIMES))
