"""Order of copies on the streams of a fake GPU.

The copy engine of a GPU serves the first ready copy and stays with a stream that has another one.
A copy of another stream waits for one chunk if chunks alternate between streams in order.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from offload_rt.offload import copy_device
from offload_rt.offload.copy_device import CopyDevice


@dataclass(eq=False)
class Copy:
    stream: "Stream"
    after: list["Copy"]


class Engine(TorchFunctionMode):
    """Record copies with their stream and the copies before them, and do them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = list[Copy]()
        self.stream: Stream | None = None
        self.n_timing = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and self.stream is not None:
            assert kwargs == {"non_blocking": True}
            self.copies.append(Copy(self.stream, self.stream.before))
            self.stream.before = self.copies[-1:]
        return func(*args, **(kwargs or {}))

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before


class Stream:
    def __init__(self) -> None:
        self.before = list[Copy]()  # copies that end before further work

    def wait_event(self, event: "Event") -> None:
        self.before = [*self.before, *event.after]


class Event:
    def __init__(self, engine: Engine, enable_timing: bool = False, blocking: bool = False) -> None:
        self.after = list[Copy]()
        self._engine = engine
        self._blocking = blocking
        engine.n_timing += enable_timing

    def record(self, stream: Stream) -> None:
        self.after = stream.before

    def synchronize(self) -> None:
        assert self._blocking, "a thread spins"
        assert self._engine.copies[-1] in self.after


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with Engine() as made:
        monkeypatch.setattr(copy_device, "Stream", lambda device: Stream())
        monkeypatch.setattr(copy_device, "Event", lambda **how: Event(made, **how))
        monkeypatch.setattr(torch.cuda, "stream", made.on)
        yield made


def test_chunks_alternate_between_streams_in_order(engine):
    """Chunks of tensors of any length, after the event of their copy and all earlier chunks."""
    device = CopyDevice(torch.device("cuda"), 8)
    compute = Stream()
    with engine.on(compute):
        torch.zeros(1).copy_(torch.ones(1), non_blocking=True)
    done = Event(engine)
    done.record(compute)
    for after in (device.event(), done, device.event()):
        source = torch.randint(0, 256, (45,), dtype=torch.uint8)
        target = torch.zeros_like(source)
        n_copies, n_timing = len(engine.copies), engine.n_timing
        start, end = device.copy([(target[:3], source[:3]), (target[3:], source[3:])], after)
        assert torch.equal(target, source)
        first, *_, last = chunks = engine.copies[n_copies:]
        assert {*after.after} <= {*start.after} <= {*first.after} and end.after == [last]
        assert engine.n_timing == n_timing + 2, "timing events are of copies, not of chunks"
        assert all(a.stream is not b.stream for a, b in itertools.pairwise(chunks))
    assert len(engine.copies) == 1 + 3 * (1 + 6)
    assert all(a in b.after for a, b in itertools.pairwise(engine.copies[1:]))
    device.synchronize()
    device.wait(end)
