"""Blocks kept in memory: the shared part of the tiers that are memory."""

from functools import partial

from torch import Tensor

from offload_rt.offload.tier import Read
from offload_rt.weights.layout import Layout, PackedLayer

_PART = 16 << 20  # bytes of one read; large enough that handing out parts costs nothing


class MemoryTier:
    """Layers by number, read by copying."""

    n_parallel = 1

    def __init__(self) -> None:
        self._images: dict[int, PackedLayer] = {}

    def put(self, i: int, image: PackedLayer) -> None:
        """Keep a layer, without copying it."""
        self._images[i] = image

    def is_pinned(self, i: int) -> bool:
        """Whether a device can copy layer i by itself, without a thread that waits."""
        return True

    def image(self, i: int) -> PackedLayer:
        """The layer where it lies."""
        return self._images[i]

    def layout(self, i: int) -> Layout:
        """How block i lies in memory."""
        return self._images[i].layout

    def reads(self, i: int, into: Tensor) -> list[Read]:
        """Copies that together fill `into` with block i."""
        block = self._images[i].block
        starts = range(0, len(block), _PART)
        return [partial(_copy, block[start : start + _PART], into[start : start + _PART]) for start in starts]

    def close(self) -> None:
        """Release the blocks."""
        self._images.clear()


def _copy(source: Tensor, target: Tensor) -> int:
    target[: len(source)].copy_(source)  # the target may be longer than the block
    return len(source)
