"""The CUDA streamer against a device that is none: two queues that run when they like, and events that order them.

A real device gives wrong numbers when an event is missing, now and then; this one has a random delay before every step, so
that a missing one shows.
"""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from offload_rt.errors import LinkError
from offload_rt.stream._streamer import Supply
from offload_rt.stream.cuda import CudaStreamer
from offload_rt.tiers._tier import Read
from offload_rt.tiers.device import DeviceTier
from offload_rt.tiers.host import HostTier
from offload_rt.trace import Trace
from offload_rt.weights._image import LayerImage, Layout, pack

N_VALUES = 5000


@dataclass
class Event:
    """Set when its queue gets there; one that was never recorded holds nobody up."""

    recorded: bool = False
    happened: threading.Event = field(default_factory=threading.Event)
    at: float = 0.0


class Queue:
    """Steps that run in order on a thread of their own, each after a random moment."""

    def __init__(self, seed: int) -> None:
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def give(self, step: Callable[[], None]) -> None:
        self._steps.put(step)

    def record(self, event: Event) -> None:
        event.recorded = True

        def happen() -> None:
            event.at = time.perf_counter()
            event.happened.set()

        self.give(happen)

    def wait_event(self, event: Event) -> None:
        if event.recorded:
            self.give(event.happened.wait)

    def drain(self) -> None:
        done = threading.Event()
        self.give(done.set)
        done.wait()

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            time.sleep(self._random.random() * 5e-4)
            step()


class FakeDevice:
    """A `CopyDevice` whose memory is the host's."""

    def __init__(self) -> None:
        self.copies, self.compute = Queue(1), Queue(2)

    def allocate(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def event(self) -> Event:
        return Event()

    def copy(self, target: Tensor, source: Tensor, after: Event) -> tuple[Event, Event]:
        before, done = Event(), Event()
        self.copies.wait_event(after)
        self.copies.record(before)
        self.copies.give(lambda: target.copy_(source))
        self.copies.record(done)
        return before, done

    def compute_waits_for(self, event: Event) -> None:
        self.compute.wait_event(event)

    def record_compute(self) -> Event:
        event = Event()
        self.compute.record(event)
        return event

    def wait(self, event: Event) -> None:
        event.happened.wait()

    def seconds_between(self, start: Event, end: Event) -> float | None:
        return end.at - start.at if end.happened.is_set() else None

    def synchronize(self) -> None:
        self.copies.drain()


class SlowTier:
    """A tier that is not memory, as the disk is: its blocks lie elsewhere than a packed one, and a read may fail."""

    n_parallel = 2

    def __init__(self, images: dict[int, LayerImage]) -> None:
        self._images = images
        self.fails_at: int | None = None

    def layout(self, i: int) -> Layout:
        layout = self._images[i].layout
        moved = tuple(type(slot)(slot.name, slot.offset + 64, slot.shape, slot.dtype) for slot in layout.slots)
        return Layout(moved, layout.nbytes + 64)

    def reads(self, i: int, into: Tensor) -> list[Read]:
        def part() -> int:
            if self.fails_at == i:
                raise LinkError(f"layer {i} cannot be read")
            block = self._images[i].block
            into[64 : 64 + len(block)].copy_(block)
            return len(block)

        return [part]

    def close(self) -> None:
        pass


def image(i: int) -> LayerImage:
    return pack({"a": torch.full((N_VALUES,), float(i)), "b": torch.full((7,), -i, dtype=torch.int64)})


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    fake = FakeDevice()
    yield fake
    fake.copies.close()
    fake.compute.close()


def supply(places: str, n_slots: int) -> tuple[Supply, SlowTier]:
    """Layers by place: d on the device, h on the host, s behind the slow tier."""
    resident, host, slow = DeviceTier(), HostTier(), SlowTier({i: image(i) for i in range(len(places))})
    for i, place in enumerate(places):
        {"d": resident, "h": host, "s": DeviceTier()}[place].put(i, image(i))
    return Supply(resident, tuple({"d": None, "h": host, "s": slow}[place] for place in places), n_slots), slow


def compute_sweep(streamer: CudaStreamer, device: FakeDevice, seen: list[tuple[int, bool]]) -> None:
    """Give the device one step for each block, which looks at the block when it runs, much later."""
    for block in streamer.sweep():

        def look(i: int = block.i, views: dict[str, Tensor] = block.layout.views(block.data)) -> None:
            right = bool((views["a"] == float(i)).all() and (views["b"] == -i).all())
            seen.append((i, right))

        device.compute.give(look)


@pytest.mark.parametrize("places", ["hhhhh", "dhdhd", "sssss", "hsdsh", "ddd", "h", "s"])
@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_every_block_is_whole_when_its_compute_runs(device: FakeDevice, places: str, n_slots: int) -> None:
    source, _ = supply(places, n_slots)
    streamer, seen = CudaStreamer(source, Trace(on=False), device), []
    for _ in range(4):
        compute_sweep(streamer, device, seen)
    device.compute.drain()
    streamer.close()
    assert seen == [(i, True) for _ in range(4) for i in range(len(places))]


def test_the_host_runs_ahead_of_the_device(device: FakeDevice) -> None:
    """A sweep is over for the host while the device has not begun: nothing waits for a layer's compute."""
    source, _ = supply("hhhh", 4)
    streamer, seen = CudaStreamer(source, Trace(on=False), device), []
    gate = threading.Event()
    device.compute.give(gate.wait)
    late = threading.Timer(5, gate.set)  # so that a host that waits fails the test instead of hanging it
    late.start()
    compute_sweep(streamer, device, seen)
    assert not gate.is_set()
    late.cancel()
    gate.set()
    device.compute.drain()
    streamer.close()
    assert seen == [(i, True) for i in range(4)]


def test_a_failed_read_raises_in_the_caller_and_the_next_sweep_is_whole(device: FakeDevice) -> None:
    source, slow = supply("hshs", 2)
    streamer, seen = CudaStreamer(source, Trace(on=False), device), []
    slow.fails_at = 3
    with pytest.raises(LinkError, match="layer 3"):
        for _ in range(3):
            compute_sweep(streamer, device, seen)
    slow.fails_at = None
    seen.clear()
    device.compute.drain()
    seen.clear()
    compute_sweep(streamer, device, seen)
    device.compute.drain()
    streamer.close()
    assert seen == [(i, True) for i in range(4)]


def test_closing_joins_every_thread(device: FakeDevice) -> None:
    before = set(threading.enumerate())
    source, _ = supply("hshd", 2)
    streamer = CudaStreamer(source, Trace(on=False), device)
    next(streamer.sweep())
    streamer.close()
    streamer.close()
    assert set(threading.enumerate()) == before


def test_the_meter_counts_what_crossed_the_link(device: FakeDevice) -> None:
    source, _ = supply("hdh", 2)
    streamer, seen = CudaStreamer(source, Trace(on=False), device), []
    for _ in range(3):
        compute_sweep(streamer, device, seen)
    device.compute.drain()
    streamer.close()
    nbytes, seconds = streamer.meter.read()
    layer = source.packed_layout(0).nbytes
    assert nbytes in [n * layer for n in (6, 7, 8)]  # three sweeps, and what was fetched ahead
    assert seconds > 0
