"""Measured ceilings of a CPU: the float32 multiply-add rate of all cores, and the read rate of its memory."""

import time
from collections.abc import Callable

import torch

from offload_rt.engine.profile import beyond_caches

_SIDE, _N_TIMES = 1024, 8


def fma_gflops() -> float:
    """Best float32 rate in GFLOP/s, an addition and a multiplication counted separately.

    Stand-in: a square product of MKL that stays in the caches. It reaches about 95 % of the units' rate.
    """
    a, b = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
    return 2 * _SIDE**3 / _least_s(lambda: torch.mm(a, b)) / 1e9


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
