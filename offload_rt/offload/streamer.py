"""What every streamer offers, and what it is built from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload_rt.errors import LinkError
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.tier import Tier
from offload_rt.weights.layout import Layout, PackedLayer, packed_layout

# Stands for a layer that is on the device and never asked for on the host.
_NOTHING = PackedLayer(torch.empty(0, dtype=torch.uint8), Layout((), 0))


@dataclass(frozen=True)
class LayerSources:
    """Where the layers of a model come from.

    resident  the tier of the layers that are computed where they lie
    streamed  per layer the tier it is read from, None where it is resident
    n_slots   blocks on the device that streamed layers pass through
    """

    resident: MemoryTier
    streamed: tuple[Tier | None, ...]
    n_slots: int

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.streamed)

    @property
    def order(self) -> list[int]:
        """The streamed layers, in the order of a sweep."""
        return [i for i, tier in enumerate(self.streamed) if tier is not None]

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot: it fits the longest block."""
        return max((tier.layout(i).nbytes for i, tier in enumerate(self.streamed) if tier is not None), default=0)

    def packed_layout(self, i: int) -> Layout:
        """How layer i lies in a slot on a GPU: the same tensors in the same order, aligned for its kernels."""
        tier = self.streamed[i]
        return packed_layout((slot.name, slot.shape, slot.dtype) for slot in tier.layout(i).entries)

    @property
    def packed_slot_nbytes(self) -> int:
        """Bytes of a slot on a GPU."""
        return max((self.packed_layout(i).nbytes for i in self.order), default=0)

    def is_transient(self, i: int) -> bool:
        """Whether layer i comes to the device through a slot of the host: from the disk, or out of unpinned memory."""
        tier = self.streamed[i]
        return tier is not None and not (isinstance(tier, MemoryTier) and tier.is_pinned(i))

    def on_host(self) -> "LayerSources":
        """The same layers brought to the host only: those pinned in its memory stay, the others go through slots."""
        images = {i: self.streamed[i].image(i) for i in self.order if not self.is_transient(i)}
        here = MemoryTier()
        for i in range(self.n_layers):
            here.put(i, images.get(i, _NOTHING))
        streamed = tuple(tier if self.is_transient(i) else None for i, tier in enumerate(self.streamed))
        return LayerSources(here, streamed, self.n_slots)


@dataclass(frozen=True)
class LayerView:
    """Layer `i` on the device, for as long as the sweep stands at it."""

    i: int
    layout: Layout
    data: Tensor


def refuse_closed(is_closed: bool) -> None:
    """Raises LinkError: whoever still sweeps over a closed streamer would wait for ever."""
    if is_closed:
        raise LinkError("the weights were released while in use", change="close the model after the last token")


def visit(
    sources: LayerSources,
    arrive: Callable[[int], LayerView],
    release: Callable[[], None],
    park: Callable[[], None],
    is_newest: Callable[[], bool],
) -> Iterator[LayerView]:
    """The sweep of every streamer: resident layers where they lie, the others as they arrive.

    arrive     waits for a streamed layer
    release    gives its slot back, called at the next step
    park       called when the sweep is left half-way (an error, Ctrl-C), so that the next one begins at the first layer
    is_newest  whether no other sweep has begun since: the layers that arrive are for that one
    """
    finished = False
    try:
        for i, tier in enumerate(sources.streamed):
            if tier is None:
                image = sources.resident.image(i)
                yield LayerView(i, image.layout, image.block)
            else:
                yield arrive(i)
                if not is_newest():
                    raise LinkError("the weights are in use by another pass", change="end one before the next begins")
                release()
        finished = True
    finally:
        if not finished and is_newest():
            park()


class Streamer(Protocol):
    """Brings every layer to the device, the next ones while the present one is computed."""

    meter: LinkMeter
    order: list[int]  # the layers that have to be brought, in the order of a sweep

    def sweep(self) -> Iterator[LayerView]:
        """Yield every layer once, in order; a block dies at the next yield.

        Raises LinkError in the caller if a read failed or the streamer is closed; the sweep after a failed one starts afresh.
        """

    def close(self) -> None:
        """End all transfers and release the slots; may be called again."""
