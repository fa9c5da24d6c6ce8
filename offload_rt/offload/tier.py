"""Interface of memory tiers, and parallel reads by threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Protocol, TypeVar

from torch import Tensor

from offload_rt.system.numa import Cpus, stay_near
from offload_rt.weights.layout import Layout

# Fills its part of a block and returns the bytes that crossed the link.
Read = Callable[[], int]
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
    progress: Callable[[int], None] | None = None,
    cpus: Cpus = frozenset(),
) -> int:
    """Run reads in parallel threads; return the bytes that crossed the link.

    progress  receives the bytes of each finished read
    cpus      CPU affinity of the threads; empty for any
    An error cancels waiting reads. All reads have ended on return, and the error is raised.
    """
    moved = 0
    with ThreadPoolExecutor(n_parallel, "reads", stay_near, (cpus,)) as pool:
        try:
            for task in as_completed([pool.submit(read) for read in reads]):
                moved += task.result()
                if progress:
                    progress(task.result())
        finally:
            pool.shutdown(cancel_futures=True)  # also after Ctrl-C: the caller frees the block
    return moved


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
