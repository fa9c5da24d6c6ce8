"""Seconds of work on a card."""

from collections.abc import Callable

import torch

from bench.common.measure import Spread

CARD = torch.device("cuda", 0)

# Calls in one graph, so that the launch of the first does not count.
_N_CALLS = 20


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """Capture calls of some work as one CUDA graph, so that the host's launches do not count.
    Return its replay.
    """
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_N_CALLS):
            work()
    return graph.replay


def seconds(work: Callable[[], object], repeats: int = 10, warm_up: int = 3) -> Spread:
    """Measure seconds of one call on the card: the mean of a captured sequence, `repeats` times
    after `warm_up` times.
    """
    replay = captured(work)
    return Spread.of([_seconds(replay) for _ in range(warm_up + repeats)][warm_up:])


def in_turn(replays: dict[str, Callable[[], None]], rounds: int = 5) -> dict[str, Spread]:
    """Measure seconds of one call of each captured work, interleaved, after a first round that does
    not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(1 + rounds):
        for name, replay in replays.items():
            taken[name].append(_seconds(replay))
    return {name: Spread.of(times[1:]) for name, times in taken.items()}


def _seconds(replay: Callable[[], None]) -> float:
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    started.record()
    replay()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1e3 / _N_CALLS


def device_gbps(nbytes: int = 2 << 30) -> float:
    """GB/s of a kernel that reads and writes as many bytes; copies in graphs are slower."""
    source, target = (torch.randn(nbytes // 4, device=CARD) for _ in range(2))
    return 2 * nbytes / seconds(lambda: torch.neg(source, out=target)).median / 1e9
