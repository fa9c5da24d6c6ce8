"""A layer is one flat block of bytes: where each tensor lies in it, and how to pack and view it."""

import math
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes; what device kernels like best
PAGE = 4096  # bytes; direct I/O wants blocks that begin on a page


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in a block: `offset` in bytes, a multiple of the element size."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """How a block of `nbytes` bytes is divided among named tensors."""

    entries: tuple[TensorEntry, ...]
    nbytes: int

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """The tensors of a block, by name, without copying.

        block  (>= nbytes,) uint8
        """
        return {
            entry.name: block[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)
            for entry in self.entries
        }


@dataclass(frozen=True)
class PackedLayer:
    """The bytes of one layer.

    block  (layout.nbytes,) uint8
    """

    block: Tensor
    layout: Layout


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """The least multiple of `alignment` that is not below `nbytes`."""
    return -(-nbytes // alignment) * alignment


def packed_layout(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> Layout:
    """Lay tensors one behind the other, each at a multiple of ALIGNMENT.

    tensors  (name, shape, dtype) in order
    """
    entries, offset = [], 0
    for name, shape, dtype in tensors:
        entries.append(TensorEntry(name, offset, shape, dtype))
        offset = align_up(offset + entries[-1].nbytes)
    return Layout(tuple(entries), offset)


def pack(tensors: Mapping[str, Tensor]) -> PackedLayer:
    """Copy tensors into one new block."""
    layout = packed_layout((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    image = PackedLayer(host_block(layout.nbytes), layout)
    for name, view in layout.views(image.block).items():
        view.copy_(tensors[name])
    return image


def host_block(nbytes: int) -> Tensor:
    """(nbytes,) uint8 in fresh page-aligned memory, in huge pages where the system has them.

    The memory goes back to the system when the tensor and its views are gone.
    """
    # Private: shared memory is in huge pages only where the system's owner has said so.
    pages = mmap.mmap(-1, align_up(max(nbytes, 1), PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
