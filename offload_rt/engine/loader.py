"""Load weights into device and host memory, and construct runners."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch

from offload_rt.executor.rank_runner import runner_type
from offload_rt.executor.runner import Runner
from offload_rt.offload.copy_device import CHUNK, CopyDevice
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.mirrors import NO_MIRRORS, Mirrors
from offload_rt.offload.sidecar import SidecarTier
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources, Streamer
from offload_rt.offload.tier import done_ahead, read_parallel
from offload_rt.system.numa import Cpus
from offload_rt.system.trace import Trace
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import BlockRecord, PackedLayer, host_block
from offload_rt.weights.rounding import rounded

Progress = Callable[[int, int], None]


def summed(total: int, progress: Progress) -> Callable[[int], None]:
    """Return a function that sums the bytes loaded by several threads, for `progress`."""
    done = 0
    lock = threading.Lock()

    def add(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            progress(done, total)

    return add


def open_files(
    model: Checkpoint, settings: ReadSettings, device: torch.device, mirrors: Mirrors = NO_MIRRORS
) -> DiskTier:
    """Open all weights of a model for loading, packed on a GPU."""
    return DiskTier(model.blocks, settings, device.type == "cuda", mirrors)


@dataclass(frozen=True)
class Loader:
    """Load models for a device.

    host    receives the layers that stay in host memory
    closes  releases everything that the loader opens
    cpus    processors near the device; empty for all
    loaded  receives the bytes of each read, in its thread
    """

    device: torch.device
    host: MemoryTier
    closes: ExitStack
    cpus: Cpus = frozenset()
    chunk_nbytes: int = CHUNK
    loaded: Callable[[int], None] | None = None

    def resident(self, checkpoint: Checkpoint, files: DiskTier, rounding: str) -> LayerSources:
        """Load a whole model to the device: its layers, then the remaining weights."""
        tier = self.new_tier()

        def work(i: int) -> Callable[[], PackedLayer]:
            if rounding == "none":
                return self.reader(files, i, "device")
            read = self.reader(files, i)
            return lambda: rounded(read(), rounding, self.device)

        self.fill([tier] * len(checkpoint.blocks), checkpoint.blocks, work)
        return LayerSources(tier, (None,) * checkpoint.spec.n_layers, 0)

    def new_tier(self, register: bool = False) -> MemoryTier:
        """Create a tier in memory that `closes` releases; register: pin its blocks."""
        return self.closes.enter_context(closing(MemoryTier(register=register)))

    def fill(
        self,
        tiers: Sequence[MemoryTier | None],
        blocks: Sequence[BlockRecord],
        work: Callable[[int], Callable[[], PackedLayer]],
    ) -> None:
        """Load each block into its tier, if any; blocks with equal tensors share memory.

        Reading a block by the function that `work` returns overlaps pinning the previous block.
        """
        same: dict[tuple[MemoryTier, BlockRecord], list[int]] = {}
        for i, (tier, block) in enumerate(zip(tiers, blocks, strict=True)):
            if tier is not None:
                same.setdefault((tier, block), []).append(i)
        with closing(done_ahead((work(equal[0]) for equal in same.values()), "loads")) as images:
            for ((tier, _), equal), image in zip(same.items(), images, strict=True):
                for i in equal:
                    tier.put(i, image)

    def reader(
        self, files: DiskTier | SidecarTier, i: int, tier: str = "host"
    ) -> Callable[[], PackedLayer]:
        """Allocate memory in this thread; return the function that reads block i in any thread."""
        layout = files.layout(i)
        if tier == "device" and self.device.type == "cuda":
            block = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.device)
        else:
            block = host_block(layout.nbytes)

        def read() -> PackedLayer:
            read_parallel(files.reads(i, block), files.n_parallel, self.loaded, self.cpus)
            return PackedLayer(block, layout)

        return read

    def runner(
        self, model: Checkpoint, dtype: torch.dtype, sources: LayerSources, trace: Trace
    ) -> Runner:
        """Construct the runner; the last resident block holds the weights outside the layers."""
        spec = model.spec
        rest = sources.resident.image(spec.n_layers)
        streamer: Streamer
        if self.device.type == "cuda":
            streamer = CudaStreamer(sources, trace, CopyDevice(self.device, self.chunk_nbytes))
        else:
            streamer = ThreadStreamer(sources, trace)
        weights = model.format.view(rest.layout, rest.block, dtype)
        runner = runner_type(spec)(spec, streamer, weights, model.format, self.device, dtype, trace)
        return self.closes.enter_context(closing(runner))
