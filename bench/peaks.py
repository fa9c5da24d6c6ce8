"""Measured ceilings of a CPU: the float32 multiply-add rate of all cores, and the read rate of its
memory.
"""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from offload_rt.engine.profile import beyond_caches
from offload_rt.ops import cpu

_N_FMA = 2_000_000
_N_TIMES = 8


def fma_gflops() -> float:
    """Best float32 rate of all threads in GFLOP/s: independent multiply-adds in registers, two
    operations each.
    """
    library = cpu.library()
    assert library is not None, "a C++ compiler builds it"
    n_threads = torch.get_num_threads()
    n_flops = [0.0] * n_threads

    def run(i: int) -> None:
        n_flops[i] = library.offload_rt_fma_rate(
            _N_FMA, ctypes.byref(ctypes.c_double()), cpu.level()
        )

    with ThreadPoolExecutor(n_threads) as pool:
        seconds = _least_s(lambda: list(pool.map(run, range(n_threads))))
    return sum(n_flops) / seconds / 1e9


def read_gbps() -> float:
    """Best rate of reading float32 numbers beyond the caches, by a maximum and by a dot product.

    A product with one vector is no measure: MKL's reaches half of this rate on an EPYC 9004.
    """
    numbers = torch.ones(beyond_caches(torch.device("cpu")) // 4)
    seconds = min(_least_s(numbers.max), _least_s(lambda: torch.dot(numbers, numbers)))
    return numbers.nbytes / seconds / 1e9


def _least_s(work: Callable[[], object]) -> float:
    """Least seconds of several repetitions: every disturbance adds."""
    seconds = []
    for _ in range(_N_TIMES):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
