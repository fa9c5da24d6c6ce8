"""What every streamer offers, and what it is built from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offload_rt.stream._meter import LinkMeter
from offload_rt.tiers._tier import Tier
from offload_rt.tiers.device import DeviceTier
from offload_rt.weights._image import Layout


@dataclass(frozen=True)
class Supply:
    """Where the layers of a model come from.

    resident  the tier of the layers that are computed where they lie
    streamed  per layer the tier it is read from, None where it is resident
    n_slots   blocks on the device that streamed layers pass through
    """

    resident: DeviceTier
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


@dataclass(frozen=True)
class Block:
    """Layer `i` on the device, for as long as the sweep stands at it."""

    i: int
    layout: Layout
    data: Tensor


class Streamer(Protocol):
    """Brings every layer to the device, the next ones while the present one is computed."""

    meter: LinkMeter

    def sweep(self) -> Iterator[Block]:
        """Yield every layer once, in order; a block dies at the next yield.

        Raises LinkError in the caller if a read failed; the sweep after that starts afresh.
        """

    def close(self) -> None:
        """End all transfers and release the slots; may be called again."""
