"""Layers read directly from safetensors shards, bypassing the page cache if possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import itemgetter
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
class _Part:
    """Bytes [start, start + nbytes) of a file, to be stored at `offset` of a block."""

    path: Path
    start: int
    nbytes: int
    offset: int
    phased: bool  # offsets in block and file agree modulo a page: whole pages are read in place
    n_pieces: int = 1  # strided pieces, for a part of a matrix's columns
    stride: int = 0  # distance between pieces of nbytes / n_pieces bytes

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
        records = [record for block in layers for record in block]
        self._files = DirectFiles(records, mirrors)
        n_folders = len({path.resolve().parent for path in {record.path for record in records}})
        self.n_parallel = self.settings.n_parallel * self._files.n_disks * n_folders

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
            pages = into[at : at + align_up(need, PAGE)]
            self._files.fill(part.path, part.start - lead, pages, need)
        else:
            piece = part.nbytes // part.n_pieces
            content = self._files.bounced(part.path, part.start, part.span)
            pieces = content.as_strided((part.n_pieces, piece), (part.stride, 1))
            into[part.offset : part.offset + part.nbytes].view(part.n_pieces, piece).copy_(pieces)
        return part.nbytes


def _plan(block: BlockRecord, request_nbytes: int, packed: bool) -> tuple[Layout, list[_Part]]:
    records = block.tensors
    packed = packed or any(record.n_pieces > 1 for record in records)
    runs: list[list[TensorRecord]] = []  # tensors of a file with small gaps
    for record in sorted(records, key=lambda record: (record.path, record.start)):
        last = runs[-1][-1] if runs else None
        if last and last.path == record.path and record.start - last.stop <= _JOIN:
            runs[-1].append(record)
        else:
            runs.append([record])
    entries, nbytes = _phased_entries(runs)
    # Keep the order of the records in the layout: the order of use.
    layout = Layout(tuple(entries[record.key] for record in records), nbytes, block.matrices)
    phased = not packed and not any(entry.offset % entry.dtype.itemsize for entry in layout.entries)
    if not phased:
        layout = block.layout
        runs = [[record] for record in records]
    by_folder: dict[Path, list[_Part]] = {}
    for run in runs:
        parts = _parts(run, layout.by_name[run[0].key].offset, request_nbytes, phased)
        by_folder.setdefault(run[0].path.resolve().parent, []).extend(parts)
    return layout, _alternating(list(by_folder.values()))


def _alternating(folders: Sequence[Sequence[_Part]]) -> list[_Part]:
    """Order requests so that all folders, which may be on different disks, end at once."""
    places = [((i + 0.5) / len(parts), part) for parts in folders for i, part in enumerate(parts)]
    return [part for _, part in sorted(places, key=itemgetter(0))]


def _phased_entries(runs: Sequence[list[TensorRecord]]) -> tuple[dict[str, TensorEntry], int]:
    """Place runs at their offsets modulo a page; return entries by name, and bytes."""
    entries = dict[str, TensorEntry]()
    end = 0
    for run in runs:
        base = align_up(end, PAGE) + run[0].start % PAGE - run[0].start
        for record in run:
            offset = base + record.start
            entry = TensorEntry(record.key, offset, record.shape, record.stored_dtype())
            entries[record.key] = entry
        end = base + run[-1].stop
    # Direct reads write the last page completely.
    return entries, align_up(end, PAGE)


def _parts(run: list[TensorRecord], offset: int, request_nbytes: int, phased: bool) -> list[_Part]:
    """Cut a run at multiples of the request size in the file, or between pieces."""
    path, start, stop = run[0].path, run[0].start, run[-1].stop
    if run[0].n_pieces > 1:
        piece = stop - start
        stride = run[0].stride
        most = max(request_nbytes // stride, 1) if stride - piece <= _JOIN else 1
        parts = []
        for i in range(0, run[0].n_pieces, most):
            n = min(most, run[0].n_pieces - i)
            at = offset + i * piece
            parts.append(_Part(path, start + i * stride, n * piece, at, False, n, stride))
        return parts
    between = range(align_up(start + 1, request_nbytes), stop, request_nbytes)
    return [
        _Part(path, a, b - a, offset + a - start, phased)
        for a, b in pairwise((start, *between, stop))
    ]
