"""Threads, and waiting for them, that neither Ctrl-C at any moment nor the end of memory can bring to a standstill.

Of `threading` only `Lock` serves the main thread. `Condition` and `Event` are Python: where an interrupt meets the last step
of their `__enter__`, the lock is taken and nobody will give it back. A `with` of a lock written in C has no such moment.
"""

import _thread
import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

# A bell may stay silent where an interrupt or the end of memory meets the one who rings: who waits looks again after this.
_LOOK_S = 0.2

_T = TypeVar("_T")
_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


class Monitor:
    """A lock for a state, and a way to wait for a change of it.

    lock  held by whoever reads or changes the state
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._bells: set[_thread.LockType] = set()

    def ring(self) -> None:
        """Let all who wait look again; called with the lock held."""
        while self._bells:
            self._bells.pop().release()

    def wait_for(self, look: Callable[[], _T]) -> _T:
        """What `look`, called with the lock held, finds as soon as it is true."""
        bell = threading.Lock()
        bell.acquire()
        while True:
            with self.lock:
                if found := look():
                    self._bells.discard(bell)
                    return found
                self._bells.add(bell)
            bell.acquire(timeout=_LOOK_S)


class _Life:
    """The argument of a thread's function. Nothing else holds it: it goes with the thread, even with one that never began."""


class Worker:
    """A thread whose `start` and `join` end, and whose `join` may be interrupted and called again.

    `threading.Thread` does not serve. Its `start` waits for ever for a thread that memory ran out for as it began. And in
    Python 3.11 an interrupted `join` takes a thread that is still running for one that has ended: where such a one is in the
    middle of an op of torch when the interpreter goes, the process ends by abort().

    target  catches what it raises
    daemon  True: somebody else sees to its end before the interpreter goes
    """

    def __init__(self, target: Callable[[], None], name: str, daemon: bool = False) -> None:
        self.name, self.daemon = name, daemon
        self._target = target
        # Taken until then.
        self._begun, self._over = threading.Lock(), threading.Lock()
        self._begun.acquire()
        self._over.acquire()
        self._life: weakref.ref[_Life] | None = None
        _workers.add(self)

    def start(self) -> None:
        """Begin; raises RuntimeError or MemoryError where there is no memory for a thread."""
        # On no frame of ours, where the traceback of a failure would keep it.
        _thread.start_new_thread(self._run, self._new_life())
        while not self._begun.acquire(timeout=_LOOK_S):
            if not self.is_alive():
                raise MemoryError("a thread could not begin")

    def is_alive(self) -> bool:
        """Whether it has been started and has not ended."""
        return self._life is not None and self._life() is not None and self._over.locked()

    def join(self) -> None:
        """Wait for the end; one that was not started has ended."""
        while self.is_alive():
            if self._over.acquire(timeout=_LOOK_S):
                self._over.release()

    def _new_life(self) -> tuple[_Life]:
        life = _Life()
        self._life = weakref.ref(life)
        return (life,)

    def _run(self, life: _Life) -> None:
        try:
            self._begun.release()
            self._target()
        finally:
            # Most often a method of the worker's owner, which would be held until Python looks for circles.
            self._target = _nothing
            self._over.release()


def _nothing() -> None:
    """What is left to do for a thread that has ended."""


def done_ahead(works: Iterable[Callable[[], _T]], name: str) -> Iterator[_T]:
    """The results of some works in their order, each done in a thread while the one before it is used.

    Raises what a work raised in its turn. Holds no result that it has given away; once closed, leaves no work under way.
    """
    coming: _Task[_T] | None = None
    ready: list[_T] = []
    try:
        for work in works:
            if coming is not None:
                ready.append(coming.take())
            coming = _Task(work, name)
            coming.start()
            if ready:
                yield ready.pop()
        if coming is not None:
            yield coming.take()
    finally:
        if coming is not None:
            coming.join()


class _Task(Worker, Generic[_T]):
    """Work whose result somebody waits for."""

    def __init__(self, work: Callable[[], _T], name: str) -> None:
        super().__init__(self._do, name)
        self._work = work
        self._found: list[_T] = []
        self._error: BaseException | None = None

    def _do(self) -> None:
        try:
            self._found.append(self._work())
        except BaseException as error:  # raised again by take
            self._error = error

    def take(self) -> _T:
        """Wait for the result and give it away; raises what the work raised."""
        self.join()
        if self._error is not None:
            raise self._error
        if not self._found:
            raise MemoryError("a thread came to nothing")
        return self._found.pop()


def at_work() -> set[Worker]:
    """The workers that have been started and have not ended."""
    return {worker for worker in _workers if worker.is_alive()}


@atexit.register
def _wait_for_the_rest() -> None:
    for worker in at_work():
        if not worker.daemon:
            worker.join()
