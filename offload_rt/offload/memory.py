"""Layers kept in device or host memory, pinned if a GPU copies them.

torch's pinned allocator rounds up to powers of two: 138 GB of weights would need 154 GB or more.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from offload_rt.offload.tier import Read, Tier
from offload_rt.system.numa import cpus_near, staying_near
from offload_rt.weights.layout import Layout, PackedLayer, host_block

_PART = 16 << 20  # bytes per read, large enough to hide the overhead


def pin(block: Tensor) -> bool:
    """Register a block of host memory; return success (WSL and limits prevent it)."""
    if not torch.cuda.is_available():
        return False
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types there
    if int(driver.cudaHostRegister(block.data_ptr(), block.nbytes, 0)) == 0:
        return True
    # Clear the driver's last error, which torch would raise at its next launch.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


@contextmanager
def pinned_block(nbytes: int, device: torch.device) -> Iterator[Tensor]:
    """Allocate (nbytes,) uint8 of host memory near a GPU, pinned if possible within a `with`."""
    block = host_block(nbytes)
    with staying_near(cpus_near(device)):
        is_pinned = pin(block)
    try:
        yield block
    finally:
        if is_pinned:
            unpin(block)


def unpin(*blocks: Tensor) -> None:
    """Unregister blocks before their memory is freed."""
    for block in blocks:
        torch.cuda.cudart().cudaHostUnregister(block.data_ptr())  # type: ignore[no-untyped-call]


class MemoryTier(Tier):
    """Layers by number; device layers are computed in place, host layers are copied.

    register     pin each block with the CUDA driver, so that the GPU copies it without staging
    owns_pinned  the owner of the blocks has pinned all of them
    is_refused   the driver refused to pin a block
    """

    n_parallel = 4  # threads that copy unpinned blocks into pinned slots

    def __init__(self, register: bool = False, owns_pinned: bool = False) -> None:
        self._register = register
        self._owns_pinned = owns_pinned
        self.is_refused = False
        self._images: dict[int, PackedLayer] = {}
        self._pinned: dict[int, PackedLayer] = {}  # by address, because layers may share a block

    def put(self, i: int, image: PackedLayer) -> None:
        """Store a layer without copying; pin it if requested and possible."""
        self._images[i] = image
        if self._register and not self.is_pinned(i):
            if pin(image.block):
                self._pinned[image.block.data_ptr()] = image
            else:
                self.is_refused = True

    def is_pinned(self, i: int) -> bool:
        """Return whether layer i is pinned; the driver may refuse (WSL, limits)."""
        return self._owns_pinned or self.image(i).block.data_ptr() in self._pinned

    def drop(self, i: int) -> None:
        """Remove a layer; free its block unless shared."""
        address = self._images.pop(i).block.data_ptr()
        kept = {image.block.data_ptr() for image in self._images.values()}
        if address in self._pinned.keys() - kept:
            unpin(self._pinned.pop(address).block)

    def image(self, i: int) -> PackedLayer:
        """Return a layer's block and layout."""
        return self._images[i]

    def layout(self, i: int) -> Layout:
        return self._images[i].layout

    def reads(self, i: int, into: Tensor) -> list[Read]:
        block = self._images[i].block
        parts = (slice(start, start + _PART) for start in range(0, len(block), _PART))
        return [partial(_copy, block[part], into[part]) for part in parts]

    def close(self) -> None:
        """Unpin and free the blocks."""
        unpin(*(image.block for image in self._pinned.values()))
        self._pinned.clear()
        self._images.clear()


def _copy(source: Tensor, target: Tensor) -> int:
    target[: len(source)].copy_(source)  # the target may be longer than the block
    return len(source)
