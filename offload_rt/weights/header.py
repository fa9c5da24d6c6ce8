"""Offsets of tensors in safetensors files; the library validates files, the header has offsets."""

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError
from offload_rt.packing import BLOCKS

FLOATS = {"F64": DType.FLOAT64, "F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}
_DTYPES = FLOATS | {
    "F8_E4M3": DType.FLOAT8_E4M3FN, "F8_E5M2": DType.FLOAT8_E5M2, "F8_E8M0": DType.FLOAT8_E8M0FNU,
    "I64": DType.INT64, "I32": DType.INT32, "I16": DType.INT16, "I8": DType.INT8, "U8": DType.UINT8,
    "BOOL": DType.BOOL, **dict.fromkeys(BLOCKS, DType.UINT8),
}  # fmt: skip


@dataclass(frozen=True)
class TensorRecord:
    """Bytes [start, stop) of a file, or `n_pieces` pieces of this size at distances of `stride`."""

    name: str
    dtype: str  # in the notation of the file
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int
    key: str  # name within a block, without the layer prefix
    # `stamp_of` the file when its header was read; None without a local file
    stamp: tuple[int, int] | None = None
    n_pieces: int = 1
    stride: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return (self.stop - self.start) * self.n_pieces

    def rows(self, first: int, n: int) -> "TensorRecord":
        """Return the record of n rows of the tensor."""
        nbytes = (self.stop - self.start) // self.shape[0]
        start = self.start + first * nbytes
        return replace(self, shape=(n, *self.shape[1:]), start=start, stop=start + n * nbytes)

    def read(self, first: int, n: int) -> bytes:
        """Read n bytes of the tensor from byte `first` on; raises CheckpointError."""
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.start + first)
                return file.read(n)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror or error}") from error

    def stored_dtype(self) -> DType:
        """Return the dtype of the elements; raises CheckpointError if torch has no such dtype."""
        if self.dtype not in _DTYPES:
            problem = f"{self.path.name}: tensor {self.name!r} has dtype {self.dtype!r}"
            raise CheckpointError(problem, need="one of " + ", ".join(_DTYPES))
        return _DTYPES[self.dtype]


def stamp_of(status: os.stat_result) -> tuple[int, int]:
    """Return size and modification time of a file, to detect changes."""
    return status.st_size, status.st_mtime_ns


def read_header(path: Path) -> dict[str, TensorRecord]:
    """Return the tensors of a safetensors file; raises CheckpointError if it is damaged."""
    try:
        with path.open("rb") as file:
            stamp = stamp_of(os.fstat(file.fileno()))
            # maps the file and checks its header; "pt" would map a writable copy
            with safe_open(path, "np"):
                n_header = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(n_header))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, struct.error) as error:
        problem = f"{path.name} is damaged or not a safetensors file: {error}"
        raise CheckpointError(problem, change="download it again") from error
    header.pop("__metadata__", None)
    records = {}
    for name, entry in header.items():
        start, stop = (8 + n_header + offset for offset in entry["data_offsets"])
        shape = tuple(entry["shape"])
        records[name] = TensorRecord(name, entry["dtype"], shape, path, start, stop, name, stamp)
    return records


def header_of(records: Iterable[TensorRecord]) -> bytes:
    """Return the bytes of a safetensors file in front of these tensors, in their order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for record in records:
        stop = start + record.nbytes
        entry = {"dtype": record.dtype, "shape": record.shape, "data_offsets": (start, stop)}
        header[record.name] = entry
        start = stop
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)  # aligns the data
    return struct.pack("<Q", len(content)) + content
