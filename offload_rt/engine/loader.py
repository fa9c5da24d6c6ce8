"""Loads models: to the device, to the host, or not at all where a plan leaves layers on the
disk.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from offload_rt.config import format_size
from offload_rt.errors import CapacityError, DeviceError
from offload_rt.executor.rank_runner import runner_type
from offload_rt.executor.runner import Runner
from offload_rt.models.architecture import Architecture
from offload_rt.offload import stream_cuda, stream_threads
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.expert_cache import CardExperts, ExpertCache, ThreadExperts
from offload_rt.offload.host_experts import HostExperts
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.offloaded_rows import FileRows, HostRows
from offload_rt.offload.placement import ExpertSizes, with_host_slots
from offload_rt.offload.sidecar import SidecarTier
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.streamer import LayerSources
from offload_rt.offload.tier import done_ahead, read_parallel
from offload_rt.offload.tiered_experts import PinnedExperts, TieredExperts
from offload_rt.system.numa import Cpus
from offload_rt.system.trace import Trace
from offload_rt.weights import int4
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.formats import WeightFormat
from offload_rt.weights.layout import BlockRecord, PackedLayer, host_block
from offload_rt.weights.lossless import EncodedImage, EncodedLayer, encode_layer

if TYPE_CHECKING:  # it measures what drafts take with what is here
    from offload_rt.engine.engine_plan import EnginePlan, ExpertFiles

Progress = Callable[[int, int], None]


class Meter:
    """Adds up what several threads have loaded."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        """So many bytes more."""
        with self._lock:
            self._done += nbytes
            if self._progress:
                self._progress(self._done, self._total)


def open_files(checkpoint: Checkpoint, settings: ReadSettings, device: torch.device) -> DiskTier:
    """Layers and the rest of a model, to be read to where they stay: as they lie in the file for a
    CPU, packed for a GPU.
    """
    return DiskTier(
        [*checkpoint.layers, checkpoint.non_layer], settings, packed=device.type == "cuda"
    )


@dataclass(frozen=True)
class Loader:
    """Loads models for a device.

    host    takes the layers that stay in memory of the host
    closes  releases what is opened here
    cpus    processors near the device; empty: all are
    """

    device: torch.device
    host: MemoryTier
    meter: Meter
    closes: ExitStack
    cpus: Cpus

    def sources(
        self, checkpoint: Checkpoint, files: DiskTier, streamed: "EnginePlan | None" = None
    ) -> LayerSources:
        """A model read from `files`: its layers, then the rest. All lies on the device, or where a
        plan says.
        """
        n = checkpoint.spec.n_layers
        blocks = [*checkpoint.layers, checkpoint.non_layer]
        resident = self.closes.enter_context(closing(MemoryTier()))
        tiers = streamed.plan.tiers if streamed else ("device",) * n

        def work(tier: str, i: int) -> Callable[[], PackedLayer]:
            if streamed and tier == "host" and streamed.link.encodes:
                return partial(self._encode, files, i, streamed.plan.host_slot_nbytes)
            source = (
                streamed.disk if streamed and tier == "host" and streamed.link.sidecar else files
            )
            return partial(self._read, source, i, self._new_block(tier, source.layout(i).nbytes))

        self._fill(
            {"device": resident, "host": self.host},
            list(zip((*tiers, "device"), blocks, strict=True)),
            work,
        )
        return (
            self._sources(resident, streamed)
            if streamed
            else LayerSources(resident, (None,) * n, 0)
        )

    def copies(self, sources: LayerSources, files: DiskTier) -> LayerSources:
        """The resident layers of a model in `files` and the rest of it, and small copies of its
        streamed layers.
        """
        resident = self.closes.enter_context(closing(MemoryTier()))
        for i, tier in enumerate((*sources.streamed, None)):
            if tier is None:
                resident.put(i, sources.resident.image(i))
                continue
            layer = tier.image(i) if isinstance(tier, MemoryTier) else None
            if layer is None or isinstance(layer, EncodedImage):
                layer = self._read(files, i, host_block(files.layout(i).nbytes))
            resident.put(i, int4.packed(layer, self.device))
        return LayerSources(resident, (None,) * len(sources.streamed), 0)

    def runner(
        self,
        spec: Architecture,
        format: WeightFormat,
        dtype: torch.dtype,
        sources: LayerSources,
        trace: Trace,
        streamed: "EnginePlan | None" = None,
    ) -> Runner:
        """A model whose weights are there; what lies outside of its layers is behind them in the
        resident tier.
        """
        n = spec.n_layers
        rest = sources.resident.image(spec.n_layers)
        open_streamer = (
            stream_cuda if self.device.type == "cuda" else stream_threads
        ).open_streamer
        streamer = open_streamer(sources, trace, self.device)
        runner = runner_type(spec)(
            spec,
            streamer,
            format.view(rest.layout, rest.block, dtype),
            format,
            self.device,
            dtype,
            trace,
        )
        self.closes.enter_context(closing(runner))
        if streamed and (split := streamed.plan.split) is not None:
            if isinstance(streamer, CudaStreamer):
                runner.offloaded_rows = HostRows(split, n, streamer, self.cpus)
            else:
                runner.offloaded_rows = FileRows(split, n, streamer, streamed.disk.settings)
        if streamed and streamed.experts is not None and streamed.plan.experts is not None:
            runner.experts = self._experts(
                runner, streamed.experts, streamed.plan.experts, streamed.plan.n_expert_slots
            )
        return runner

    def _experts(
        self, runner: Runner, files: "ExpertFiles", sizes: ExpertSizes, n_slots: int
    ) -> ExpertCache:
        """Slots for experts, which beside a card are brought to the host, or those that are used
        most.
        """
        view = partial(runner.format.view, dtype=runner.dtype)
        if not isinstance(runner.streamer, CudaStreamer):
            return ThreadExperts(
                sizes, n_slots, files.tier, view, runner.streamer.meter, runner.trace
            )
        if sizes.n_on_host < sizes.n_blocks:
            pinned = PinnedExperts(
                sizes, files.tier, view, runner.streamer.device, runner.trace, self.cpus
            )
            return TieredExperts(sizes, n_slots, pinned, view, runner.streamer)
        tier = self.closes.enter_context(closing(MemoryTier(register=True)))

        def work(_: str, i: int) -> Callable[[], PackedLayer]:
            return partial(self._read, files.tier, i, host_block(files.tier.layout(i).nbytes))

        self._fill({"host": tier}, [("host", one) for one in files.records], work)
        cache = CardExperts(sizes, n_slots, tier, view, runner.streamer)
        # A copy of the format: it has a buffer on the host that is the thread's own. One thread is
        # left for launching kernels.
        view = partial(copy(runner.format).view, dtype=runner.dtype)
        n_threads = max(torch.get_num_threads() - 1, 1)
        host = HostExperts(tier, view, cache.copy_s, self.device, n_threads, self.cpus)
        cache.host = self.closes.enter_context(closing(host))
        return cache

    def _sources(self, resident: MemoryTier, engine_plan: "EnginePlan") -> LayerSources:
        """Where the layers of a plan are, which gives up layers on the host where the driver has
        refused to pin some.
        """
        plan = engine_plan.plan
        link = engine_plan.link
        now = with_host_slots(plan) if self.host.is_refused else plan
        if link.encodes and now.tiers != plan.tiers:
            change = "run offload-rt convert first, or use --link-format raw"
            raise DeviceError(
                "the driver pins too little memory of the host for layers encoded at load",
                change=change,
            )
        for i, (before, after) in enumerate(zip(plan.tiers, now.tiers, strict=True)):
            if before != after:
                self.host.drop(i)
        streamed = tuple(
            {"device": None, "host": self.host, "disk": engine_plan.disk}[name]
            for name in now.tiers
        )
        encoded: dict[int, EncodedLayer] = {}
        for i in (
            i for i, tier in enumerate(streamed) if tier is not None and self.device.type == "cuda"
        ):
            image = self.host.image(i) if link.encodes else None
            if isinstance(image, EncodedImage):
                encoded[i] = image.encoded
            elif link.sidecar:
                encoded[i] = link.sidecar[i].encoded
        return LayerSources(resident, streamed, now.n_slots, now.n_host_slots, self.cpus, encoded)

    def _fill(
        self,
        to: dict[str, MemoryTier],
        blocks: list[tuple[str, BlockRecord]],
        work: Callable[[str, int], Callable[[], PackedLayer]],
    ) -> None:
        """Put each block, of a tier's name and its tensors, into its tier; the same bytes of a file
        are kept once.

        work  gives what brings a block to a tier, by the tier's name and the number of the block
        The next one is read while one is pinned.
        """
        same: dict[tuple[str, BlockRecord], list[int]] = {}
        for i, block in enumerate(blocks):
            if block[0] in to:
                same.setdefault(block, []).append(i)
        with closing(
            done_ahead((work(name, one[0]) for (name, _), one in same.items()), "loads")
        ) as images:
            for (name, _), numbers in same.items():
                image = next(images)
                for i in numbers:
                    to[name].put(i, image)

    def _new_block(self, tier: str, nbytes: int) -> torch.Tensor:
        on_card = tier == "device" and self.device.type == "cuda"
        return (
            torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if on_card
            else host_block(nbytes)
        )

    def _read(self, files: DiskTier | SidecarTier, i: int, block: torch.Tensor) -> PackedLayer:
        read_parallel(files.reads(i, block), files.n_parallel, self.meter, self.cpus)
        return PackedLayer(block, files.layout(i))

    def _encode(self, files: DiskTier, i: int, planned: int) -> PackedLayer:
        """A layer that is encoded once it is read. Raises CapacityError if it takes more than was
        planned.
        """
        image = encode_layer(
            self._read(files, i, host_block(files.layout(i).nbytes)), files.n_parallel
        )
        if len(image.block) > planned:
            raise CapacityError(
                f"layer {i} shrinks less than a sample of it", need=format_size(len(image.block)),
                have=f"{format_size(planned)} "
                     f"planned", change="run offload-rt convert first, or use --link-format raw",
            )  # fmt: skip
        return image
