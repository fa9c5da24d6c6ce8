"""Layers read directly from safetensors shards, bypassing the page cache if possible."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from offload_rt.offload.mirrors import NO_MIRRORS, DirectFiles, Mirrors
from offload_rt.offload.tier import Read, Tier
from offload_rt.weights.header import TensorRecord
from offload_rt.weights.layout import PAGE, BlockRecord, Layout, TensorEntry, align_up

# Ranges with a smaller gap are read as a single range: the gap costs less than a request.
_JOIN = 64 << 10


@dataclass(frozen=True)
class ReadSettings:
    """Disk request settings; `request_nbytes` is a multiple of PAGE."""

    request_nbytes: int = 1 << 20
    n_parallel: int = 4


@dataclass(frozen=True)
class _Run:
    """Bytes [start, stop) of a file, with the contained tensors."""

    path: Path
    start: int
    stop: int
    records: tuple[TensorRecord, ...]


@dataclass(frozen=True)
class _Part:
    """Bytes [start, start + nbytes) of a file, to be stored at `offset` of a block.

    phased    offsets in block and file agree modulo a page, so whole pages can be read in place
    n_pieces  number of strided pieces, for a part of a matrix's columns
    stride    distance between pieces; each piece has nbytes / n_pieces bytes
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
        """Bytes to read, including gaps: pieces are short and rarely page-aligned."""
        return (self.n_pieces - 1) * self.stride + self.nbytes // self.n_pieces


class DiskTier(Tier):
    """Blocks that consist of ranges of safetensors files.

    Direct I/O requires equal file offset and memory address modulo a page. Therefore a block keeps
    each tensor's offset modulo a page, and nothing is copied. If a tensor would violate the
    alignment of its dtype, the block is read through a bounce buffer into a packed layout.
    """

    def __init__(
        self,
        layers: Sequence[BlockRecord],
        settings: ReadSettings | None = None,
        packed: bool = False,
        mirrors: Mirrors = NO_MIRRORS,
    ) -> None:
        """packed: always use packed layouts."""
        self.settings = settings or ReadSettings()
        self.blocks = layers
        self._blocks = [_plan(block, self.settings.request_nbytes, packed) for block in layers]
        self._files = DirectFiles(itertools.chain.from_iterable(layers), mirrors)
        paths = {record.path for record in itertools.chain.from_iterable(layers)}
        n_folders = len({path.resolve().parent for path in paths})
        self.n_parallel = self.settings.n_parallel * self._files.n_used * n_folders

    def layout(self, i: int) -> Layout:
        return self._blocks[i][0]

    def nbytes(self, i: int) -> int:
        """Return the content bytes of block i, without alignment."""
        return sum(part.nbytes for part in self._blocks[i][1])

    def read_nbytes(self, i: int) -> int:
        """Return the bytes read from disk for block i, including gaps between pieces."""
        return sum(part.span for part in self._blocks[i][1])

    def reads(self, i: int, into: Tensor) -> list[Read]:
        return [partial(self._read, part, into) for part in self._blocks[i][1]]

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _read(self, part: _Part, into: Tensor) -> int:
        lead = part.start % PAGE
        need = lead + part.nbytes
        at = part.offset - lead
        if part.phased and (into.data_ptr() + at) % PAGE == 0:
            # Boundary pages may contain further tensors of this block: they get equal content.
            self._files.fill(
                part.path, part.start - lead, into[at : at + align_up(need, PAGE)], need
            )
        else:
            piece = part.nbytes // part.n_pieces
            content = self._files.bounced(part.path, part.start, part.span)
            pieces = content.as_strided((part.n_pieces, piece), (part.stride, 1))
            into[part.offset : part.offset + part.nbytes].view(part.n_pieces, piece).copy_(pieces)
        return part.nbytes


def _plan(
    block: BlockRecord, request_nbytes: int, packed: bool
) -> tuple[Layout, tuple[_Part, ...]]:
    """Plan a block: its layout, and the requests that fill it."""
    records = block.tensors
    packed = packed or any(record.n_pieces > 1 for record in records)
    runs = _runs(records)
    entries, nbytes = _phased_entries(runs)
    # Keep the order of the records in the layout: the order of use.
    layout = Layout(tuple(entries[record.key] for record in records), nbytes, block.matrices)
    phased = not packed and not any(entry.offset % entry.dtype.itemsize for entry in layout.entries)
    if not phased:
        layout = block.layout
        runs = [_Run(record.path, record.start, record.stop, (record,)) for record in records]
    by_folder: dict[Path, list[_Part]] = {}
    for run in runs:
        parts = _parts(run, layout.by_name[run.records[0].key].offset, request_nbytes, phased)
        by_folder.setdefault(run.path.resolve().parent, []).extend(parts)
    return layout, _alternating(list(by_folder.values()))


def _alternating(folders: Sequence[Sequence[_Part]]) -> tuple[_Part, ...]:
    """Order requests so that all folders, which may be on different disks, end at once."""
    places = [
        ((i + 0.5) / len(parts), folder, i)
        for folder, parts in enumerate(folders)
        for i in range(len(parts))
    ]
    return tuple(folders[folder][i] for _, folder, i in sorted(places))


def _runs(records: Sequence[TensorRecord]) -> list[_Run]:
    """Group tensors into file ranges; merge close ranges."""
    runs: list[_Run] = []
    for record in sorted(records, key=lambda record: (record.path, record.start)):
        last = runs[-1] if runs else None
        if last and last.path == record.path and record.start - last.stop <= _JOIN:
            runs[-1] = _Run(last.path, last.start, record.stop, (*last.records, record))
        else:
            runs.append(_Run(record.path, record.start, record.stop, (record,)))
    return runs


def _phased_entries(runs: Sequence[_Run]) -> tuple[dict[str, TensorEntry], int]:
    """Place runs at their offsets modulo a page; return entries by name, and bytes."""
    entries = dict[str, TensorEntry]()
    end = 0
    for run in runs:
        base = align_up(end, PAGE) + run.start % PAGE
        for record in run.records:
            offset = base + record.start - run.start
            entry = TensorEntry(record.key, offset, record.shape, record.stored_dtype())
            entries[record.key] = entry
        end = base + run.stop - run.start
    # Direct reads write the last page completely.
    return entries, align_up(end, PAGE)


def _parts(run: _Run, offset: int, request_nbytes: int, phased: bool) -> list[_Part]:
    """Cut a run at multiples of the request size in the file, or between pieces."""
    record = run.records[0]
    if record.n_pieces > 1:
        piece = record.stop - record.start
        is_dense = record.stride - piece <= _JOIN
        n = max(request_nbytes // record.stride, 1) if is_dense else 1
        return [
            _Part(
                path=run.path,
                start=run.start + first * record.stride,
                nbytes=min(n, record.n_pieces - first) * piece,
                offset=offset + first * piece,
                phased=False,
                n_pieces=min(n, record.n_pieces - first),
                stride=record.stride,
            )
            for first in range(0, record.n_pieces, n)
        ]
    between = range(align_up(run.start + 1, request_nbytes), run.stop, request_nbytes)
    return [
        _Part(run.path, a, b - a, offset + a - run.start, phased)
        for a, b in itertools.pairwise((run.start, *between, run.stop))
    ]
