"""A layer is one flat block of bytes: where each tensor lies in it, and how to view it."""

import itertools
import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from offload_rt.dtypes import DType
from offload_rt.weights.header import TensorRecord

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256  # bytes; what device kernels like best
PAGE = 4096  # bytes; direct I/O wants blocks that begin on a page


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in a block: `offset` in bytes, a multiple of the element size."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, block: "Tensor") -> "Tensor":
        """The tensor in a block, without copying."""
        return (
            block[self.offset : self.offset + self.nbytes].view(self.dtype.torch).view(self.shape)
        )


@dataclass(frozen=True)
class Layout:
    """How a block of `nbytes` bytes is divided among named tensors."""

    entries: tuple[TensorEntry, ...]
    nbytes: int

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """The entries."""
        return {entry.name: entry for entry in self.entries}

    def views(self, block: "Tensor") -> "dict[str, Tensor]":
        """The tensors of a block, by name, without copying.

        block  (>= nbytes,) uint8
        """
        return {entry.name: entry.view(block) for entry in self.entries}

    def fused(self, names: Sequence[str]) -> TensorEntry | None:
        """Tensors that lie back to back in this order, as one along their first dimension; None
        where there are none such.
        """
        if not all(name in self.by_name for name in names):
            return None
        parts = [self.by_name[name] for name in names]
        for a, b in itertools.pairwise(parts):
            if b.offset != a.offset + a.nbytes or (b.dtype, b.shape[1:]) != (a.dtype, a.shape[1:]):
                return None
        return replace(parts[0], shape=(sum(part.shape[0] for part in parts), *parts[0].shape[1:]))


@dataclass(frozen=True)
class PackedLayer:
    """The bytes of one layer.

    block  (layout.nbytes,) uint8
    """

    block: "Tensor"
    layout: Layout


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """The least multiple of `alignment` that is not below `nbytes`."""
    return -(-nbytes // alignment) * alignment


def packed_layout(tensors: Iterable[tuple[str, tuple[int, ...], DType]]) -> Layout:
    """Lay tensors one behind the other, each at a multiple of ALIGNMENT.

    tensors  (name, shape, dtype) in order
    """
    entries = []
    offset = 0
    for name, shape, dtype in tensors:
        entries.append(TensorEntry(name, offset, shape, dtype))
        offset = align_up(offset + entries[-1].nbytes)
    return Layout(tuple(entries), offset)


def decoded_layout(records: Iterable[TensorRecord]) -> Layout:
    """Lay out a layer of these tensors as a decoder writes it."""
    return packed_layout((one.key, one.shape, one.stored_dtype()) for one in records)


def host_block(nbytes: int) -> "Tensor":
    """(nbytes,) uint8 in fresh page-aligned memory, in huge pages where the system has them.

    The memory goes back to the system when the tensor and its views are gone.
    """
    import torch  # not at the top: a plan lays out blocks without memory

    # Private: shared memory is in huge pages only where the system's owner has said so.
    pages = mmap.mmap(
        -1, align_up(max(nbytes, 1), PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return (
        torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
        if nbytes
        else torch.empty(0, dtype=torch.uint8)
    )
