"""A layer is one flat block of bytes: offsets of its tensors, and its quantised matrices."""

import itertools
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from offload_rt.dtypes import DType
from offload_rt.weights.header import TensorRecord
from offload_rt.weights.matrix import Matrix

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 256  # bytes, preferred by device kernels
PAGE = 4096  # bytes, alignment of direct I/O


@dataclass(frozen=True)
class TensorEntry:
    """Tensor at `offset` bytes of a block, a multiple of the element size."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, block: "Tensor") -> "Tensor":
        """Return the tensor of a block, without copying."""
        content = block[self.offset : self.offset + self.nbytes]
        return content.view(self.dtype.torch).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Division of a block of `nbytes` bytes into named tensors; `matrices` by module."""

    entries: tuple[TensorEntry, ...]
    nbytes: int
    matrices: Mapping[str, Matrix] = field(default_factory=dict, hash=False)

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """Entries by name."""
        return {entry.name: entry for entry in self.entries}

    @property
    def tensors(self) -> "list[tuple[str, tuple[int, ...], DType]]":
        """Name, shape and dtype of each entry."""
        return [(entry.name, entry.shape, entry.dtype) for entry in self.entries]

    @cached_property
    def packed(self) -> "Layout":
        """The same tensors back to back, each aligned for kernels."""
        return packed_layout(self.tensors, self.matrices)

    def scratch_nbytes(self, dtype: DType, has_card: bool) -> int:
        """Return the bytes of the largest temporary copy for compute in `dtype`."""
        coded = {tensor.name for matrix in self.matrices.values() for tensor in matrix.tensors}
        plain = (entry for entry in self.entries if entry.name not in coded)
        sizes = [math.prod(part.shape) * dtype.itemsize for part in plain if part.dtype != dtype]
        sizes += [matrix.scratch_nbytes(dtype, has_card) for matrix in self.matrices.values()]
        return max(sizes, default=0)

    def views(self, block: "Tensor") -> "dict[str, Tensor]":
        """Return the tensors of a block (>= nbytes,) uint8 by name, without copying."""
        return {entry.name: entry.view(block) for entry in self.entries}

    def fused(self, names: Sequence[str]) -> TensorEntry | None:
        """Return adjacent tensors of equal dtype and width as one tensor; None for others."""
        parts = [self.by_name[name] for name in names if name in self.by_name]
        for a, b in itertools.pairwise(parts):
            if b.offset != a.offset + a.nbytes or (b.dtype, b.shape[1:]) != (a.dtype, a.shape[1:]):
                return None
        if len(parts) < len(names):
            return None
        return replace(parts[0], shape=(sum(part.shape[0] for part in parts), *parts[0].shape[1:]))

    def distance(self, names: Sequence[str]) -> int | None:
        """Return the constant distance in bytes of equal tensors, else None."""
        entries = [self.by_name.get(name) for name in names]
        distances = {b.offset - a.offset for a, b in itertools.pairwise(entries) if a and b}
        kinds = {(entry.dtype, entry.shape) if entry else None for entry in entries}
        is_uniform = None not in kinds and len(kinds) == 1 and len(distances) < 2
        return max(distances, default=0) if is_uniform else None


@dataclass(frozen=True)
class BlockRecord:
    """Tensors of a block in their files, in order of use; iterates over the tensors."""

    tensors: tuple[TensorRecord, ...]
    matrices: Mapping[str, Matrix] = field(default_factory=dict, hash=False)

    def __iter__(self) -> Iterator[TensorRecord]:
        return iter(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without alignment."""
        return sum(record.nbytes for record in self.tensors)

    @cached_property
    def layout(self) -> Layout:
        """Layout with aligned tensors, as a decoder writes them."""
        tensors = ((record.key, record.shape, record.stored_dtype()) for record in self.tensors)
        return packed_layout(tensors, self.matrices)

    def select(self, keep: Callable[[TensorRecord], bool]) -> "BlockRecord":
        """Return the block of the tensors that `keep` accepts, with complete matrices only."""
        tensors = tuple(filter(keep, self.tensors))
        keys = {record.key for record in tensors}
        matrices = dict(self.matrices)
        for module, matrix in self.matrices.items():
            if not keys.issuperset(tensor.name for tensor in matrix.tensors):
                del matrices[module]
        return BlockRecord(tensors, matrices)


@dataclass(frozen=True)
class PackedLayer:
    """Bytes of a layer; `block` is (layout.nbytes,) uint8."""

    block: "Tensor"
    layout: Layout


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Round up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def packed_layout(
    tensors: Iterable[tuple[str, tuple[int, ...], DType]],
    matrices: Mapping[str, Matrix] | None = None,
) -> Layout:
    """Place tensors (name, shape, dtype) one after another, at multiples of ALIGNMENT."""
    entries = []
    offset = 0
    for name, shape, dtype in tensors:
        entries.append(TensorEntry(name, offset, shape, dtype))
        offset = align_up(offset + entries[-1].nbytes)
    return Layout(tuple(entries), offset, matrices or {})


def host_block(nbytes: int) -> "Tensor":
    """Allocate (nbytes,) uint8 of page-aligned memory, in huge pages if available.

    Child processes do not inherit it: a fork would copy pages that a GPU has pinned. The system
    regains the memory when the tensor and its views are deleted.
    """
    import torch  # not at the top: a plan lays out blocks without memory

    # Private: shared memory uses huge pages only if the system's owner enabled them.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, align_up(max(nbytes, 1), PAGE), flags=flags)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
