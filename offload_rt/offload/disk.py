"""Layers read straight out of a checkpoint's own safetensors shards, past the page cache where the file system allows it."""

import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from offload_rt.errors import LinkError
from offload_rt.offload.tier import Read
from offload_rt.weights.header import TensorRecord, stamp_of
from offload_rt.weights.layout import PAGE, Layout, TensorEntry, align_up, host_block, packed_layout

# Ranges this close are read as one: the bytes between cost less than another request.
_JOIN = 64 << 10


@dataclass(frozen=True)
class ReadSettings:
    """How the disk is kept busy.

    request_nbytes  bytes of one request, a multiple of PAGE
    n_parallel      requests under way at once
    """

    request_nbytes: int = 1 << 20
    n_parallel: int = 4


@dataclass(frozen=True)
class _Run:
    """Bytes [start, stop) of a file, which hold these tensors."""

    path: Path
    start: int
    stop: int
    records: tuple[TensorRecord, ...]


@dataclass(frozen=True)
class _Part:
    """Bytes [start, start + nbytes) of a file, which belong at `offset` of a block.

    phased  the block keeps the file's phase, so whole pages may be read into it without touching another tensor
    n_pieces, stride  of a part of a matrix: so many pieces in all, the first bytes of every `stride`
    """

    path: Path
    start: int
    nbytes: int
    offset: int
    phased: bool
    n_pieces: int = 1
    stride: int = 0

    @property
    def span(self) -> int:
        """Bytes that are read, with what lies between pieces: these are shorter than requests, and seldom begin at a page."""
        return (self.n_pieces - 1) * self.stride + self.nbytes // self.n_pieces


class DirectFiles:
    """Files read past the page cache where the file system allows it, and held to be those whose headers were read."""

    def __init__(self, records: Iterable[TensorRecord]) -> None:
        """records: of the tensors to be read. Raises LinkError if a file cannot be opened, or is another by now."""
        self._stamps = {record.path: record.stamp for record in records}
        self._files: dict[Path, int] = {}
        self._bounce = threading.local()
        try:
            for path in sorted(self._stamps):
                self._files[path] = _open(path)
                self.check(path)
        except LinkError:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def fill(self, path: Path, start: int, into: Tensor, need: int) -> None:
        """Read from byte `start`, which begins a page, into page-aligned memory until at least `need` bytes are there.

        Raises LinkError if the file fails or ends early.
        """
        fill(into, need, self._files[path], start, str(path))

    def bounced(self, path: Path, start: int, nbytes: int) -> Tensor:
        """(nbytes,) uint8 from any byte of a file, until the next call in this thread. Raises LinkError as `fill`."""
        lead = start % PAGE
        block = self._bounce_block(align_up(lead + nbytes, PAGE))
        self.fill(path, start - lead, block, lead + nbytes)
        return block[lead : lead + nbytes]

    def _bounce_block(self, nbytes: int) -> Tensor:
        if getattr(self._bounce, "block", None) is None or len(self._bounce.block) < nbytes:
            self._bounce.block = host_block(nbytes)
        block: Tensor = self._bounce.block
        return block[:nbytes]

    def check(self, path: Path) -> None:
        """Raises LinkError if a file is another than when its header was read: other weights give another text."""
        stamp = self._stamps[path]
        if stamp is not None and stamp_of(os.fstat(self._files[path])) != stamp:
            raise LinkError(f"{path} changed while in use", change="run again")


class DiskTier:
    """Blocks that are ranges of safetensors files.

    A direct read can only put a byte where the file offset and the memory address agree modulo a page. So a block keeps
    its tensors at the phase they have in the file, and nothing is copied; only where that would leave a tensor at an
    address its dtype cannot have does a block go through a bounce buffer into a packed layout.
    """

    def __init__(
        self, layers: Sequence[Sequence[TensorRecord]], settings: ReadSettings | None = None, packed: bool = False
    ) -> None:
        """layers: per block its tensors' records; packed: read through bounce buffers into packed layouts all the same."""
        self.settings = settings or ReadSettings()
        self.n_parallel = self.settings.n_parallel
        self._blocks = [_plan(records, self.settings.request_nbytes, packed) for records in layers]
        self._files = DirectFiles(itertools.chain.from_iterable(layers))

    def layout(self, i: int) -> Layout:
        """How block i lies in memory after it has been read."""
        return self._blocks[i][0]

    def nbytes(self, i: int) -> int:
        """Bytes that reading block i moves; its layout is longer by what alignment costs."""
        return sum(part.nbytes for part in self._blocks[i][1])

    def read_nbytes(self, i: int) -> int:
        """Bytes that are read for block i: more where it has parts of rows."""
        return sum(part.span for part in self._blocks[i][1])

    def reads(self, i: int, into: Tensor) -> list[Read]:
        """One read for each request; each raises LinkError if the file fails or ends early.

        A packed block may be read into memory of a card.
        """
        return [partial(self._read, part, into) for part in self._blocks[i][1]]

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _read(self, part: _Part, into: Tensor) -> int:
        lead = part.start % PAGE
        need, at = lead + part.nbytes, part.offset - lead
        if part.phased and (into.data_ptr() + at) % PAGE == 0:
            # The pages at both ends may hold bytes of other tensors of this block: those are read as they are in the file.
            self._files.fill(part.path, part.start - lead, into[at : at + align_up(need, PAGE)], need)
        else:
            piece = part.nbytes // part.n_pieces
            content = self._files.bounced(part.path, part.start, part.span)
            pieces = content.as_strided((part.n_pieces, piece), (part.stride, 1))
            into[part.offset : part.offset + part.nbytes].view(part.n_pieces, piece).copy_(pieces)
        self._files.check(part.path)
        return part.nbytes


def fill(into: Tensor, need: int, file: int, start: int, name: str) -> None:
    """Read a file from byte `start` on into memory until at least `need` bytes are there; directly where both are at a page.

    Raises LinkError.
    """
    view, n = memoryview(into.numpy().data), 0
    while n < need:
        try:
            got = os.preadv(file, [view[n:]], start + n)
        except OSError as error:
            problem = f"reading {name} at byte {start + n} failed: {error.strerror}"
            raise LinkError(problem, change="check the disk and the file") from error
        if got == 0:
            problem = f"{name} ends at byte {start + n}"
            raise LinkError(problem, need=f"{start + need} bytes", change="it changed while in use: run again")
        n += got


def _plan(records: Sequence[TensorRecord], request_nbytes: int, packed: bool) -> tuple[Layout, tuple[_Part, ...]]:
    """The layout of a block, and the requests that fill it."""
    packed = packed or any(record.n_pieces > 1 for record in records)
    runs = _runs(records)
    layout = _phased_layout(runs)
    # Where tensors of one block are moved or packed, they keep the order of the records: that in which they are used.
    entries = {entry.name: entry for entry in layout.entries}
    layout = Layout(tuple(entries[record.key] for record in records), layout.nbytes)
    phased = not packed and not any(entry.offset % entry.dtype.itemsize for entry in layout.entries)
    if not phased:
        layout = packed_layout((record.key, record.shape, record.stored_dtype()) for record in records)
        runs = [_Run(record.path, record.start, record.stop, (record,)) for record in records]
    offset_of = {entry.name: entry.offset for entry in layout.entries}
    parts = (_parts(run, offset_of[run.records[0].key], request_nbytes, phased) for run in runs)
    return layout, tuple(itertools.chain.from_iterable(parts))


def _runs(records: Sequence[TensorRecord]) -> list[_Run]:
    """The ranges of files that hold these tensors, those next to each other joined."""
    runs: list[_Run] = []
    for record in sorted(records, key=lambda record: (record.path, record.start)):
        last = runs[-1] if runs else None
        if last and last.path == record.path and record.start - last.stop <= _JOIN:
            runs[-1] = _Run(last.path, last.start, record.stop, (*last.records, record))
        else:
            runs.append(_Run(record.path, record.start, record.stop, (record,)))
    return runs


def _phased_layout(runs: Sequence[_Run]) -> Layout:
    entries, end = [], 0
    for run in runs:
        base = align_up(end, PAGE) + run.start % PAGE
        entries += [
            TensorEntry(record.key, base + record.start - run.start, record.shape, record.stored_dtype())
            for record in run.records
        ]
        end = base + run.stop - run.start
    # The last page of a direct read is written whole.
    return Layout(tuple(entries), align_up(end, PAGE))


def _parts(run: _Run, offset: int, request_nbytes: int, phased: bool) -> list[_Part]:
    """Cut a run where requests end, at multiples of the request size in the file, or between pieces."""
    if (one := run.records[0]).n_pieces > 1:
        piece = one.stop - one.start
        n = max(request_nbytes // one.stride, 1) if one.stride - piece <= _JOIN else 1
        counts = [(first, min(n, one.n_pieces - first)) for first in range(0, one.n_pieces, n)]
        return [
            _Part(run.path, run.start + first * one.stride, k * piece, offset + first * piece, False, k, one.stride)
            for first, k in counts
        ]
    cuts = [run.start, *range(align_up(run.start + 1, request_nbytes), run.stop, request_nbytes), run.stop]
    return [_Part(run.path, a, b - a, offset + a - run.start, phased) for a, b in itertools.pairwise(cuts)]


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pass  # a file system without direct I/O, such as tmpfs
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise LinkError(f"{path}: {error.strerror}", change="check that the file is there and may be read") from error
