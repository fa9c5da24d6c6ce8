"""What every streamer offers, and what it is built from."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from offload_rt.errors import LinkError
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.tier import Tier
from offload_rt.system.numa import Cpus
from offload_rt.system.trace import Trace
from offload_rt.weights.layout import Layout, PackedLayer, packed_layout
from offload_rt.weights.lossless import EncodedLayer

# Stands for a layer that is on the device and never asked for on the host.
_NOTHING = PackedLayer(torch.empty(0, dtype=torch.uint8), Layout((), 0))


@dataclass(frozen=True)
class LayerSources:
    """Where the layers of a model come from.

    resident      the tier of the layers that are computed where they lie
    streamed      per layer the tier it is read from, None where it is resident
    n_slots       blocks on the device that streamed layers pass through
    n_host_slots  blocks on the host that transient ones pass through before
    cpus          processors near a card, which the threads that read stay on; empty: any
    encoded       the streamed layers that come to a card encoded, to be decoded there
    slot_nbytes   of a slot at least, for layers that come later
    """

    resident: MemoryTier
    streamed: tuple[Tier | None, ...]
    n_slots: int
    n_host_slots: int = 0
    cpus: Cpus = frozenset()
    encoded: Mapping[int, EncodedLayer] = field(default_factory=dict)
    slot_nbytes: int = 0

    @property
    def order(self) -> list[int]:
        """The streamed layers, in the order of a sweep."""
        return [i for i, tier in enumerate(self.streamed) if tier is not None]

    def source(self, i: int) -> Tier:
        """The tier of a streamed layer."""
        tier = self.streamed[i]
        assert tier is not None, f"layer {i} is resident"
        return tier

    def packed_layout(self, i: int) -> Layout:
        """How layer i lies in a slot on a GPU: the same tensors in the same order, aligned for its kernels."""
        return packed_layout((entry.name, entry.shape, entry.dtype) for entry in self.source(i).layout(i).entries)

    def is_transient(self, i: int) -> bool:
        """Whether layer i comes to the device through a slot of the host: from the disk, or out of unpinned memory."""
        tier = self.streamed[i]
        return tier is not None and not (isinstance(tier, MemoryTier) and tier.is_pinned(i))

    def on_host(self) -> "LayerSources":
        """The same layers brought to the host only: those pinned in its memory stay, the others go through slots."""
        here = MemoryTier()
        for i, tier in enumerate(self.streamed):
            here.put(i, tier.image(i) if isinstance(tier, MemoryTier) and tier.is_pinned(i) else _NOTHING)
        streamed = tuple(tier if self.is_transient(i) else None for i, tier in enumerate(self.streamed))
        return replace(self, resident=here, streamed=streamed, n_slots=self.n_host_slots)


@dataclass(frozen=True)
class LayerView:
    """Layer `i` on the device, for as long as the sweep stands at it."""

    i: int
    layout: Layout
    data: Tensor


class Streamer(ABC):
    """Brings every layer to the device, the next ones while the present one is computed.

    meter  bytes and seconds of the link
    order  the layers that have to be brought, in the order of a sweep
    """

    def __init__(self, sources: LayerSources, trace: Trace, meter: LinkMeter | None = None) -> None:
        self.meter, self.order = meter or LinkMeter(), sources.order
        self._sources, self._trace = sources, trace
        self._changed = threading.Condition()  # guards what the threads of the streamer share with the sweep
        self._error: BaseException | None = None  # of a thread, for the caller of `sweep`
        self._is_parked = self._is_closed = False
        self._n_sweeps = 0
        self._n_consumed = 0  # streamed layers whose compute has ended

    def sweep(self) -> Generator[LayerView, None, None]:
        """Every layer once, in order. A block is gone at the next step; on a GPU its compute may still run then.

        Raises LinkError in the caller if a read failed or the streamer is closed. After a sweep that failed or was left
        half-way nothing is fetched until the next one, which starts afresh.
        """
        self._refuse_closed()
        self._n_sweeps += 1
        sweep, is_whole = self._n_sweeps, False
        if self._is_parked or (self.order and self._n_consumed % len(self.order)):  # the last one did not end
            self._park()
            with self._changed:
                self._is_parked = False
                self._changed.notify_all()
        try:
            for i, tier in enumerate(self._sources.streamed):
                yield self.resident(i) or self._arrive(i)
                if sweep != self._n_sweeps:  # somebody held an older one, as a traceback does
                    raise LinkError("the weights are in use by another pass", change="end one before the next begins")
                if tier is not None:
                    self._release()
            is_whole = True
        finally:
            if not is_whole and sweep == self._n_sweeps:
                self._park()

    def follow(self, sources: LayerSources) -> None:
        """From now on bring what these sources have, of which nothing is longer than a slot, and forget what has come."""
        self._park()
        with self._changed:
            self._sources, self.order, self._is_parked = sources, sources.order, False
            self._changed.notify_all()

    @abstractmethod
    def beside(self, sources: LayerSources) -> Self:
        """Another streamer over the same link, of which both count what they move."""

    @abstractmethod
    def close(self) -> None:
        """End all transfers, join the threads and release the slots; may be called again."""

    @abstractmethod
    def _arrive(self, i: int) -> LayerView:
        """Wait for layer i, the next streamed one."""

    @abstractmethod
    def _release(self) -> None:
        """Give the slot of the layer that arrived last back."""

    @abstractmethod
    def _park(self) -> None:
        """Wait for what is under way, forget what has come, and fetch nothing more; may be called again."""

    def resident(self, i: int) -> LayerView | None:
        """Layer i where it lies on the device; None where it is streamed."""
        if self._sources.streamed[i] is not None:
            return None
        image = self._sources.resident.image(i)
        return LayerView(i, image.layout, image.block)

    def _refuse_closed(self) -> None:
        """Raises LinkError: whoever still sweeps over a closed streamer would wait for ever."""
        if self._is_closed:
            raise LinkError("the weights were released while in use", change="close the model after the last token")
