"""Layers encoded without loss, see `offload_rt.ops.lossless`, and the files of a sidecar, which
hold one each.
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError
from offload_rt.ops import lossless
from offload_rt.ops.lossless import CHUNK, CHUNKS, KIND_OF, RAW
from offload_rt.system.files import write_atomically
from offload_rt.weights.header import TensorRecord, read_header
from offload_rt.weights.layout import (
    Layout,
    PackedLayer,
    TensorEntry,
    align_up,
    decoded_layout,
    host_block,
    packed_layout,
)

_VERSION = 2
# What does not shrink below this stays as it is.
_WORTH = 0.95
# Of a sample: pages of each tensor, and how many times the escapes found in it are reckoned with.
_PAGES = 16
_PAGE_WEIGHTS = 2048
_CAUTION = 2


@dataclass(frozen=True)
class Coding:
    """How a tensor is encoded: its kind, and the bytes of each chunk."""

    kind: int
    sizes: tuple[int, ...]

    def admits(self, n: int, nbytes: int) -> bool:
        """Whether a chunk of n weights can have so many bytes."""
        least, most = (
            (align_up(n, 8),) * 2
            if self.kind == RAW
            else (lossless.chunk_nbytes(n, m) for m in (0, n))
        )
        return least <= nbytes <= most and nbytes % 8 == 0


@dataclass(frozen=True, eq=False)
class EncodedLayer:
    """How a layer lies encoded in a block: a table of its chunks, then the chunks.

    layout   of the layer when it is decoded
    codings  of its tensors, in order
    chunks   (n,) of CHUNKS, whose sources count from the beginning of the block
    nbytes   of the block
    """

    layout: Layout
    codings: tuple[Coding, ...]
    chunks: np.ndarray
    nbytes: int

    @classmethod
    def of(cls, layout: Layout, codings: Sequence[Coding]) -> "EncodedLayer":
        """Of the tensors of a layout, which are encoded so."""
        chunks = np.zeros(sum(len(one.sizes) for one in codings), CHUNKS)
        k = 0
        source = align_up(chunks.nbytes)
        for entry, coding in zip(layout.entries, codings, strict=True):
            target = entry.offset
            unit = 1 if coding.kind == RAW else entry.dtype.itemsize
            for n_weights, nbytes in zip(cut(entry, coding.kind), coding.sizes, strict=True):
                chunks[k] = (source, target, n_weights, nbytes, coding.kind)
                source = source + nbytes
                target = target + n_weights * unit
                k = k + 1
        return cls(layout, tuple(codings), chunks, align_up(source))

    @property
    def table_nbytes(self) -> int:
        """Bytes before the first chunk."""
        return align_up(self.chunks.nbytes)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of all chunks."""
        return int(self.chunks["nbytes"].sum())

    @property
    def block_layout(self) -> Layout:
        """Of the encoded block."""
        return Layout((TensorEntry("encoded", 0, (self.nbytes,), DType.UINT8),), self.nbytes)

    def write_table(self, block: Tensor) -> None:
        """Write the table to where the block begins."""
        block.numpy()[: self.chunks.nbytes] = self.chunks.view(np.uint8)


@dataclass(frozen=True)
class EncodedImage(PackedLayer):
    """The bytes of one layer, encoded."""

    encoded: EncodedLayer


def cut(entry: TensorEntry, kind: int) -> list[int]:
    """The weights of each chunk of a tensor; bytes if it is RAW."""
    total, most = (entry.nbytes, 2 * CHUNK) if kind == RAW else (math.prod(entry.shape), CHUNK)
    return [min(most, total - at) for at in range(0, total, most)]


def encode_layer(image: PackedLayer, n_threads: int, is_raw: bool = False) -> EncodedImage:
    """Encode a layer in memory of the host, whose tensors are aligned, to fresh memory; is_raw:
    leave it as it is.
    """
    content = image.block.numpy()
    entries = [
        (entry, content[entry.offset : entry.offset + entry.nbytes])
        for entry in image.layout.entries
    ]
    layout = packed_layout((entry.name, entry.shape, entry.dtype) for entry, _ in entries)
    with ThreadPoolExecutor(n_threads, "encodes") as pool:
        codings = []
        for entry, tensor in entries:
            kind = RAW if is_raw else KIND_OF.get(entry.dtype, RAW)
            escapes = pool.map(partial(_n_escapes, kind), _parts(entry, tensor, kind))
            codings.append(_coding(entry, [*escapes]))
        encoded = EncodedLayer.of(layout, codings)
        block = host_block(encoded.nbytes)
        encoded.write_table(block)
        parts = (_parts(*one, coding.kind) for one, coding in zip(entries, codings, strict=True))
        list(
            pool.map(
                partial(_encode_chunk, block.numpy()), encoded.chunks, chain.from_iterable(parts)
            )
        )
    return EncodedImage(block, encoded.block_layout, encoded)


def _parts(entry: TensorEntry, tensor: np.ndarray, kind: int) -> list[np.ndarray]:
    """The bytes (nbytes,) of a tensor, cut into its chunks."""
    most = 2 * CHUNK if kind == RAW else entry.dtype.itemsize * CHUNK
    return [tensor[at : at + most] for at in range(0, len(tensor), most)]


def _n_escapes(kind: int, part: np.ndarray) -> int | None:
    """The escapes of a chunk; None where it cannot be encoded."""
    words = lossless.words_of(part, kind)
    return None if words is None else lossless.n_escapes(lossless.count_others(words, kind))


def _coding(entry: TensorEntry, escapes: Sequence[int | None]) -> Coding:
    """Of a tensor whose chunks have so many escapes, if that shrinks it."""
    kind = KIND_OF.get(entry.dtype, RAW)
    if None not in escapes:
        sizes = tuple(
            lossless.chunk_nbytes(n, one or 0)
            for n, one in zip(cut(entry, kind), escapes, strict=True)
        )
        if sum(sizes) < _WORTH * entry.nbytes:
            return Coding(kind, sizes)
    return Coding(RAW, tuple(align_up(n, 8) for n in cut(entry, RAW)))


def _encode_chunk(block: np.ndarray, chunk: np.void, part: np.ndarray) -> None:
    """Write one chunk to an encoded block of zeros."""
    out = block[chunk["source"] : chunk["source"] + chunk["nbytes"]]
    kind = int(chunk["kind"])
    words = lossless.words_of(part, kind)
    if words is None:
        out[: len(part)] = part
    else:
        lossless.encode(words, kind, out)


def chunk_digest(part: np.ndarray, kind: int) -> int:
    """A checksum of the bytes of a chunk and of how they are to be read."""
    return lossless.digest(part) ^ kind


def estimate(records: Sequence[TensorRecord]) -> int:
    """Bytes that a layer takes encoded, from some pages of each tensor: rather too many.

    Raises CheckpointError where a file cannot be read.
    """
    layout = decoded_layout(records)
    codings = []
    for record, entry in zip(records, layout.entries, strict=True):
        kind = KIND_OF.get(entry.dtype, RAW)
        sample = _sample(record, entry.dtype.itemsize)
        found = _n_escapes(kind, sample)
        share = (
            None
            if found is None
            else min(_CAUTION * found * entry.dtype.itemsize / len(sample), 1.0)
        )
        codings.append(
            _coding(
                entry, [None if share is None else math.ceil(share * n) for n in cut(entry, kind)]
            )
        )
    return EncodedLayer.of(layout, codings).nbytes


def _sample(record: TensorRecord, itemsize: int) -> np.ndarray:
    """Some stretches of a tensor (n,) uint8, spread over it."""
    n = min(_PAGE_WEIGHTS * itemsize, record.stop - record.start)
    starts = (
        np.linspace(0, record.stop - record.start - n, _PAGES).astype(np.int64)
        // itemsize
        * itemsize
    )
    try:
        with record.path.open("rb", buffering=0) as file:
            pieces = []
            for start in starts.tolist():
                file.seek(record.start + start)
                pieces.append(np.frombuffer(file.read(n), np.uint8))
    except OSError as error:
        raise CheckpointError(f"{record.path}: {error.strerror or error}") from error
    return np.concatenate(pieces)


@dataclass(frozen=True, eq=False)
class SidecarLayer:
    """A layer in a file of a sidecar: its chunks lie one behind the other in the bytes of
    `payload`.

    digests  (n,) uint64, of each chunk
    """

    encoded: EncodedLayer
    payload: TensorRecord
    digests: np.ndarray

    def records(self, tensors: Sequence[TensorRecord]) -> tuple[TensorRecord, ...]:
        """Where these tensors, which lie as they are, lie in the file."""
        starts = accumulate(
            (sum(one.sizes) for one in self.encoded.codings), initial=self.payload.start
        )
        own = self.payload
        return tuple(
            replace(
                one,
                path=own.path,
                stamp=own.stamp,
                start=at,
                stop=at + one.nbytes,
                n_pieces=1,
                stride=0,
            )
            for one, at in zip(tensors, starts, strict=False)
        )


def layer_path(sidecar: Path, i: int) -> Path:
    """The file of layer i."""
    return sidecar / f"layer-{i:05}.safetensors"


def write_layer(path: Path, identity: str, i: int, image: EncodedImage) -> None:
    """Write layer i of the checkpoint of this identity, whole or not at all. Raises OSError."""
    content = image.block.numpy()
    encoded = image.encoded
    index = np.zeros((len(encoded.chunks), 3), np.uint64)  # kind, bytes and digest of each chunk
    for row, (source, _, _, nbytes, kind) in zip(index, encoded.chunks.tolist(), strict=True):
        row[:] = kind, nbytes, chunk_digest(content[source : source + nbytes], kind)
    payload = content[encoded.table_nbytes : encoded.table_nbytes + encoded.payload_nbytes]
    write_atomically(path, save({"index": index, "payload": payload}, _label(identity, i)))


def _label(identity: str, i: int) -> dict[str, str]:
    # one entry: the library writes several in any order
    return {"layer": f"{i} of {identity}, version {_VERSION}"}


def read_layer(path: Path, identity: str, i: int, layout: Layout) -> SidecarLayer:
    """Layer i of the checkpoint of this identity, whose content is checked as it is read.

    Raises CheckpointError for a file that is not there, damaged, or of another checkpoint.
    """
    records = read_header(path)
    if records.keys() != {"index", "payload"} or records["index"].dtype != "U64":
        raise refuse(path, "is no layer of a sidecar")
    with safe_open(path, "np") as file:
        label = file.metadata()
        index = file.get_tensor("index")
    if label != _label(identity, i):
        raise refuse(path, f"is not layer {i} of this checkpoint")
    if index.shape[1:] != (3,):
        raise refuse(path, "is damaged")
    codings = []
    rest = index
    payload = records["payload"]
    for entry in layout.entries:
        kind = int(rest[0, 0]) if len(rest) else -1
        cuts = cut(entry, kind) if kind in (RAW, KIND_OF.get(entry.dtype)) else []
        own = rest[: len(cuts)]
        rest = rest[len(cuts) :]
        coding = Coding(kind, tuple(own[:, 1].tolist()))
        if not cuts or len(own) < len(cuts) or not all(map(coding.admits, cuts, coding.sizes)):
            raise refuse(path, "is damaged")
        codings.append(coding)
    encoded = EncodedLayer.of(layout, codings)
    if len(rest) or encoded.payload_nbytes != payload.stop - payload.start:
        raise refuse(path, "is damaged")
    return SidecarLayer(encoded, payload, index[:, 2])


def refuse(path: Path, problem: str) -> CheckpointError:
    """An error about a file of a sidecar."""
    return CheckpointError(
        f"{path} {problem}", change="run offload-rt convert again, or use --link-format raw"
    )
