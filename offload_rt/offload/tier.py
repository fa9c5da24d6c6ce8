"""Interface of memory tiers, and parallel reads by threads."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from torch import Tensor

from offload_rt.system.numa import Cpus, stay_near
from offload_rt.weights.layout import Layout

# Fills its part of a block and returns the bytes that crossed the link.
Read = Callable[[], int]
Progress = Callable[[int], None]
_T = TypeVar("_T")


class Tier(Protocol):
    """A store of layers, a block each; `n_parallel` reads saturate its link."""

    n_parallel: int

    def layout(self, i: int) -> Layout:
        """Return the memory layout of block i after reading."""

    def reads(self, i: int, into: Tensor) -> list[Read]:
        """Return reads that fill page-aligned bytes with block i, which may raise LinkError."""


def read_parallel(
    reads: Sequence[Read],
    n_parallel: int,
    progress: Progress | None = None,
    cpus: Cpus = frozenset(),
) -> int:
    """Run reads in parallel threads; return the bytes that crossed the link.

    progress  receives the bytes of each finished read, in its thread
    cpus      CPU affinity of the threads; empty for any
    After an error no further read starts. All reads have ended on return, and the error is raised.
    """
    waiting = iter(reads)
    is_over = threading.Event()

    def work() -> int:
        moved = 0
        try:
            for read in waiting:  # shared iterator
                if is_over.is_set():
                    break
                nbytes = read()
                moved += nbytes
                if progress:
                    progress(nbytes)
        except BaseException:
            is_over.set()
            raise
        return moved

    with ThreadPoolExecutor(n_parallel, "reads", stay_near, (cpus,)) as pool:
        try:
            tasks = [pool.submit(work) for _ in range(min(n_parallel, len(reads)))]
            return sum(task.result() for task in tasks)
        finally:
            is_over.set()  # also after Ctrl-C: the caller frees the block


def done_ahead(works: Iterable[Callable[[], _T]], name: str) -> Generator[_T, None, None]:
    """Yield results of functions in order; a thread computes each during use of the previous.

    Errors are raised in order. No yielded result is retained. Closing waits for running functions.
    """
    with ThreadPoolExecutor(1, name) as pool:
        coming: deque[Future[_T]] = deque()
        for work in works:
            coming.append(pool.submit(work))
            if len(coming) > 1:
                yield coming.popleft().result()
        if coming:
            yield coming.popleft().result()
