"""What every memory tier offers."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from offload_rt.system.threads import Worker
from offload_rt.weights.layout import Layout, PackedLayer

# Fills its own part of a block and returns how many bytes crossed the link.
Read = Callable[[], int]
Progress = Callable[[int], None]


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


class Store(Tier, Protocol):
    """A tier that layers can be put into."""

    def put(self, i: int, image: PackedLayer) -> None:
        """Keep a layer."""


def read_parallel(reads: Sequence[Read], n_parallel: int, progress: Progress | None = None) -> int:
    """Do reads with several under way at once; returns the bytes that crossed the link, raises the first error.

    progress  told the bytes of each read that has ended, from the thread that did it
    """
    waiting, lock = list(reads)[::-1], threading.Lock()
    moved, errors = [], []

    def work() -> None:
        while not errors:
            with lock:
                if not waiting:
                    return
                part = waiting.pop()
            try:
                moved.append(part())
                if progress:
                    progress(moved[-1])
            except BaseException as error:  # raised again in the caller
                errors.append(error)

    # No daemons, which the interpreter would tear down in the middle of a read if Ctrl-C met this between two starts.
    threads = [Worker(work, f"reads-{i}") for i in range(min(n_parallel, len(reads)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: nobody may go on writing into a block that its owner gives up
        with lock:
            waiting.clear()
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise errors[0]
    if waiting:
        raise MemoryError("no thread could begin to read")
    return sum(moved)
