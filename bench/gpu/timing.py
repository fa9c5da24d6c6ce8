"""Seconds of work on a card."""

from collections.abc import Callable

import torch

from bench.measure import Spread

CARD = torch.device("cuda", 0)

# Calls between two events, so that the cost of launching the first does not count.
_N_CALLS = 20


def seconds(work: Callable[[], object], repeats: int = 10, warm_up: int = 3) -> Spread:
    """Seconds of one call on the card: the mean of several in a row, `repeats` times after `warm_up` times."""
    taken = []
    for i in range(warm_up + repeats):
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        for _ in range(_N_CALLS):
            work()
        ended.record()
        ended.synchronize()
        if i >= warm_up:
            taken.append(started.elapsed_time(ended) / 1e3 / _N_CALLS)
    return Spread.of(taken)


def in_turn(works: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, Spread]:
    """Seconds of several, interleaved."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        seconds(work, repeats=1, warm_up=1)
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(seconds(work, repeats=1, warm_up=0).median)
    return {name: Spread.of(times) for name, times in taken.items()}


def device_gbps(nbytes: int = 2 << 30) -> float:
    """GB/s of a copy on the card, counting bytes read and written."""
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=CARD) for _ in range(2))
    return 2 * nbytes / seconds(lambda: target.copy_(source)).median / 1e9
