"""Devices, layers and tiers for tests of streamers."""

import functools
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload_rt.offload import stream_cuda, stream_threads
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.streamer import LayerSources, LayerView, Streamer
from offload_rt.offload.tier import Read, Tier
from offload_rt.system.trace import Trace
from offload_rt.weights.layout import Layout, PackedLayer
from support.checkpoints import raw_bytes
from support.layers import NAMES, some_layers

STREAMERS = {"cuda": stream_cuda, "threads": stream_threads}


# What happens before a read: told the layer, and how often that layer has been asked for.
Trap = Callable[[int, int], None]


N_LAYERS = 6


class Host:
    """The device of a CPU: compute is over when the call returns."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, bytes]] = []

    def stream(self, name: str, sources: LayerSources) -> Streamer:
        return STREAMERS[name].open_streamer(sources, Trace(on=False), torch.device("cpu"))

    def image(self, image: PackedLayer) -> PackedLayer:
        return image

    def look(self, block: LayerView) -> None:
        """Read the whole block, as the compute of a layer does."""
        self._looks.append((block.i, content(block.layout, block.data)))

    def seen(self) -> list[tuple[int, bytes]]:
        """What was looked at, in order, once all compute has ended."""
        looks = self._looks
        self._looks = []
        return looks

    def close(self) -> None:
        pass


PATIENCE_S = 30.0  # what takes so long has hung


class _Event:
    def __init__(self) -> None:
        self.is_recorded, self.happened, self.at = False, threading.Event(), 0.0

    def record(self) -> None:
        self.at = time.perf_counter()
        self.happened.set()


class _Lane:
    """Work done in order by a thread of its own, as on a stream of a GPU."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pretended", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def flush(self) -> None:
        done = threading.Event()
        self._work.put(done.set)
        assert done.wait(PATIENCE_S), "a lane of the pretended device has hung"

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class PretendedGPU(Host):
    """A `CopyDevice` in this process: a lane for copies and one for compute, both late, ordered by
    nothing but events.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies, self._compute, self._late = _Lane(), _Lane(), random.Random(0)
        self.n_copies = 0

    def stream(self, name: str, sources: LayerSources) -> Streamer:
        return CudaStreamer(sources, Trace(on=False), self)

    def look(self, block: LayerView) -> None:
        def late() -> None:
            time.sleep(self._late.choice((0.0, 0.0, 0.002)))
            Host.look(self, block)

        self._compute.put(late)

    def seen(self) -> list[tuple[int, bytes]]:
        self._compute.flush()
        return super().seen()

    def close(self) -> None:
        self._compute.close()
        self._copies.close()

    def select(self) -> None:
        pass

    def allocate(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8)

    def event(self) -> _Event:
        return _Event()

    def copy(self, moves: Sequence[tuple[Tensor, Tensor]], after: _Event) -> tuple[_Event, _Event]:
        start = _Event()
        end = _Event()
        start.is_recorded = end.is_recorded = True
        self.n_copies += 1
        is_ordered = after.is_recorded

        def move() -> None:
            if is_ordered:
                assert after.happened.wait(PATIENCE_S)
            start.record()
            time.sleep(self._late.choice((0.0, 0.0, 0.002)))
            for target, source in moves:
                target.copy_(source)
            end.record()

        self._copies.put(move)
        return start, end

    def compute_waits_for(self, event: _Event) -> None:
        if event.is_recorded:
            self._compute.put(lambda: event.happened.wait(PATIENCE_S) and None)

    def record_compute(self) -> _Event:
        event = _Event()
        event.is_recorded = True
        self._compute.put(event.record)
        return event

    def wait(self, event: _Event) -> None:
        assert event.happened.wait(PATIENCE_S)

    def seconds_between(self, start: _Event, end: _Event) -> float | None:
        return end.at - start.at if start.happened.is_set() and end.happened.is_set() else None

    def synchronize(self) -> None:
        self._copies.flush()


class RealGPU(Host):
    """The first CUDA device; a look is behind compute that is slow on purpose."""

    def __init__(self) -> None:
        self._device = torch.device("cuda")
        self._pending: list[tuple[int, Layout, Tensor]] = []
        self._matrix = torch.ones(2048, 2048, device=self._device)

    def stream(self, name: str, sources: LayerSources) -> Streamer:
        return STREAMERS[name].open_streamer(sources, Trace(on=False), self._device)

    def image(self, image: PackedLayer) -> PackedLayer:
        return PackedLayer(image.block.to(self._device), image.layout)

    def look(self, block: LayerView) -> None:
        for _ in range(4):
            torch.mm(self._matrix, self._matrix)
        self._pending.append((block.i, block.layout, block.data.clone()))

    def seen(self) -> list[tuple[int, bytes]]:
        torch.cuda.synchronize()
        pending = self._pending
        self._pending = []
        return [(i, content(layout, data.cpu())) for i, layout, data in pending]


def content(layout: Layout, data: Tensor) -> bytes:
    """The bytes of all tensors of a block, by name."""
    views = layout.views(data)
    return b"".join(raw_bytes(views[name]) for name in sorted(views))


@functools.cache
def stream_layers() -> tuple[dict[str, Tensor], ...]:
    return tuple(some_layers(N_LAYERS))


@functools.cache
def wanted(i: int) -> bytes:
    return b"".join(raw_bytes(stream_layers()[i][name]) for name in sorted(NAMES))


class Watched:
    """A tier that records its reads, may delay each at random, and does to one of them what a test
    asks.
    """

    def __init__(
        self,
        source: Tier,
        n_parallel: int = 3,
        late_s: float = 0.0,
        seed: int = 0,
        trap: Trap | None = None,
    ) -> None:
        self.n_parallel = n_parallel
        self.n_done: dict[int, int] = {}
        self.nbytes = 0
        self.trap = trap
        self._source, self._late_s, self._random = source, late_s, random.Random(seed)
        self._lock, self._n_asked = threading.Lock(), dict[int, int]()

    def layout(self, i: int) -> Layout:
        return self._source.layout(i)

    def reads(self, i: int, into: Tensor) -> list[Read]:
        with self._lock:
            n = self._n_asked[i] = self._n_asked.get(i, 0) + 1
        return [self._watched(i, n, read) for read in self._source.reads(i, into)]

    def close(self) -> None:
        self._source.close()

    def _watched(self, i: int, n: int, read: Read) -> Read:
        def watched() -> int:
            with self._lock:
                late = self._random.choice((0.0, 0.0, self._late_s))
            if late:
                time.sleep(late)
            if self.trap:
                self.trap(i, n)
            nbytes = read()
            with self._lock:
                self.nbytes += nbytes
                self.n_done[i] = self.n_done.get(i, 0) + 1
            return nbytes

        return watched
