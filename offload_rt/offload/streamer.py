"""Interface of streamers, and the sources of layers."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
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
from offload_rt.weights.layout import Layout, PackedLayer
from offload_rt.weights.lossless import EncodedLayer

# Placeholder for a device-resident layer, never read on the host.
_NOTHING = PackedLayer(torch.empty(0, dtype=torch.uint8), Layout((), 0))


@dataclass(frozen=True)
class LayerSources:
    """Placement of a model's layers."""

    resident: MemoryTier  # of the layers computed in place
    streamed: tuple[Tier | None, ...]  # of each streamed layer, None for resident layers
    n_slots: int
    n_host_slots: int = 0  # for transient layers
    cpus: Cpus = frozenset()  # affinity of reader threads, close to the GPU; empty for any
    encoded: Mapping[int, EncodedLayer] = field(default_factory=dict)  # decoded on the GPU
    slot_nbytes: int = 0  # minimum slot size, reserved for layers of later sources

    @property
    def order(self) -> list[int]:
        """Streamed layers, in sweep order."""
        return [i for i, tier in enumerate(self.streamed) if tier is not None]

    def source(self, i: int) -> Tier:
        """Return the tier of a streamed layer."""
        tier = self.streamed[i]
        assert tier is not None, f"layer {i} is resident"
        return tier

    def packed_layout(self, i: int) -> Layout:
        """Return the layout of layer i in a GPU slot: equal tensor order, aligned for kernels."""
        return self.source(i).layout(i).packed

    def _pinned(self, i: int) -> PackedLayer | None:
        tier = self.streamed[i]
        return tier.image(i) if isinstance(tier, MemoryTier) and tier.is_pinned(i) else None

    def is_transient(self, i: int) -> bool:
        """Return whether layer i passes a host slot: read from disk, or from unpinned memory."""
        return self.streamed[i] is not None and self._pinned(i) is None

    def on_host(self) -> "LayerSources":
        """Return sources that stop at the host: pinned layers in place, further layers in slots."""
        here = MemoryTier()
        streamed = list(self.streamed)
        for i in range(len(streamed)):
            here.put(i, self._pinned(i) or _NOTHING)
            if not self.is_transient(i):
                streamed[i] = None
        return replace(self, resident=here, streamed=tuple(streamed), n_slots=self.n_host_slots)


@dataclass(frozen=True)
class LayerView:
    """Layer `i` on the device, valid until the next step of the sweep unless `is_resident`."""

    i: int
    layout: Layout
    data: Tensor
    is_resident: bool = False


class Waiting:
    """Wait for transfers of threads. The condition guards the state that threads share."""

    _changed: threading.Condition
    _error: BaseException | None = None
    _is_closed = False

    def _wait_for(self, is_ready: Callable[[], object]) -> None:
        """Wait, with the lock held. Raises the error of a thread, and LinkError if closed."""
        self._changed.wait_for(lambda: self._error or self._is_closed or is_ready())
        self._refuse_closed()
        if self._error is not None:
            raise self._error

    def _refuse_closed(self) -> None:
        if self._is_closed:
            change = "close the model after the last token"
            raise LinkError("the weights were released while in use", change=change)


class Streamer(Waiting, ABC):
    """Copy streamed layers to the device during compute, and yield all layers in order."""

    def __init__(self, sources: LayerSources, trace: Trace, meter: LinkMeter | None = None) -> None:
        self.meter = meter or LinkMeter()
        self.order = sources.order
        self._sources = sources
        self._trace = trace
        self._changed = threading.Condition()
        self._is_parked = False
        self._n_sweeps = 0
        self._n_consumed = 0  # streamed layers with finished compute

    def sweep(self) -> Generator[LayerView, None, None]:
        """Yield every layer once, in order, valid until the next step.

        On a GPU, kernels may still read the block at the next step.
        Raises LinkError if a read failed or the streamer is closed. After a failed or abandoned
        sweep, prefetching stops until the next sweep, which restarts.
        """
        self._refuse_closed()
        self._n_sweeps += 1
        sweep = self._n_sweeps
        if self._is_parked or (self.order and self._n_consumed % len(self.order)):
            self.park()
            self._restart(self._sources)
        try:
            for i, tier in enumerate(self._sources.streamed):
                yield self.resident(i) or self._arrive(i)
                # an older generator is still referenced, e.g. by a traceback
                if sweep != self._n_sweeps:
                    change = "finish a pass before starting the next"
                    raise LinkError("the weights are in use by another pass", change=change)
                if tier is not None:
                    self._release()
        except BaseException:
            if sweep == self._n_sweeps:
                self.park()
            raise

    def set_sources(self, sources: LayerSources) -> None:
        """Switch to new sources, whose layers must fit the slots; drop prefetched layers."""
        self.park()
        self._restart(sources)

    def _restart(self, sources: LayerSources) -> None:
        with self._changed:
            self._sources = sources
            self.order = sources.order
            self._is_parked = False
            self._changed.notify_all()

    @abstractmethod
    def share_link(self, sources: LayerSources, lane: str) -> Self:
        """Create a streamer on the same link and meter, with another lane in the trace."""

    @abstractmethod
    def park(self) -> None:
        """Wait for running transfers, drop prefetched layers, stop prefetching; idempotent.

        The latest layer stays valid until the next sweep, which restarts prefetching.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop all transfers, join the threads and free the slots; idempotent."""

    @abstractmethod
    def _arrive(self, i: int) -> LayerView:
        """Wait for layer i, the next streamed layer."""

    @abstractmethod
    def _release(self) -> None:
        """Free the slot of the latest layer."""

    def resident(self, i: int) -> LayerView | None:
        """Return layer i if resident on the device, else None."""
        if self._sources.streamed[i] is not None:
            return None
        image = self._sources.resident.image(i)
        return LayerView(i, image.layout, image.block, is_resident=True)
