"""Lossless encoding of layers (`offload_rt.ops.lossless`), and sidecar files, one per layer."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save
from torch import Tensor

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError
from offload_rt.ops import lossless
from offload_rt.ops.lossless import CHUNK, CHUNKS, KIND_OF, RAW, chunk_nbytes
from offload_rt.system.files import write_atomically
from offload_rt.weights.header import TensorRecord, read_header
from offload_rt.weights.layout import (
    BlockRecord,
    Layout,
    PackedLayer,
    TensorEntry,
    align_up,
    host_block,
)

_VERSION = 2
# Maximum encoded share of a tensor's bytes; above it, the tensor stays raw.
_WORTH = 0.95
# Size estimates: pages sampled per tensor, weights per page, and safety factor for escapes.
_PAGES = 16
_PAGE_WEIGHTS = 2048
_CAUTION = 2
RECREATE = "run `offload-rt convert` again, or use --link-format=raw"


@dataclass(frozen=True)
class Coding:
    """Encoding of a tensor: its kind, and the bytes of each chunk."""

    kind: int
    sizes: tuple[int, ...]

    def admits(self, n: int, nbytes: int) -> bool:
        """Return whether `nbytes` is a possible size of a chunk with n weights."""
        if self.kind == RAW:
            return nbytes == align_up(n, 8)
        return chunk_nbytes(n, 0) <= nbytes <= chunk_nbytes(n, n) and nbytes % 8 == 0


@dataclass(frozen=True, eq=False)
class EncodedLayer:
    """Encoded layer in a block: a table of chunks, then the chunks."""

    layout: Layout  # of the decoded layer
    codings: tuple[Coding, ...]  # of each tensor, in order
    chunks: np.ndarray  # (n,) of CHUNKS, with sources relative to the start of the block
    nbytes: int  # of the block

    @classmethod
    def from_codings(cls, layout: Layout, codings: Sequence[Coding]) -> "EncodedLayer":
        """Place the chunks of all tensors of a layout."""
        chunks = []
        source = align_up(sum(len(coding.sizes) for coding in codings) * CHUNKS.itemsize)
        for entry, coding in zip(layout.entries, codings, strict=True):
            target = entry.offset
            unit = 1 if coding.kind == RAW else entry.dtype.itemsize
            for n_weights, nbytes in zip(cut(entry, coding.kind), coding.sizes, strict=True):
                chunks.append((source, target, n_weights, nbytes, coding.kind))
                source += nbytes
                target += n_weights * unit
        return cls(layout, tuple(codings), np.array(chunks, CHUNKS), align_up(source))

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
        """Layout of the encoded block."""
        return Layout((TensorEntry("encoded", 0, (self.nbytes,), DType.UINT8),), self.nbytes)

    def write_table(self, block: Tensor) -> None:
        """Write the table at the start of a block."""
        block.numpy()[: self.chunks.nbytes] = self.chunks.view(np.uint8)


@dataclass(frozen=True)
class EncodedImage(PackedLayer):
    """Bytes of an encoded layer."""

    encoded: EncodedLayer


def cut(entry: TensorEntry, kind: int) -> list[int]:
    """Return the number of weights in each chunk of a tensor; bytes for RAW."""
    total, size = (entry.nbytes, 2 * CHUNK) if kind == RAW else (math.prod(entry.shape), CHUNK)
    return [min(size, total - at) for at in range(0, total, size)]


def encode_layer(image: PackedLayer, n_threads: int, is_raw: bool = False) -> EncodedImage:
    """Encode a layer of aligned tensors to new host memory; is_raw keeps all tensors raw."""
    codings = []
    parts = list[np.ndarray]()
    with ThreadPoolExecutor(n_threads, "encodes") as pool:
        for entry in image.layout.entries:
            tensor = image.block[entry.offset : entry.offset + entry.nbytes].numpy()
            kind = RAW if is_raw else KIND_OF.get(entry.dtype, RAW)
            escapes = pool.map(partial(_n_escapes, kind), _parts(entry, tensor, kind))
            codings.append(_coding(entry, [*escapes]))
            parts += _parts(entry, tensor, codings[-1].kind)
        encoded = EncodedLayer.from_codings(image.layout.packed, codings)
        block = host_block(encoded.nbytes)
        encoded.write_table(block)
        list(pool.map(partial(_encode_chunk, block.numpy()), encoded.chunks, parts))
    return EncodedImage(block, encoded.block_layout, encoded)


def _parts(entry: TensorEntry, tensor: np.ndarray, kind: int) -> list[np.ndarray]:
    size = 2 * CHUNK if kind == RAW else entry.dtype.itemsize * CHUNK
    return [tensor[at : at + size] for at in range(0, len(tensor), size)]


def _n_escapes(kind: int, part: np.ndarray) -> int | None:
    """Return the number of escapes in a chunk, or None if it has no encoding."""
    words = lossless.words_of(part, kind)
    return None if words is None else lossless.n_escapes(words, kind)


def _coding(entry: TensorEntry, escapes: Sequence[int | None]) -> Coding:
    """Return the encoding of a tensor, given the escapes per chunk; raw if it does not shrink."""
    kind = KIND_OF.get(entry.dtype, RAW)
    if None not in escapes:
        chunks = zip(cut(entry, kind), escapes, strict=True)
        sizes = tuple(chunk_nbytes(n, n_escapes or 0) for n, n_escapes in chunks)
        if sum(sizes) < _WORTH * entry.nbytes:
            return Coding(kind, sizes)
    return Coding(RAW, tuple(align_up(n, 8) for n in cut(entry, RAW)))


def _encode_chunk(block: np.ndarray, chunk: np.void, part: np.ndarray) -> None:
    out = block[chunk["source"] : chunk["source"] + chunk["nbytes"]]
    kind = int(chunk["kind"])
    words = lossless.words_of(part, kind)
    if words is None:
        out[: len(part)] = part
    else:
        lossless.encode(words, kind, out)


def chunk_digest(part: np.ndarray, kind: int) -> int:
    """Return a checksum of a chunk's bytes and kind."""
    return lossless.digest(part) ^ kind


def estimate(layer: BlockRecord) -> int:
    """Estimate a layer's encoded bytes by pages, cautiously; raises CheckpointError."""
    codings = []
    for record, entry in zip(layer, layer.layout.entries, strict=True):
        kind = KIND_OF.get(entry.dtype, RAW)
        sample = _sample(record, entry.dtype.itemsize)
        n_sampled = _n_escapes(kind, sample)
        escapes: list[int | None] = [None]
        if n_sampled is not None:
            share = min(_CAUTION * n_sampled * entry.dtype.itemsize / len(sample), 1.0)
            escapes = [math.ceil(share * n) for n in cut(entry, kind)]
        codings.append(_coding(entry, escapes))
    return EncodedLayer.from_codings(layer.layout, codings).nbytes


def _sample(record: TensorRecord, itemsize: int) -> np.ndarray:
    """Read evenly spread pages of a tensor: (n,) uint8."""
    n_weights = (record.stop - record.start) // itemsize
    n = min(_PAGE_WEIGHTS, n_weights)
    starts = np.linspace(0, n_weights - n, _PAGES).astype(np.int64) * itemsize
    pages = b"".join(record.read(start, n * itemsize) for start in starts.tolist())
    return np.frombuffer(pages, np.uint8)


@dataclass(frozen=True, eq=False)
class SidecarLayer:
    """Layer in a sidecar file: its consecutive chunks, and a uint64 digest of each chunk."""

    encoded: EncodedLayer
    payload: TensorRecord
    digests: np.ndarray

    def raw_block(self, layer: BlockRecord) -> BlockRecord:
        """Return a layer's tensors, stored raw, as records of the sidecar file."""
        sizes = (sum(coding.sizes) for coding in self.encoded.codings)
        starts = accumulate(sizes, initial=self.payload.start)
        file: dict[str, Any] = {"path": self.payload.path, "stamp": self.payload.stamp}
        tensors = tuple(
            replace(record, start=start, stop=start + record.nbytes, n_pieces=1, stride=0, **file)
            for record, start in zip(layer, starts, strict=False)
        )
        return replace(layer, tensors=tensors)


def layer_path(sidecar: Path, i: int) -> Path:
    """Return the file of layer i."""
    return sidecar / f"layer-{i:05}.safetensors"


def write_layer(path: Path, identity: str, i: int, image: EncodedImage) -> None:
    """Write layer i of a checkpoint atomically. Raises OSError."""
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
    """Read the index of layer i, whose contents are checked when read; raises CheckpointError."""
    if not path.exists():
        raise _refuse(path, "is not there")
    records = read_header(path)
    if records.keys() != {"index", "payload"} or records["index"].dtype != "U64":
        raise _refuse(path, "is no layer of a sidecar")
    with safe_open(path, "np") as file:
        label = file.metadata()
        index = file.get_tensor("index")
    if label != _label(identity, i):
        raise _refuse(path, f"is not layer {i} of this checkpoint")
    codings = _codings(index, layout)
    encoded = EncodedLayer.from_codings(layout, codings) if codings else None
    payload = records["payload"]
    if not encoded or encoded.payload_nbytes != payload.nbytes:
        raise _refuse(path, "is damaged")
    return SidecarLayer(encoded, payload, index[:, 2])


def _codings(index: np.ndarray, layout: Layout) -> list[Coding] | None:
    """Return the encoding of each tensor by an index (n, 3), or None if the index is damaged."""
    if index.shape[1:] != (3,):
        return None
    codings = []
    for entry in layout.entries:
        kind = int(index[0, 0]) if len(index) else -1
        n_weights = cut(entry, kind) if kind in (RAW, KIND_OF.get(entry.dtype)) else []
        coding = Coding(kind, tuple(index[: len(n_weights), 1].tolist()))
        index = index[len(n_weights) :]
        is_complete = 0 < len(n_weights) == len(coding.sizes)
        if not is_complete or not all(map(coding.admits, n_weights, coding.sizes)):
            return None
        codings.append(coding)
    return None if len(index) else codings


def _refuse(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} {problem}", change=RECREATE)
