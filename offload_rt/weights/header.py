"""Reading the header of a safetensors file, trusting nothing in it."""

import json
import math
import os
import struct
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload_rt.errors import CheckpointError

# The safetensors library's own bound on a header.
_MAX_HEADER = 100_000_000
# Larger than any file, smaller than what Python refuses to print.
_MOST, _MOST_DIMENSIONS = 2**63, 64
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class TensorRecord:
    """Where a tensor lies: bytes [start, stop) of a file.

    dtype  the file's own word for it
    stamp  of the file when its header was read, see `stamp_of`; None: of no file
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int
    stamp: tuple[int, int] | None = None

    def torch_dtype(self) -> torch.dtype:
        """Raises CheckpointError for a dtype that weights of this project cannot have."""
        if self.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.path.name}: tensor {self.name!r} has dtype {self.dtype!r}",
                need="one of " + ", ".join(_DTYPES),
                change="use an unquantised checkpoint",
            )
        return _DTYPES[self.dtype]


def stamp_of(status: os.stat_result) -> tuple[int, int]:
    """What changes when the content of a file does: its size, and the time it was written."""
    return status.st_size, status.st_mtime_ns


def read_header(path: Path) -> dict[str, TensorRecord]:
    """The tensors of a safetensors file, by name.

    Raises CheckpointError for a header that is damaged, repeats a key, overlaps or leaves holes, or promises more or
    fewer bytes than the file has.
    """
    try:
        with path.open("rb") as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            size = stamp[0]
            raw = _header_bytes(file.read(8), size, file.read, path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    records = _records(_parse(raw, path), path, 8 + len(raw), size)
    return {name: replace(record, stamp=stamp) for name, record in records.items()}


def _header_bytes(prefix: bytes, size: int, read: Any, path: Path) -> bytes:
    if len(prefix) < 8:
        raise CheckpointError(f"{path.name} is not a safetensors file", need="at least 8 bytes", have=str(size))
    length = struct.unpack("<Q", prefix)[0]
    if length > _MAX_HEADER or 8 + length > size:
        raise CheckpointError(
            f"{path.name} is damaged or not a safetensors file",
            need=f"a header of {length} bytes",
            have=f"a file of {size} bytes",
            change="download it again",
        )
    return read(length)


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated = [key for key, n in Counter(key for key, _ in pairs).items() if n > 1]
        if repeated:
            raise CheckpointError(f"{path.name}: key {min(repeated)!r} stands twice in the header")
        return dict(pairs)

    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: the header is not JSON ({error})", change="download it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name}: the header is not a JSON object", change="download it again")
    return header


def _records(header: dict[str, Any], path: Path, data_start: int, size: int) -> dict[str, TensorRecord]:
    records = {name: _record(name, entry, path, data_start) for name, entry in header.items() if name != "__metadata__"}
    position = data_start
    for record in sorted(records.values(), key=lambda record: (record.start, record.stop)):
        if record.start != position:
            raise CheckpointError(
                f"{path.name}: tensor {record.name!r} overlaps another or leaves a hole", change="download it again"
            )
        position = record.stop
    if size != position:
        raise CheckpointError(
            f"{path.name} is {'cut short' if size < position else 'longer than its header says'}",
            need=f"{position} bytes",
            have=f"{size}",
            change="download it again",
        )
    return records


def _record(name: str, entry: Any, path: Path, data_start: int) -> TensorRecord:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = len(shape) <= _MOST_DIMENSIONS and all(type(n) is int and 0 <= n < _MOST for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole or not isinstance(dtype, str) or begin > end:
        raise CheckpointError(f"{path.name}: the header's entry for {name!r} is malformed", change="download it again")
    record = TensorRecord(name, dtype, shape, path, data_start + begin, data_start + end)
    if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
        raise CheckpointError(
            f"{path.name}: tensor {name!r} of shape {list(shape)} and dtype {dtype}",
            need=f"{math.prod(shape) * _DTYPES[dtype].itemsize} bytes",
            have=f"{end - begin}",
            change="download it again",
        )
    return record
