"""Specification of the target model: sizes for planning, opened files, loading."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from offload_rt.config import format_size
from offload_rt.dtypes import DTYPES, DType
from offload_rt.engine import profile
from offload_rt.engine.link import LinkFormat
from offload_rt.engine.loader import Loader
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import CapacityError, DeviceError
from offload_rt.executor.image_encoder import KEPT_IMAGES, ImageEncoder
from offload_rt.executor.runner import Runner
from offload_rt.offload.card_experts import CardExperts, PinnedExperts, TieredExperts
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.expert_cache import ExpertCache
from offload_rt.offload.host_experts import HostExperts
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.mirrors import NO_MIRRORS, Mirrors
from offload_rt.offload.offloaded_cache import HostMemory
from offload_rt.offload.offloaded_rows import FileRows, HostRows
from offload_rt.offload.placement import ExpertSizes, MemoryBudget, Plan, with_host_slots
from offload_rt.offload.sidecar import SidecarTier
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.streamer import LayerSources
from offload_rt.offload.thread_experts import ThreadExperts
from offload_rt.system.trace import IMAGES, Trace
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import PAGE, BlockRecord, PackedLayer, align_up
from offload_rt.weights.lossless import EncodedImage, EncodedLayer, encode_layer

_CONVERT = "run `offload-rt convert` first"
# A block of the vision tower is read while the previous block is computed.
_TOWER_SLOTS = 2


@dataclass(frozen=True)
class TargetFiles:
    """Opened files of the target.

    checkpoint  without experts that are separate blocks
    experts     experts as separate blocks, layer by layer; None if they are part of their layers
    images      streamed blocks of the vision tower; None if they are resident
    """

    checkpoint: Checkpoint
    disk: DiskTier | SidecarTier
    experts: DiskTier | None = None
    images: DiskTier | None = None

    def close(self) -> None:
        """Close the files."""
        for tier in (self.disk, self.experts, self.images):
            if tier is not None:
                tier.close()


@dataclass(frozen=True)
class TargetSpec:
    """The target model, or this rank's part, before loading.

    image_pixels  pixels of the largest image
    streams_images  the blocks of the vision tower are read from disk for each image
    """

    checkpoint: Checkpoint
    dtype: DType
    device: torch.device
    link: LinkFormat
    mirrors: Mirrors = NO_MIRRORS
    image_pixels: int = 0
    streams_images: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether the device packs layers, so their sizes differ from the file."""
        return self.device.type == "cuda" or self.link.sizes is not None

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes with whole layers."""
        return replace(
            Sizes.of_checkpoint(self.checkpoint, self.dtype),
            layer_nbytes=_block_nbytes(self.checkpoint.layers, self.is_packed),
            link=self.link.sizes,
            divided=self._sizes_by_expert,
            images=self._image_nbytes,
            streamed_images=sum(self._tower_nbytes[1:]) if self.streams_images else 0,
        )

    @property
    def _image_nbytes(self) -> int:
        tower = self.checkpoint.spec.images
        if not self.checkpoint.images or tower is None:
            return 0
        rest, *blocks = self._tower_nbytes
        weights = rest + (_TOWER_SLOTS * max(blocks) if self.streams_images else sum(blocks))
        return weights + tower.scratch_nbytes(self.image_pixels, KEPT_IMAGES, self.dtype.itemsize)

    @cached_property
    def _tower_nbytes(self) -> tuple[int, ...]:
        """Bytes of the vision tower outside its blocks, then of each block."""
        return _block_nbytes(self.checkpoint.images, self.is_packed)

    def _sizes_by_expert(self) -> Sizes | None:
        divided = self.checkpoint.by_expert()
        mixture = self.checkpoint.spec.mixture
        if divided is None or mixture is None:
            return None
        rest, records = divided
        with closing(DiskTier(records, packed=self.is_packed)) as experts:
            nbytes = max(experts.layout(i).nbytes for i in range(len(records)))
        layers = _block_nbytes(rest.layers, self.is_packed)
        return replace(self.sizes, layer_nbytes=layers, experts=ExpertSizes(mixture, nbytes))

    def with_buffers(self, budget: MemoryBudget) -> MemoryBudget:
        """Reserve host memory for layers encoded during loading, and for streamed images."""
        buffers = budget.buffers
        if self.link.encodes:  # an unencoded layer
            buffers += max(map(_packed_nbytes, self.checkpoint.layers))
        if self.streams_images and budget.has_card:
            buffers += _TOWER_SLOTS * max(self._tower_nbytes[1:])
        return replace(budget, buffers=buffers)

    def check_placement(self, plan: Plan) -> None:
        """Raise CapacityError if layers on disk would have to be encoded during loading."""
        n_on_disk = plan.tiers.count("disk")
        if self.link.encodes and n_on_disk:
            problem = "--link-format=lossless without a sidecar"
            have = f"{n_on_disk} of {len(plan.tiers)} on disk"
            change = f"{_CONVERT}, raise --host-memory, or use --link-format=raw"
            raise CapacityError(problem, need="all layers in memory", have=have, change=change)

    def open(self, plan: Plan, reads_disk: bool) -> TargetFiles:
        """Open the files of a placement. Measures the disk's best read settings once."""
        checkpoint = self.checkpoint
        settings = profile.read_settings(checkpoint.layers) if reads_disk else ReadSettings()
        images = experts = None
        if self.streams_images:
            images = DiskTier(checkpoint.images[1:], settings, mirrors=self.mirrors)
        disk: DiskTier | SidecarTier
        if plan.experts is not None and (divided := checkpoint.by_expert()) is not None:
            checkpoint, records = divided
            experts = DiskTier(records, settings, self.device.type == "cuda", self.mirrors)
        if self.link.sidecar and experts is None:
            disk = SidecarTier(self.link.sidecar, settings, self.device.type == "cpu", self.mirrors)
        else:
            disk = DiskTier(checkpoint.layers, settings, mirrors=self.mirrors)
        return TargetFiles(checkpoint, disk, experts, images)

    def loaded_nbytes(self, plan: Plan, files: TargetFiles, stored: DiskTier) -> int:
        """Return the bytes that `load` and `build` read; `stored` is the checkpoint."""
        sources = {"device": stored, "host": files.disk if self.link.sidecar else stored}
        blocks = ((sources.get(tier), i) for i, tier in enumerate(self._tiers(plan)))
        nbytes = sum(source.nbytes(i) for source, i in blocks if source is not None)
        experts = files.experts
        if experts is not None and self.device.type == "cuda" and not plan.pass_bytes.disk_experts:
            nbytes += sum(map(experts.nbytes, range(len(experts.blocks))))
        return nbytes

    def _tiers(self, plan: Plan) -> tuple[str, ...]:
        n_streamed = len(self.checkpoint.images[1:]) if self.streams_images else 0
        n_resident = len(self.checkpoint.blocks) - len(plan.tiers) - n_streamed
        return (*plan.tiers, *["device"] * n_resident, *["disk"] * n_streamed)

    def load(
        self, loader: Loader, plan: Plan, files: TargetFiles, stored: DiskTier
    ) -> LayerSources:
        """Load the weights that the placement keeps in memory."""
        resident = loader.new_tier()
        names = self._tiers(plan)

        def work(i: int) -> Callable[[], PackedLayer]:
            if names[i] == "host" and self.link.encodes:
                return partial(_encode, loader, stored, i, plan.host_slot_nbytes)
            is_encoded = names[i] == "host" and self.link.sidecar
            return loader.reader(files.disk if is_encoded else stored, i, names[i])

        tiers = {"device": resident, "host": loader.host, "disk": None}
        loader.fill([tiers[name] for name in names], files.checkpoint.blocks, work)
        return self._sources(loader, plan, files, resident)

    def _sources(
        self, loader: Loader, plan: Plan, files: TargetFiles, resident: MemoryTier
    ) -> LayerSources:
        """Return the tier of each layer. Move host layers to disk if pinning has failed."""
        current = with_host_slots(plan) if loader.host.is_refused else plan
        if self.link.encodes and current.tiers != plan.tiers:
            problem = "the driver pins too little memory of the host for layers encoded at load"
            raise DeviceError(problem, change=f"{_CONVERT}, or use --link-format=raw")
        for i, (before, after) in enumerate(zip(plan.tiers, current.tiers, strict=True)):
            if before != after:
                loader.host.drop(i)
        tiers = {"device": None, "host": loader.host, "disk": files.disk}
        streamed = tuple(tiers[name] for name in current.tiers)
        encoded: dict[int, EncodedLayer] = {}
        on_card = self.device.type == "cuda"
        for i in (i for i, tier in enumerate(streamed) if tier is not None and on_card):
            image = loader.host.image(i) if self.link.encodes else None
            if isinstance(image, EncodedImage):
                encoded[i] = image.encoded
            elif self.link.sidecar:
                encoded[i] = self.link.sidecar[i].encoded
        slots = current.n_slots, current.n_host_slots
        return LayerSources(resident, streamed, *slots, loader.cpus, encoded)

    def build(
        self, loader: Loader, plan: Plan, files: TargetFiles, sources: LayerSources, trace: Trace
    ) -> Runner:
        """Construct the runner with its caches of off-device KV rows and of experts."""
        runner = loader.runner(files.checkpoint, self.dtype.torch, sources, trace)
        if files.checkpoint.images:
            runner.images = self._image_encoder(loader, runner, files, sources.resident)
        if plan.split is not None:
            link = runner.streamer
            rows: HostRows | FileRows
            if isinstance(link, CudaStreamer):
                rows = HostRows(plan.split, runner.spec.n_layers, link, loader.cpus)
            else:
                rows = FileRows(plan.split, runner.spec.n_layers, link, files.disk.settings)
            loader.closes.enter_context(closing(rows))
            runner.memory = HostMemory(runner.spec, runner.dtype, runner.device, rows)
        if files.experts is not None and plan.experts is not None:
            experts = _experts(loader, runner, files.experts, plan.experts, plan.n_expert_slots)
            runner.experts = experts
            runner.prepare = partial(experts.attach, runner.streamer)
        return runner

    def _image_encoder(
        self, loader: Loader, runner: Runner, files: TargetFiles, resident: MemoryTier
    ) -> ImageEncoder:
        tower = self.checkpoint.spec.images
        assert tower is not None, "see Checkpoint.image_blocks"
        first = len(self.checkpoint.layers) + 1
        blocks = loader.new_tier()
        n_blocks = len(self.checkpoint.images) - 1
        for i in range(n_blocks if files.images is None else 0):
            blocks.put(i, resident.image(first + 1 + i))
        tiers = (files.images,) * n_blocks
        sources = LayerSources(blocks, tiers, _TOWER_SLOTS, _TOWER_SLOTS, loader.cpus)
        view = partial(runner.format.view, dtype=runner.dtype)
        rest = resident.image(first)
        n_kept = KEPT_IMAGES * tower.most_tokens(self.image_pixels)
        streamer = runner.streamer.share_link(sources, IMAGES)
        loader.closes.enter_context(closing(streamer))
        weights = view(rest.layout, rest.block)
        return ImageEncoder(tower, weights, streamer, view, self.device, n_kept, runner.trace)


def compute_dtype(name: str, checkpoint: Checkpoint) -> DType:
    """Return the dtype of a setting; auto selects the dtype of the checkpoint."""
    return DTYPES[(checkpoint.spec.dtype_name or checkpoint.dtype) if name == "auto" else name]


def _block_nbytes(blocks: Sequence[BlockRecord], is_packed: bool) -> tuple[int, ...]:
    """Return the bytes of each block, at least those of the file: host slots hold stored blocks."""
    with closing(DiskTier(blocks)) as files:
        stored = [files.layout(i).nbytes for i in range(len(blocks))]
    return tuple(map(max, stored, map(_packed_nbytes, blocks))) if is_packed else tuple(stored)


def _packed_nbytes(block: BlockRecord) -> int:
    return align_up(block.layout.nbytes, PAGE)


def _encode(loader: Loader, stored: DiskTier, i: int, planned: int) -> PackedLayer:
    """Read and encode layer i. Raises CapacityError if it exceeds the planned bytes."""
    image = encode_layer(loader.reader(stored, i)(), stored.n_parallel)
    if len(image.block) > planned:
        problem = f"layer {i} shrinks less than its sample"
        have = f"{format_size(planned)} planned"
        change = f"{_CONVERT}, or use --link-format=raw"
        raise CapacityError(problem, need=format_size(len(image.block)), have=have, change=change)
    return image


def _experts(
    loader: Loader, runner: Runner, files: DiskTier, sizes: ExpertSizes, n_slots: int
) -> ExpertCache:
    """Create the expert cache; a GPU machine's host tier holds all or the most used experts."""
    view = partial(runner.format.view, dtype=runner.dtype)
    streamer = runner.streamer
    if not isinstance(streamer, CudaStreamer):
        parts = files, view, streamer.meter, runner.trace
        return loader.closes.enter_context(closing(ThreadExperts(sizes, n_slots, *parts)))
    images: MemoryTier | PinnedExperts
    cache: CardExperts
    if sizes.n_on_host < sizes.n_blocks:
        images = PinnedExperts(sizes, files, view, streamer.device, runner.trace, loader.cpus)
        cache = TieredExperts(sizes, n_slots, images, streamer)
    else:
        images = loader.new_tier(register=True)
        loader.fill([images] * len(files.blocks), files.blocks, partial(loader.reader, files))
        cache = CardExperts(sizes, n_slots, images, view, streamer)
    loader.closes.enter_context(closing(cache))
    # One thread remains for kernel launches.
    n_threads = max(torch.get_num_threads() - 1, 1)
    host = HostExperts(images.image, view, cache.copy_s, loader.device, n_threads, loader.cpus)
    if isinstance(images, PinnedExperts):
        host.release = images.release
    cache.host = loader.closes.enter_context(closing(host))
    return cache
