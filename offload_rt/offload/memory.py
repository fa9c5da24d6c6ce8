"""Layers kept in memory: of the device, or of the host."""

from functools import partial

from torch import Tensor

from offload_rt.offload.pinning import pin, unpin
from offload_rt.offload.tier import Read
from offload_rt.weights.layout import Layout, PackedLayer

_PART = 16 << 20  # bytes of one read; large enough that handing out parts costs nothing


class MemoryTier:
    """Layers by number: those of the device are computed where they lie, those of the host are read by copying.

    register    pin the pages of each block with the CUDA driver as it is put, so that the device copies it by itself
    is_refused  whether the driver was asked to and refused
    """

    n_parallel = 4  # copies at once, where the driver pins nothing and threads must bring the blocks into pinned slots

    def __init__(self, register: bool = False) -> None:
        self._register = register
        self.is_refused = False
        self._images: dict[int, PackedLayer] = {}
        self._pinned: dict[int, PackedLayer] = {}  # by address: layers may share a block

    def put(self, i: int, image: PackedLayer) -> None:
        """Keep a layer, without copying it, pinned if that is asked for and the driver agrees."""
        self._images[i] = image
        if self._register and not self.is_pinned(i):
            if pin(image.block):
                self._pinned[image.block.data_ptr()] = image
            else:
                self.is_refused = True

    def is_pinned(self, i: int) -> bool:
        """Whether the device copies layer i by itself; not where the driver refused to pin it (WSL, limits)."""
        return self.image(i).block.data_ptr() in self._pinned

    def drop(self, i: int) -> None:
        """Forget a layer; its block is released if no other layer shares it."""
        block = self._images.pop(i).block
        address = block.data_ptr()
        if address in self._pinned and all(one.block.data_ptr() != address for one in self._images.values()):
            unpin(self._pinned.pop(address).block)

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
        """Unpin and release the blocks."""
        for image in self._pinned.values():
            unpin(image.block)
        self._pinned.clear()
        self._images.clear()


def _copy(source: Tensor, target: Tensor) -> int:
    target[: len(source)].copy_(source)  # the target may be longer than the block
    return len(source)
