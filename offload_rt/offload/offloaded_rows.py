"""Rows of keys and values beyond the device, and how a pass gets them: over the link of the layers,
each ahead of its use.
"""

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
from offload_rt.offload.disk import ReadSettings, fill
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.pinning import pin, unpin
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.streamer import LayerSources, LayerView, Streamer
from offload_rt.offload.tier import Read, Tier
from offload_rt.system.files import cache_directory
from offload_rt.system.numa import Cpus, staying_near
from offload_rt.weights.layout import PAGE, Layout, PackedLayer, TensorEntry, align_up, host_block


class OffloadedRows(ABC):
    """A `RowStore`, and the streamer that brings its rows beside that of the layers.

    Both bring what they have in the order of its use and run ahead of it as far as they have slots,
    so the link stands still only where both have none. What a pass reads is brought for the next
    one as well, which nearly always reads the same.
    """

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
        # of the pass before; empty where something was written after it
        self._asked: list[RowRange] = []
        self._coming: Generator[LayerView, None, None] | None = None

    def allocate(self) -> int:
        """See `RowStore.allocate`."""
        if not self._free:
            self._extend(self._n_blocks)
            self._free.append(self._n_blocks)
            self._n_blocks += 1
        return self._free.pop()

    def free(self, blocks: Sequence[int]) -> None:
        """See `RowStore.free`."""
        self._free += blocks

    def write(self, pieces: Sequence[tuple[RowRange, Tensor]]) -> None:
        """See `RowStore.write`."""
        self._asked = []
        self._write(pieces)

    @contextmanager
    def prefetch(self, ranges: list[RowRange]) -> Iterator[None]:
        """Bring these ranges, of which `receive` gives one after the other, while the body of a
        `with` makes a pass.
        """
        if not ranges:
            yield
            return
        if ranges != self._asked or self._stream is None:
            n = len(ranges)
            nbytes = self.split.block_nbytes
            sources = LayerSources(
                MemoryTier(),
                (self.tier(ranges),) * n,
                N_SLOTS,
                N_SLOTS,
                self._cpus,
                slot_nbytes=nbytes,
            )
            if self._stream is None:
                self._stream = self._link.share_link(sources)
            else:
                self._stream.set_sources(sources)
            self._asked = ranges
        with closing(self._stream.sweep()) as self._coming:
            yield
            next(self._coming, None)  # gives the last slot back

    def receive(self) -> Tensor:
        """See `RowStore.receive`."""
        assert self._coming is not None, "a pass is under way"
        view = next(self._coming)
        return view.layout.entries[0].view(view.data)

    def close(self) -> None:
        """End all transfers and release memory and files; may be called again."""
        if self._stream is not None:
            self._stream.close()

    def layout(self, one: RowRange) -> Layout:
        """How a range lies in memory."""
        entry = TensorEntry("rows", 0, (one.stop - one.start, self.format.nbytes), DType.UINT8)
        return Layout((entry,), entry.nbytes)

    _cpus: Cpus = frozenset()

    @abstractmethod
    def tier(self, ranges: Sequence[RowRange]) -> Tier:
        """These ranges as blocks that a streamer brings."""

    @abstractmethod
    def read(self, places: Sequence[RowRange]) -> Tensor:
        """See `RowStore.read`."""

    @abstractmethod
    def _extend(self, block: int) -> None:
        """Make room for a block, the next one."""

    @abstractmethod
    def _write(self, pieces: Sequence[tuple[RowRange, Tensor]]) -> None:
        """See `RowStore.write`."""


class _Pinned(MemoryTier):
    """Ranges of blocks that another has pinned, or could not."""

    def __init__(self, images: Sequence[PackedLayer], is_pinned: bool) -> None:
        super().__init__()
        self._is_pinned = is_pinned
        for i, image in enumerate(images):
            self.put(i, image)

    def is_pinned(self, i: int) -> bool:
        """All of them or none."""
        return self._is_pinned


class HostRows(OffloadedRows):
    """Rows in memory of the host, beside a card. All planned blocks are pinned at once: pinning
    holds the process for long.
    """

    def __init__(
        self, split: KVSplit, n_layers: int, link: CudaStreamer, cpus: Cpus = frozenset()
    ) -> None:
        super().__init__(split, n_layers, link)
        self._cpus, self._card, self._blocks = cpus, link, list[Tensor]()
        self._pinned: list[Tensor] = []
        self.free([self.allocate() for _ in range(split.n_blocks)][::-1])

    def tier(self, ranges: Sequence[RowRange]) -> Tier:
        """Where they lie."""
        images = [PackedLayer(self._at(one).flatten(), self.layout(one)) for one in ranges]
        return _Pinned(images, len(self._pinned) == len(self._blocks))

    def read(self, places: Sequence[RowRange]) -> Tensor:
        """Waits for what is being written."""
        self._card.finish_writes()
        return torch.cat([self._at(one) for one in places])

    def close(self) -> None:
        """Unpin and release the blocks."""
        super().close()
        self._card.finish_writes()
        for block in self._pinned:
            unpin(block)
        self._pinned = []
        self._blocks = []

    def _at(self, one: RowRange) -> Tensor:
        rows = self._blocks[one.block].view(self._n_layers, self.block_rows, self.format.nbytes)
        return rows[one.layer, one.start : one.stop]

    def _extend(self, block: int) -> None:
        new = host_block(self._n_layers * self.split.block_nbytes)
        with staying_near(self._cpus):
            is_pinned = pin(new)
        if not is_pinned and self._stream is not None and len(self._pinned) == len(self._blocks):
            # rows go through slots on the host from now on, of which this one has none
            self._stream.close()
            self._stream = None
        self._pinned += [new] if is_pinned else []
        self._blocks.append(new)

    def _write(self, pieces: Sequence[tuple[RowRange, Tensor]]) -> None:
        self._card.write([(self._at(one).flatten(), rows.flatten()) for one, rows in pieces])


class FileRows(OffloadedRows):
    """Rows in a file without a name, which is gone when it is closed, however the process ends.

    They are written through the page cache and read past it where the file system allows that.
    """

    def __init__(
        self, split: KVSplit, n_layers: int, link: Streamer, settings: ReadSettings | None = None
    ) -> None:
        super().__init__(split, n_layers, link)
        self._settings = settings or ReadSettings()
        self._nbytes = n_layers * split.block_nbytes
        try:
            self._place = str(cache_directory())
            os.makedirs(self._place, exist_ok=True)
            self._file = TemporaryFile(dir=self._place, buffering=0)  # noqa: SIM115  # closed in `close`
        except (OSError, RuntimeError) as error:
            raise self._no_room(error) from error
        try:
            self._reserve(0, split.n_blocks)
        except LinkError:
            self._file.close()
            raise
        try:  # the same file once more
            self._direct = os.open(
                f"/proc/self/fd/{self._file.fileno()}", os.O_RDONLY | os.O_DIRECT
            )
        except OSError:
            self._direct = os.dup(self._file.fileno())

    def tier(self, ranges: Sequence[RowRange]) -> Tier:
        """Ranges of the file."""
        return _FileRanges(self, ranges, self._settings.n_parallel)

    def reads(self, one: RowRange, into: Tensor) -> list[Read]:
        """Requests that together read a range; it begins on a page, and the block goes on to the
        end of one.
        """
        start = self._offset(one)
        size = self._settings.request_nbytes
        stop = start + (one.stop - one.start) * self.format.nbytes
        return [
            partial(self._request, into[at - start :], at, min(size, stop - at))
            for at in range(start, stop, size)
        ]

    def read(self, places: Sequence[RowRange]) -> Tensor:
        """One by one."""
        sizes = [one.stop - one.start for one in places]
        found = torch.empty(sum(sizes), self.format.nbytes, dtype=torch.uint8)
        for one, rows in zip(places, torch.split(found, sizes), strict=True):
            fill(rows.flatten(), rows.nbytes, self._file.fileno(), self._offset(one), self._place)
        return found

    def close(self) -> None:
        """The file is gone with its last descriptor."""
        super().close()
        if not self._file.closed:
            self._file.close()
            os.close(self._direct)

    def _request(self, into: Tensor, at: int, nbytes: int) -> int:
        fill(into[: align_up(nbytes, PAGE)], nbytes, self._direct, at, self._place)
        return nbytes

    def _offset(self, one: RowRange) -> int:
        return (
            one.block * self._nbytes
            + one.layer * self.split.block_nbytes
            + one.start * self.format.nbytes
        )

    def _extend(self, block: int) -> None:
        if block >= self.split.n_blocks:
            self._reserve(block, 1)

    def _reserve(self, block: int, n: int) -> None:
        try:
            os.posix_fallocate(self._file.fileno(), block * self._nbytes, n * self._nbytes)
        except OSError as error:
            raise self._no_room(error) from error

    def _write(self, pieces: Sequence[tuple[RowRange, Tensor]]) -> None:
        try:
            for one, rows in pieces:
                view = memoryview(rows.flatten().numpy().data)
                n = 0
                while n < len(view):
                    n += os.pwrite(self._file.fileno(), view[n:], self._offset(one) + n)
        except OSError as error:
            raise self._no_room(error) from error

    def _no_room(self, error: OSError | RuntimeError) -> LinkError:
        return LinkError(
            f"no file for keys and values below {getattr(self, '_place', 'the home folder')}",
            need=format_size(self.split.n_blocks * self._nbytes),
            have=getattr(error, "strerror", None) or str(error),
            change="make room there, set XDG_CACHE_HOME to another disk, or lower --max-model-len",
        )  # fmt: skip


@dataclass
class _FileRanges:
    """Ranges of a file of rows, as a tier."""

    file: FileRows
    ranges: Sequence[RowRange]
    n_parallel: int

    def layout(self, i: int) -> Layout:
        """How a range lies in memory."""
        return self.file.layout(self.ranges[i])

    def reads(self, i: int, into: Tensor) -> list[Read]:
        """Its requests."""
        return self.file.reads(self.ranges[i], into)

    def close(self) -> None:
        """The file is another's."""
