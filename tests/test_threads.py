"""Threads that are still running when Ctrl-C comes while somebody waits for them."""

import _thread
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest

from offload_rt.cli.process import _Signals
from offload_rt.errors import LinkError
from offload_rt.offload.tier import read_parallel
from offload_rt.system.threads import Monitor, Worker, at_work, done_ahead


class _CtrlC(KeyboardInterrupt):
    pass


def _no_memory(*_: object) -> None:
    raise MemoryError


def _in_vain(timeout: float) -> bool:
    time.sleep(timeout)
    return False


@pytest.fixture(autouse=True)
def _as_in_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", _Signals()._unraisable)


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Interrupts the main thread, from another."""

    def raise_it(*_: object) -> None:
        raise _CtrlC

    before = signal.signal(signal.SIGALRM, raise_it)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


def test_a_join_that_was_interrupted_waits_when_it_is_called_again(interrupt: Callable[[], None]) -> None:
    go_on, ended = threading.Event(), []
    worker = Worker(lambda: ended.append(go_on.wait(10)), "waits")
    worker.start()
    with pytest.raises(_CtrlC):
        threading.Timer(0.05, interrupt).start()
        worker.join()
    assert worker.is_alive()
    threading.Timer(0.1, go_on.set).start()
    worker.join()
    assert ended == [True]


def test_a_worker_that_was_not_started_is_not_waited_for() -> None:
    Worker(lambda: None, "idle").join()


def test_a_worker_that_died_before_it_began_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "_run", _no_memory)
    worker = Worker(lambda: None, "dies")
    with pytest.raises(MemoryError):
        worker.start()
    worker.join()
    assert not worker.is_alive()


def test_a_worker_that_memory_runs_out_for_at_its_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(lambda: None, "ends badly")
    monkeypatch.setattr(worker, "_over", SimpleNamespace(locked=lambda: True, acquire=_in_vain, release=_no_memory))
    worker.start()
    worker.join()
    assert not worker.is_alive()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError("no memory for its state")])
def test_a_worker_without_a_thread_has_ended(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: object, lives: object) -> None:
        del run, lives  # as C does, whose frames are not in a traceback
        raise error

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    worker = Worker(lambda: None, "refused")
    with pytest.raises(type(error)) as held:
        worker.start()
    worker.join()
    assert held


_LEFT = """
import time
from offload_rt.system.threads import Worker
Worker(lambda: (time.sleep(0.5), print("read")), "reads").start()
"""


def test_the_interpreter_waits_for_a_worker() -> None:
    assert subprocess.run([sys.executable, "-c", _LEFT], capture_output=True, text=True, check=True).stdout == "read\n"


def test_reads_that_no_thread_took_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "start", lambda worker: None)
    with pytest.raises(MemoryError):
        read_parallel([lambda: 1], 2)


def test_no_interrupt_leaves_a_monitor_locked(interrupt: Callable[[], None]) -> None:
    monitor, moments = Monitor(), random.Random(0)
    for _ in range(2000):
        with pytest.raises(_CtrlC):
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, 2e-4))
            while True:
                monitor.wait_for(lambda: True)
                with monitor.lock:
                    monitor.ring()
        assert monitor.lock.acquire(timeout=1)
        monitor.lock.release()


def test_who_waits_is_told_and_leaves_no_bell() -> None:
    monitor, ready, found = Monitor(), [], []
    workers = [Worker(lambda: found.append(monitor.wait_for(lambda: ready)), f"waits-{i}") for i in range(3)]
    for worker in workers:
        worker.start()
    assert not found
    started = time.perf_counter()
    with monitor.lock:
        ready.append(7)
        monitor.ring()
    for worker in workers:
        worker.join()
    assert found == [[7]] * 3
    assert not monitor._bells
    assert time.perf_counter() - started < 30


def test_who_waits_looks_again_where_no_bell_rings() -> None:
    monitor, ready = Monitor(), []
    threading.Timer(0.05, ready.append, (1,)).start()
    assert monitor.wait_for(lambda: ready)


def test_no_read_goes_on_after_interrupted_ones(interrupt: Callable[[], None]) -> None:
    begun, ended = [], []

    def read(seconds: float) -> int:
        begun.append(1)
        if len(begun) == 3:
            interrupt()
        time.sleep(seconds)
        ended.append(1)
        return 1

    with pytest.raises(_CtrlC):
        read_parallel([partial(read, seconds) for seconds in (0.9, *[0.5] * 8)], 3)
    assert len(ended) == 3
    time.sleep(0.3)
    assert len(ended) == 3


def test_an_interrupt_between_two_starts_leaves_no_read_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, start = [], Worker.start

    def interrupted(worker: Worker) -> None:
        if worker.name == "reads-2":
            raise _CtrlC
        start(worker)

    def read() -> int:
        time.sleep(0.1)
        ended.append(1)
        return 1

    monkeypatch.setattr(Worker, "start", interrupted)
    with pytest.raises(_CtrlC):
        read_parallel([read] * 9, 4)
    assert len(ended) == 2
    time.sleep(0.2)
    assert len(ended) == 2


def test_works_are_done_one_ahead_and_in_order() -> None:
    begun: list[int] = []

    def work(i: int) -> int:
        begun.append(i)
        return i

    for i, found in enumerate(done_ahead((partial(work, i) for i in range(5)), "works")):
        while len(begun) < min(i + 2, 5):
            time.sleep(0.001)
        assert found == i
        assert len(begun) == min(i + 2, 5)
    assert list(done_ahead([], "works")) == []


def test_a_result_that_was_given_away_is_held_by_nobody() -> None:
    for found in done_ahead([_Held] * 3, "works"):
        held = weakref.ref(found)
        del found
        assert held() is None


class _Held:
    pass


def test_a_worker_that_has_ended_holds_nobody() -> None:
    """Its owner holds it, and it would hold its owner: a circle."""

    class Owner:
        def __init__(self) -> None:
            self.worker = Worker(self.work, "works")

        def work(self) -> None:
            pass

    owner = Owner()
    held = weakref.ref(owner)
    owner.worker.start()
    owner.worker.join()
    del owner
    until = time.monotonic() + 5
    while held() is not None and time.monotonic() < until:  # its thread has one step left
        time.sleep(0.001)
    assert held() is None


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_work_that_fails_is_raised_in_its_turn(at: int) -> None:
    def work(i: int) -> int:
        if i == at:
            raise LinkError("the disk has gone")
        return i

    found = []
    with pytest.raises(LinkError):
        for one in done_ahead((partial(work, i) for i in range(3)), "works"):
            found.append(one)
    assert found == list(range(at))


def test_no_work_goes_on_once_nobody_wants_it() -> None:
    ended, before = [], at_work()

    def work() -> int:
        time.sleep(0.1)
        ended.append(1)
        return 1

    results = done_ahead([work] * 4, "works")
    next(results)
    results.close()
    assert len(ended) == 2
    assert at_work() == before


def test_a_work_that_came_to_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "start", lambda worker: None)
    with pytest.raises(MemoryError):
        list(done_ahead([lambda: 1], "works"))
