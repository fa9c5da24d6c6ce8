"""Waits of a small copy behind layers, on a fake GPU with one copy engine and its own clock."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bench.gpu import paced
from offload_rt.offload import copy_device
from offload_rt.offload.copy_device import CopyDevice

CHUNK = 8
N_CHUNKS = 6
N_LAYERS = 3


class Engine(TorchFunctionMode):
    """Simulate copies of all streams at one byte per second.

    The first ready copy is served first. A stream whose next copy is ready at the end of a copy
    continues.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.streams = 0, list[Stream]()
        self.current: Stream | None = None
        self.n_timing = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and self.current is not None:
            assert kwargs == {"non_blocking": True}
            self.current.work.append(("copy", args))
            return args[0]
        return func(*args, **(kwargs or {}))

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self, until: SimpleNamespace) -> None:
        """Run until a moment has passed or all work is done."""
        last: Stream | None = None
        while True:
            while any(stream.advance() for stream in self.streams):
                pass
            ready = [stream for stream in self.streams if stream.ready_at is not None]
            if not ready or until.at is not None:
                return
            last = last if last in ready else min(ready, key=lambda stream: stream.ready_at)
            target, source = last.work.popleft()[1]
            torch.Tensor.copy_(target, source)
            self.now += len(source)
            last.ready_at = None


class Stream:
    def __init__(self, engine: Engine) -> None:
        self.work: deque[tuple[str, Any]] = deque()
        self.ready_at: int | None = None
        self._engine = engine
        engine.streams.append(self)

    def wait_event(self, event: "Event") -> None:
        if event.moment is not None:
            self.work.append(("wait", event.moment))

    def advance(self) -> bool:
        """Go on to the next copy; return whether a moment has passed."""
        n_before = len(self.work)
        while self.work and self.work[0][0] != "copy":
            kind, moment = self.work[0]
            if kind == "wait" and moment.at is None:
                return len(self.work) < n_before
            moment.at = self._engine.now if moment.at is None else moment.at
            self.work.popleft()
        if self.work and self.ready_at is None:
            self.ready_at = self._engine.now
        return len(self.work) < n_before


class Event:
    def __init__(self, engine: Engine, enable_timing: bool = False, blocking: bool = False) -> None:
        self.moment: SimpleNamespace | None = None
        self._engine = engine
        self._blocking = blocking
        engine.n_timing += enable_timing

    def record(self, stream: Stream) -> None:
        self.moment = SimpleNamespace(at=None)
        stream.work.append(("record", self.moment))

    def synchronize(self) -> None:
        assert self._blocking, "a thread spins"
        assert self.moment is not None
        self._engine.run(self.moment)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with Engine() as made:
        monkeypatch.setattr(copy_device, "Stream", lambda device: Stream(made))
        monkeypatch.setattr(copy_device, "Event", lambda **how: Event(made, **how))
        monkeypatch.setattr(torch.cuda, "stream", made.on)
        yield made


def some_bytes(n: int) -> Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8)


def waited(engine: Engine, n: int = 1) -> Event:
    """An event after a copy of n bytes on a stream of its own."""
    compute = Stream(engine)
    done = Event(engine, blocking=True)
    with engine.on(compute):
        torch.zeros(n).copy_(torch.ones(n), non_blocking=True)
    done.record(compute)
    return done


def test_small_copy_waits_for_one_chunk_on_two_streams(engine):
    device = CopyDevice(torch.device("cuda"), CHUNK)
    after = device.event()
    n = CHUNK * N_CHUNKS
    layers = [(torch.zeros(n, dtype=torch.uint8), some_bytes(n)) for _ in range(N_LAYERS)]
    for layer in layers:
        start, after = device.copy([layer], after)
    n_timing = engine.n_timing
    small = waited(engine)
    small.synchronize()
    assert small.moment.at <= CHUNK + 1
    device.synchronize()
    assert all(torch.equal(*layer) for layer in layers)
    assert n_timing == 1 + 2 * N_LAYERS, "timing events are of layers, not of chunks"
    # The link is never idle while a chunk is left, and events stand where a layer begins and ends.
    assert engine.now == N_LAYERS * n + 1
    assert (start.moment.at, after.moment.at) == (engine.now - n, engine.now)


def test_paced_link_takes_longer_per_chunk(engine, monkeypatch):
    """A kernel spins during a copy; the next chunk waits for it on the other stream."""
    monkeypatch.setattr(paced, "spin_cycles_per_byte", lambda device: 1.0)
    sleep = lambda n: engine.current.work.append(("copy", (torch.zeros(n), torch.zeros(n))))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    device = paced.PacedDevice(torch.device("cuda"), CHUNK)
    target = torch.zeros(CHUNK * N_CHUNKS, dtype=torch.uint8)
    source = some_bytes(CHUNK * N_CHUNKS)
    start, end = device.copy([(target, source)], device.event())
    device.wait(end)
    assert torch.equal(target, source) and end.moment.at - start.moment.at == 2 * CHUNK * N_CHUNKS


def test_copies_wait_for_their_event_and_keep_order(engine):
    """Of tensors of any length; a slot that is still computed from is not written to."""
    device = CopyDevice(torch.device("cuda"), CHUNK)
    slot = torch.zeros(30, dtype=torch.uint8)
    first, second = some_bytes(30), some_bytes(30)
    start, _ = device.copy([(slot[:3], first[:3]), (slot[3:], first[3:])], waited(engine, 100))
    _, end = device.copy([(slot, second)], device.event())
    device.wait(end)
    assert start.moment.at == 100 and end.moment.at == 160
    assert torch.equal(slot, second)
