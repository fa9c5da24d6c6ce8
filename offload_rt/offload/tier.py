"""What every memory tier offers, and reading from one with threads."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from torch import Tensor

from offload_rt.system.numa import Cpus, stay_near
from offload_rt.weights.layout import Layout

# Fills its own part of a block and returns how many bytes crossed the link.
Read = Callable[[], int]
Progress = Callable[[int], None]
_T = TypeVar("_T")


class Tier(Protocol):
    """Layers kept somewhere, each one block.

    n_parallel  reads that should be under way at once to keep the link full
    """

    n_parallel: int

    def layout(self, i: int) -> Layout:
        """How block i lies in memory after it has been read."""

    def reads(self, i: int, into: Tensor) -> list[Read]:
        """Independent reads that together fill `into` with block i; each raises LinkError if it cannot.

        into  (>= layout(i).nbytes,) uint8, beginning on a page
        """

    def close(self) -> None:
        """Release memory and files."""


def read_parallel(
    reads: Sequence[Read], n_parallel: int, progress: Progress | None = None, cpus: Cpus = frozenset()
) -> int:
    """Do reads with several under way at once; returns the bytes that crossed the link, raises an error of one of them.

    progress  told the bytes of each read that has ended, from the thread that did it
    cpus      processors that the threads stay on; empty: any
    Leaves no read under way; starts none after an error.
    """
    waiting, is_over = iter(reads), threading.Event()

    def work() -> int:
        moved = 0
        try:
            for read in waiting:  # shared: each thread takes the next one
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
            return sum(task.result() for task in [pool.submit(work) for _ in range(min(n_parallel, len(reads)))])
        finally:
            is_over.set()  # also where Ctrl-C came: nobody may go on writing into a block that its owner gives up


def done_ahead(works: Iterable[Callable[[], _T]], name: str) -> Generator[_T, None, None]:
    """The results of some works in their order, each done in a thread while the one before it is used.

    Raises what a work raised in its turn. Holds no result that it has given away; once closed, leaves no work under way.
    """
    with ThreadPoolExecutor(1, name) as pool:
        coming: deque[Future[_T]] = deque()
        for work in works:
            coming.append(pool.submit(work))
            if len(coming) > 1:
                yield coming.popleft().result()
        if coming:
            yield coming.popleft().result()
