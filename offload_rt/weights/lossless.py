"""Layers encoded without loss, see `offload_rt.ops.lossless`, and the files of a sidecar, which hold one each."""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload_rt.errors import CheckpointError
from offload_rt.ops import lossless
from offload_rt.ops.lossless import CHUNK, CHUNKS, KIND_OF, RAW, WINDOW
from offload_rt.system.files import write_atomically
from offload_rt.weights.header import TensorRecord, read_header
from offload_rt.weights.layout import Layout, PackedLayer, TensorEntry, align_up, host_block, packed_layout
from offload_rt.weights.source import Source, StoredTensor

_VERSION = 1
# What does not shrink below this stays as it is.
_WORTH = 0.95
_INDEX = "index", "sha256"
# Of a sample: pages of each tensor, and how many times the escapes found in it are reckoned with.
_PAGES, _PAGE_WEIGHTS, _CAUTION = 16, 2048, 2


@dataclass(frozen=True)
class Coding:
    """How a tensor is encoded: kind and base as `lossless.decode` takes them, and the bytes of each chunk."""

    kind: int
    base: int
    sizes: tuple[int, ...]


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
        chunks, k = np.zeros(sum(len(one.sizes) for one in codings), CHUNKS), 0
        source = align_up(chunks.nbytes)
        for entry, coding in zip(layout.entries, codings, strict=True):
            target, unit = entry.offset, 1 if coding.kind == RAW else entry.dtype.itemsize
            for n_weights, nbytes in zip(cut(entry, coding.kind), coding.sizes, strict=True):
                chunks[k] = (source, target, n_weights, nbytes, coding.kind, coding.base)
                source, target, k = source + nbytes, target + n_weights * unit, k + 1
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
        return Layout((TensorEntry("encoded", 0, (self.nbytes,), torch.uint8),), self.nbytes)

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


def decoded_layout(records: Iterable[TensorRecord]) -> Layout:
    """How a layer of these tensors lies once it is decoded."""
    return packed_layout((one.key, one.shape, one.torch_dtype()) for one in records)


def encode_layer(image: PackedLayer, n_threads: int) -> EncodedImage:
    """Encode a layer in memory of the host, whose tensors are aligned, to fresh memory."""
    content = image.block.numpy()
    entries = [(entry, content[entry.offset : entry.offset + entry.nbytes]) for entry in image.layout.entries]
    layout = packed_layout((entry.name, entry.shape, entry.dtype) for entry, _ in entries)
    with ThreadPoolExecutor(n_threads, "encodes") as pool:
        codings = [_coding(entry, tensor, pool) for entry, tensor in entries]
        encoded = EncodedLayer.of(layout, codings)
        block = host_block(encoded.nbytes)
        encoded.write_table(block)
        parts = (_parts(*one, coding.kind) for one, coding in zip(entries, codings, strict=True))
        list(pool.map(partial(_encode_chunk, block.numpy()), encoded.chunks, chain.from_iterable(parts)))
    return EncodedImage(block, encoded.block_layout, encoded)


def _parts(entry: TensorEntry, tensor: np.ndarray, kind: int) -> list[np.ndarray]:
    """The bytes (nbytes,) of a tensor, cut into its chunks."""
    most = 2 * CHUNK if kind == RAW else entry.dtype.itemsize * CHUNK
    return [tensor[at : at + most] for at in range(0, len(tensor), most)]


def _raw(entry: TensorEntry) -> Coding:
    return Coding(RAW, 0, tuple(align_up(n, 8) for n in cut(entry, RAW)))


def _coding(entry: TensorEntry, tensor: np.ndarray, pool: ThreadPoolExecutor) -> Coding:
    kind = KIND_OF.get(entry.dtype, RAW)
    if kind == RAW:
        return _raw(entry)

    def count(part: np.ndarray) -> np.ndarray | None:
        words = lossless.words_of(part, kind)
        return None if words is None else lossless.count_others(words, kind)

    counts = [one for one in pool.map(count, _parts(entry, tensor, kind)) if one is not None]
    if len(counts) < len(cut(entry, kind)):
        return _raw(entry)
    base, _ = lossless.best_window(np.sum(counts, axis=0), kind)
    step = lossless.step_of(kind)
    window = slice(base + step, base + WINDOW * step + 1, step)
    sizes = (lossless.chunk_nbytes(int(one.sum()), int(one.sum() - one[window].sum())) for one in counts)
    coded = Coding(kind, base, tuple(sizes))
    return coded if sum(coded.sizes) < _WORTH * entry.nbytes else _raw(entry)


def _encode_chunk(block: np.ndarray, chunk: np.void, part: np.ndarray) -> None:
    """Write one chunk to an encoded block of zeros."""
    out = block[chunk["source"] : chunk["source"] + chunk["nbytes"]]
    kind = int(chunk["kind"])
    words = None if kind == RAW else lossless.words_of(part, kind)
    if words is None:
        out[: len(part)] = part
    else:
        lossless.encode(words, kind, int(chunk["base"]), out)


def chunk_digest(part: np.ndarray, kind: int, base: int) -> int:
    """A checksum of the bytes of a chunk and of how they are to be read."""
    return lossless.digest(part) ^ (kind << 8 | base)


def estimate(records: Sequence[TensorRecord]) -> int:
    """Bytes that a layer takes encoded, from some pages of each tensor: rather too many.

    Raises CheckpointError where a file cannot be read.
    """
    layout, codings = decoded_layout(records), []
    for record, entry in zip(records, layout.entries, strict=True):
        coding, kind = _raw(entry), KIND_OF.get(entry.dtype, RAW)
        sample = None if kind == RAW else lossless.words_of(_sample(record, entry.dtype.itemsize), kind)
        if sample is not None:
            _, n_escapes = lossless.best_window(lossless.count_others(sample, kind), kind)
            share = min(_CAUTION * n_escapes / len(sample), 1.0)
            sizes = tuple(lossless.chunk_nbytes(n, math.ceil(share * n)) for n in cut(entry, kind))
            coding = Coding(kind, 0, sizes) if sum(sizes) < _WORTH * entry.nbytes else coding
        codings.append(coding)
    return EncodedLayer.of(layout, codings).nbytes


def _sample(record: TensorRecord, itemsize: int) -> np.ndarray:
    """Some stretches of a tensor (n,) uint8, spread over it."""
    n = min(_PAGE_WEIGHTS * itemsize, record.stop - record.start)
    starts = np.linspace(0, record.stop - record.start - n, _PAGES).astype(np.int64) // itemsize * itemsize
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
    """A layer in a file of a sidecar: its chunks lie one behind the other in the bytes of `payload`.

    digests  (n,) uint64, of each chunk
    """

    encoded: EncodedLayer
    payload: TensorRecord
    digests: np.ndarray


def layer_path(sidecar: Path, i: int) -> Path:
    """The file of layer i."""
    return sidecar / f"layer-{i:05}.safetensors"


def write_layer(path: Path, identity: str, i: int, image: EncodedImage) -> None:
    """Write layer i of the checkpoint of this identity, whole or not at all. Raises OSError."""
    content, encoded, chunks = image.block.numpy(), image.encoded, image.encoded.chunks
    places = zip(
        chunks["source"].tolist(),
        chunks["nbytes"].tolist(),
        chunks["kind"].tolist(),
        chunks["base"].tolist(),
        strict=True,
    )
    digests = [chunk_digest(content[at : at + nbytes], kind, base) for at, nbytes, kind, base in places]
    tensors = [(one.kind, one.base, one.sizes) for one in encoded.codings]
    found = {"version": _VERSION, "checkpoint": identity, "layer": i, "tensors": tensors, "digests": digests}
    index = json.dumps(found).encode()
    payload = content[encoded.table_nbytes : encoded.table_nbytes + encoded.payload_nbytes]
    parts: dict[str, bytes | memoryview] = {
        "payload": payload.data,
        "index": index,
        "sha256": hashlib.sha256(index).digest(),
    }
    header, at = {}, 0
    for name, part in parts.items():
        header[name] = {"dtype": "U8", "shape": [len(part)], "data_offsets": [at, at + len(part)]}
        at += len(part)
    text = json.dumps(header).encode()
    text += b" " * (align_up(8 + len(text), 64) - 8 - len(text))
    write_atomically(path, [struct.pack("<Q", len(text)), text, *parts.values()])


def read_layer(path: Path, identity: str, i: int, layout: Layout) -> SidecarLayer:
    """Layer i of the checkpoint of this identity, whose content is checked as it is read.

    Raises CheckpointError for a file that is not there, damaged, or of another checkpoint.
    """
    records = read_header(path)
    if records.keys() != {"payload", *_INDEX} or any(one.dtype != "U8" for one in records.values()):
        raise refuse(path, "is no layer of a sidecar")
    source = Source(records)
    index, sha256 = (source.read(StoredTensor(name, records[name].shape, torch.uint8)) for name in _INDEX)
    if hashlib.sha256(index.numpy().tobytes()).digest() != sha256.numpy().tobytes():
        raise refuse(path, "is damaged")
    try:
        found = json.loads(index.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise refuse(path, "is damaged") from error
    expected = {"version": _VERSION, "checkpoint": identity, "layer": i}
    if not isinstance(found, dict) or any(found.get(name) != value for name, value in expected.items()):
        raise refuse(path, f"is not layer {i} of this checkpoint")
    tensors = found.get("tensors")
    if not isinstance(tensors, list) or len(tensors) != len(layout.entries):
        raise refuse(path, "is damaged")
    codings = [_read_coding(path, entry, one) for entry, one in zip(layout.entries, tensors, strict=True)]
    encoded, payload = EncodedLayer.of(layout, codings), records["payload"]
    digests = _numbers(path, found.get("digests"), len(encoded.chunks), (1 << 64) - 1)
    if encoded.payload_nbytes != payload.stop - payload.start:
        raise refuse(path, "is damaged")
    return SidecarLayer(encoded, payload, np.array(digests, np.uint64))


def _read_coding(path: Path, entry: TensorEntry, found: Any) -> Coding:
    """How a tensor is encoded. Raises CheckpointError where the index of a file says what cannot be."""
    if not isinstance(found, list) or len(found) != 3:
        raise refuse(path, "is damaged")
    kind, base = _numbers(path, found[:2], 2, 255)
    if kind not in (RAW, KIND_OF.get(entry.dtype)) or base > 255 - WINDOW * lossless.step_of(kind):
        raise refuse(path, "is damaged")
    cuts = cut(entry, kind)
    sizes = _numbers(path, found[2], len(cuts), 4 * CHUNK)
    for n, size in zip(cuts, sizes, strict=True):
        least, most = (align_up(n, 8),) * 2 if kind == RAW else (lossless.chunk_nbytes(n, m) for m in (0, n))
        if not least <= size <= most or size % 8:
            raise refuse(path, "is damaged")
    return Coding(kind, base, tuple(sizes))


def _numbers(path: Path, value: Any, n: int, most: int) -> list[int]:
    """n whole numbers from 0 to `most`. Raises CheckpointError for anything else."""
    if isinstance(value, list) and len(value) == n and all(type(one) is int and 0 <= one <= most for one in value):
        return value
    raise refuse(path, "is damaged")


def refuse(path: Path, problem: str) -> CheckpointError:
    """An error about a file of a sidecar."""
    return CheckpointError(f"{path} {problem}", change="run offload-rt convert again, or use --link-format raw")
