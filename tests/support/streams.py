"""Devices, layers and tiers for tests of streamers."""

import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from offload_rt.offload.copy_device import CopyDevice
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources, LayerView, Streamer
from offload_rt.offload.tier import Read, Tier
from offload_rt.system.trace import Trace
from offload_rt.weights.layout import Layout, PackedLayer
from support.checkpoints import raw_bytes
from support.fake_gpu import FakeCopyDevice
from support.layers import NAMES, some_layers

# What happens before a read: told the layer, and how often that layer has been asked for.
Trap = Callable[[int, int], None]
N_LAYERS = 6


class Host:
    """The device of a CPU: compute is over when the call returns."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, bytes]] = []

    def stream(self, sources: LayerSources) -> Streamer:
        return ThreadStreamer(sources, Trace(on=False))

    def image(self, image: PackedLayer) -> PackedLayer:
        return image

    def look(self, block: LayerView) -> None:
        """Read the whole block, as the compute of a layer does."""
        self._looks.append((block.i, content(block.layout, block.data)))

    def seen(self) -> list[tuple[int, bytes]]:
        """Return the read blocks in order, after all compute."""
        looks, self._looks = self._looks, []
        return looks

    def close(self) -> None:
        pass


class FakeGPU(Host):
    """An asynchronous fake GPU: copies and compute run on threads, ordered by events alone."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = FakeCopyDevice(is_asynchronous=True, wrap=lambda tensor: tensor)

    def stream(self, sources: LayerSources) -> Streamer:
        return CudaStreamer(sources, Trace(on=False), self.copies)

    def look(self, block: LayerView) -> None:
        def look_late() -> None:
            self.copies.delay()
            Host.look(self, block)

        self.copies.compute.submit(look_late)

    def seen(self) -> list[tuple[int, bytes]]:
        self.copies.compute.submit(float).result()
        return super().seen()

    def close(self) -> None:
        self.copies.close()


class RealGPU(Host):
    """The first CUDA device; a look is behind compute that is slow on purpose."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", 0)
        self._pending: list[tuple[int, Layout, Tensor]] = []
        self._matrix = torch.ones(2048, 2048, device=self._device)

    def stream(self, sources: LayerSources) -> Streamer:
        return CudaStreamer(sources, Trace(on=False), CopyDevice(self._device))

    def image(self, image: PackedLayer) -> PackedLayer:
        return PackedLayer(image.block.to(self._device), image.layout)

    def look(self, block: LayerView) -> None:
        for _ in range(4):
            torch.mm(self._matrix, self._matrix)
        self._pending.append((block.i, block.layout, block.data.clone()))

    def seen(self) -> list[tuple[int, bytes]]:
        torch.cuda.synchronize()
        pending, self._pending = self._pending, []
        return [(i, content(layout, data.cpu())) for i, layout, data in pending]


def content(layout: Layout, data: Tensor) -> bytes:
    views = layout.views(data)
    return b"".join(raw_bytes(views[name]) for name in sorted(views))


@functools.cache
def stream_layers() -> tuple[dict[str, Tensor], ...]:
    return tuple(some_layers(N_LAYERS))


@functools.cache
def wanted(i: int) -> bytes:
    return b"".join(raw_bytes(stream_layers()[i][name]) for name in sorted(NAMES))


class Watched:
    """A tier that records reads, delays them at random, and applies a test's trap."""

    def __init__(
        self,
        source: Tier,
        n_parallel: int = 3,
        late_s: float = 0.0,
        seed: int = 0,
        trap: Trap | None = None,
    ) -> None:
        self.n_parallel = n_parallel
        self.n_done = Counter[int]()
        self.nbytes = 0
        self.trap = trap
        self.layout = source.layout
        self.close = source.close
        self._source = source
        self._late_s = late_s
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._n_asked = Counter[int]()

    def n_reads(self) -> Counter[int]:
        """Count complete reads of each block."""
        reads = Counter[int]()
        for i, n in self.n_done.copy().items():  # reading threads add blocks
            block = torch.empty(self.layout(i).nbytes, dtype=torch.uint8)
            reads[i] = n // len(self._source.reads(i, block))
        return reads

    def reads(self, i: int, into: Tensor) -> list[Read]:
        with self._lock:
            self._n_asked[i] += 1
            n = self._n_asked[i]
        return [partial(self._read, i, n, read) for read in self._source.reads(i, into)]

    def _read(self, i: int, n: int, read: Read) -> int:
        with self._lock:
            late_s = self._random.choice((0.0, 0.0, self._late_s))
        time.sleep(late_s)
        if self.trap:
            self.trap(i, n)
        nbytes = read()
        with self._lock:
            self.nbytes += nbytes
            self.n_done[i] += 1
        return nbytes
