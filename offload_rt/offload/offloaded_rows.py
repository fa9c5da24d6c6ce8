"""Off-device rows of keys and values, streamed over the link of the layers ahead of their use."""

import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryFile

import torch
from torch import Tensor

from offload_rt.config import format_size
from offload_rt.dtypes import DType
from offload_rt.errors import LinkError
from offload_rt.kv.cache import RowRange
from offload_rt.kv.split import N_SLOTS, KVSplit
from offload_rt.offload.disk import ReadSettings
from offload_rt.offload.memory import MemoryTier, pin, unpin
from offload_rt.offload.mirrors import fill
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.streamer import LayerSources, LayerView, Streamer
from offload_rt.offload.tier import Read, Tier
from offload_rt.system.files import cache_directory
from offload_rt.system.numa import Cpus, staying_near
from offload_rt.system.trace import KV
from offload_rt.weights.layout import PAGE, Layout, PackedLayer, TensorEntry, align_up, host_block


class OffloadedRows(ABC):
    """Off-device rows in blocks, and their streamer, which shares the link with the layers.

    Both streamers copy in order of use, as far ahead as their slots allow. The link idles only if
    all slots are full. Rows of a pass are prefetched for the next pass too, because consecutive
    passes read nearly always the same rows.
    """

    _cpus: Cpus = frozenset()

    def __init__(self, split: KVSplit, n_layers: int, link: Streamer) -> None:
        """link: the streamer of the layers."""
        self.split = split
        self.format = split.format
        self.block_rows = split.block_rows
        self._n_layers = n_layers
        self._link = link
        self._free: list[int] = []
        self._n_blocks = 0
        self._stream: Streamer | None = None
        # Ranges of the previous pass; empty after a write.
        self._prefetched: list[RowRange] = []
        self._sweep: Generator[LayerView, None, None] | None = None

    def allocate(self) -> int:
        """Reserve a block and return its index; raises LinkError if no memory is left."""
        if not self._free:
            self._extend(self._n_blocks)
            self._free.append(self._n_blocks)
            self._n_blocks += 1
        return self._free.pop()

    def free(self, blocks: Sequence[int]) -> None:
        """Free blocks."""
        self._free += blocks

    def write(self, pieces: Sequence[tuple[RowRange, Tensor]]) -> None:
        """Write rows (n, format.nbytes) from the device to these ranges; raises LinkError."""
        self._prefetched = []

    @contextmanager
    def prefetch(self, ranges: list[RowRange]) -> Iterator[None]:
        """Stream these ranges during a pass, the body of a `with`; `receive` returns each once."""
        if not ranges:
            yield
            return
        if ranges != self._prefetched or self._stream is None:
            tiers = (self.tier(ranges),) * len(ranges)
            nbytes = self.split.block_nbytes
            sources = LayerSources(MemoryTier(), tiers, N_SLOTS, N_SLOTS, self._cpus, {}, nbytes)
            if self._stream is None:
                self._stream = self._link.share_link(sources, KV)
            else:
                self._stream.set_sources(sources)
            self._prefetched = ranges
        with closing(self._stream.sweep()) as self._sweep:
            yield
            next(self._sweep, None)  # frees the last slot

    def receive(self) -> Tensor:
        """Return the next prefetched range, valid until the next call; raises LinkError."""
        assert self._sweep is not None, "a pass is under way"
        view = next(self._sweep)
        return view.layout.entries[0].view(view.data)

    def close(self) -> None:
        """Stop all transfers and free memory and files; idempotent."""
        if self._stream is not None:
            self._stream.close()

    def layout(self, rows: RowRange) -> Layout:
        """Return the memory layout of a range."""
        shape = (rows.stop - rows.start, self.format.nbytes)
        entry = TensorEntry("rows", 0, shape, DType.UINT8)
        return Layout((entry,), entry.nbytes)

    @abstractmethod
    def tier(self, ranges: Sequence[RowRange]) -> Tier:
        """Return these ranges as the blocks of a tier."""

    @abstractmethod
    def read(self, places: Sequence[RowRange]) -> Tensor:
        """Return the rows of these ranges, concatenated, on the host; raises LinkError."""

    @abstractmethod
    def _extend(self, block: int) -> None:
        """Reserve memory for the next block."""


class HostRows(OffloadedRows):
    """Rows in host memory of a GPU machine, pinned at the start: pinning blocks for long."""

    def __init__(
        self, split: KVSplit, n_layers: int, link: CudaStreamer, cpus: Cpus = frozenset()
    ) -> None:
        super().__init__(split, n_layers, link)
        self._cpus = cpus
        self._card = link
        self._blocks: list[Tensor] = []
        self._pinned: list[Tensor] = []
        self.free([self.allocate() for _ in range(split.n_blocks)][::-1])

    def tier(self, ranges: Sequence[RowRange]) -> Tier:
        tier = MemoryTier(owns_pinned=len(self._pinned) == len(self._blocks))
        for i, rows in enumerate(ranges):
            tier.put(i, PackedLayer(self._rows(rows).flatten(), self.layout(rows)))
        return tier

    def read(self, places: Sequence[RowRange]) -> Tensor:
        self._card.finish_writes()
        return torch.cat([self._rows(rows) for rows in places])

    def close(self) -> None:
        super().close()
        self._card.finish_writes()
        unpin(*self._pinned)
        self._pinned = []
        self._blocks = []

    def _rows(self, rows: RowRange) -> Tensor:
        block = self._blocks[rows.block].view(self._n_layers, self.block_rows, self.format.nbytes)
        return block[rows.layer, rows.start : rows.stop]

    def _extend(self, block: int) -> None:
        new = host_block(self._n_layers * self.split.block_nbytes)
        with staying_near(self._cpus):
            is_pinned = pin(new)
        if not is_pinned and self._stream is not None and len(self._pinned) == len(self._blocks):
            # Unpinned rows pass host slots, which this streamer lacks.
            self._stream.close()
            self._stream = None
        self._pinned += [new] if is_pinned else []
        self._blocks.append(new)

    def write(self, pieces: Sequence[tuple[RowRange, Tensor]]) -> None:
        super().write(pieces)
        self._card.write([(self._rows(rows).flatten(), data.flatten()) for rows, data in pieces])


class FileRows(OffloadedRows):
    """Rows in an unnamed file: written through the page cache, read past it where possible."""

    def __init__(
        self, split: KVSplit, n_layers: int, link: Streamer, settings: ReadSettings | None = None
    ) -> None:
        super().__init__(split, n_layers, link)
        self._settings = settings or ReadSettings()
        self._nbytes = n_layers * split.block_nbytes
        self._place = "the home folder"
        try:
            self._place = str(cache_directory())
            os.makedirs(self._place, exist_ok=True)
            # closed in `close`
            self._file = TemporaryFile(dir=self._place, buffering=0)  # noqa: SIM115
        except (OSError, RuntimeError) as error:
            raise self._no_room(error) from error
        try:
            self._reserve(0, split.n_blocks)
        except LinkError:
            self._file.close()
            raise
        name = f"/proc/self/fd/{self._file.fileno()}"
        try:  # a second descriptor of the file, for direct I/O
            self._direct = os.open(name, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            self._direct = os.dup(self._file.fileno())

    def tier(self, ranges: Sequence[RowRange]) -> Tier:
        return _FileRanges(self, ranges, self._settings.n_parallel)

    def reads(self, rows: RowRange, into: Tensor) -> list[Read]:
        """Return a read per request; a range starts at a page, `into` ends at a page."""
        start = self._offset(rows)
        size = self._settings.request_nbytes
        stop = start + (rows.stop - rows.start) * self.format.nbytes
        return [
            partial(self._request, into[at - start :], at, min(size, stop - at))
            for at in range(start, stop, size)
        ]

    def read(self, places: Sequence[RowRange]) -> Tensor:
        sizes = [rows.stop - rows.start for rows in places]
        content = torch.empty(sum(sizes), self.format.nbytes, dtype=torch.uint8)
        file = self._file.fileno()
        for rows, part in zip(places, torch.split(content, sizes), strict=True):
            fill(part.flatten(), part.nbytes, file, self._offset(rows), self._place)
        return content

    def close(self) -> None:
        super().close()
        if not self._file.closed:
            self._file.close()
            os.close(self._direct)

    def _request(self, into: Tensor, at: int, nbytes: int) -> int:
        fill(into[: align_up(nbytes, PAGE)], nbytes, self._direct, at, self._place)
        return nbytes

    def _offset(self, rows: RowRange) -> int:
        in_block = rows.layer * self.split.block_nbytes + rows.start * self.format.nbytes
        return rows.block * self._nbytes + in_block

    def _extend(self, block: int) -> None:
        if block >= self.split.n_blocks:
            self._reserve(block, 1)

    def _reserve(self, block: int, n: int) -> None:
        try:
            os.posix_fallocate(self._file.fileno(), block * self._nbytes, n * self._nbytes)
        except OSError as error:
            raise self._no_room(error) from error

    def write(self, pieces: Sequence[tuple[RowRange, Tensor]]) -> None:
        super().write(pieces)
        try:
            for rows, data in pieces:
                view = memoryview(data.flatten().numpy().data)
                n = 0
                while n < len(view):
                    n += os.pwrite(self._file.fileno(), view[n:], self._offset(rows) + n)
        except OSError as error:
            raise self._no_room(error) from error

    def _no_room(self, error: OSError | RuntimeError) -> LinkError:
        return LinkError(
            f"no file for keys and values below {self._place}",
            need=format_size(self.split.n_blocks * self._nbytes),
            have=getattr(error, "strerror", None) or str(error),
            change="make room there, set XDG_CACHE_HOME to another disk, or lower --max-model-len",
        )


@dataclass
class _FileRanges:
    file: FileRows
    ranges: Sequence[RowRange]
    n_parallel: int

    def layout(self, i: int) -> Layout:
        return self.file.layout(self.ranges[i])

    def reads(self, i: int, into: Tensor) -> list[Read]:
        return self.file.reads(self.ranges[i], into)
