"""Waits of a small copy behind layers, on a fake GPU with one copy engine and its own clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
        self.now = self.n_timing = 0
        self.waiting = list[SimpleNamespace]()
        self.stream: Stream | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and self.stream is not None:
            assert kwargs == {"non_blocking": True}
            self.enqueue(*args)
            return args[0]
        return func(*args, **(kwargs or {}))

    def enqueue(self, target: Tensor, source: Tensor) -> None:
        copy = SimpleNamespace(
            target=target, source=source, stream=self.stream, after=self.stream.before, end=None
        )
        self.stream.before = [copy]
        self.waiting.append(copy)

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def run(self) -> None:
        stream = None
        while ready := [copy for copy in self.waiting if ends(copy.after) is not None]:
            ready.sort(key=lambda copy: (copy.stream is not stream, ends(copy.after)))
            copy = ready[0]
            torch.Tensor.copy_(copy.target, copy.source)
            self.now += len(copy.source)
            copy.end = self.now
            stream = copy.stream
            self.waiting = [other for other in self.waiting if other is not copy]


def ends(copies: list[SimpleNamespace]) -> int | None:
    """Return when all copies have ended; None while one waits."""
    times = [copy.end for copy in copies]
    return None if None in times else max(times, default=0)


class Stream:
    def __init__(self) -> None:
        self.before = list[SimpleNamespace]()

    def wait_event(self, event: "Event") -> None:
        self.before = [*self.before, *event.after]


class Event:
    def __init__(self, engine: Engine, enable_timing: bool = False, blocking: bool = False) -> None:
        self.after = list[SimpleNamespace]()
        self._engine = engine
        self._blocking = blocking
        engine.n_timing += enable_timing

    @property
    def at(self) -> int | None:
        return ends(self.after)

    def record(self, stream: Stream) -> None:
        self.after = stream.before

    def synchronize(self) -> None:
        assert self._blocking, "a thread spins"
        self._engine.run()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with Engine() as made:
        monkeypatch.setattr(copy_device, "Stream", lambda device: Stream())
        monkeypatch.setattr(copy_device, "Event", lambda **how: Event(made, **how))
        monkeypatch.setattr(torch.cuda, "stream", made.on)
        yield made


def some_bytes(n: int) -> Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8)


def waited(engine: Engine, n: int = 1) -> Event:
    """An event after a copy of n bytes on a stream of its own."""
    compute = Stream()
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
    assert small.at <= CHUNK + 1
    device.synchronize()
    assert all(torch.equal(*layer) for layer in layers)
    assert n_timing == 1 + 2 * N_LAYERS, "timing events are of layers, not of chunks"
    # The link is never idle while a chunk is left, and events stand where a layer begins and ends.
    assert engine.now == N_LAYERS * n + 1
    assert (start.at, after.at) == (engine.now - n, engine.now)


def test_copies_wait_for_their_event_and_keep_order(engine):
    """Of tensors of any length; a slot that is still computed from is not written to."""
    device = CopyDevice(torch.device("cuda"), CHUNK)
    slot = torch.zeros(30, dtype=torch.uint8)
    first, second = some_bytes(30), some_bytes(30)
    start, _ = device.copy([(slot[:3], first[:3]), (slot[3:], first[3:])], waited(engine, 100))
    _, end = device.copy([(slot, second)], device.event())
    device.wait(end)
    assert start.at == 100 and end.at == 160
    assert torch.equal(slot, second)
