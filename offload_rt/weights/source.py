"""Tensors of a checkpoint by name, as a format searches and reads them when a checkpoint opens."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError
from offload_rt.weights.header import FLOATS, TensorRecord

if TYPE_CHECKING:
    from torch import Tensor

OTHER_CONFIG = "use the config.json that belongs to these weights"


class StoredTensor(NamedTuple):
    """Tensor of a file or block; a `dtype` of None allows every compute dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: DType | None

    @property
    def tensors(self) -> "tuple[StoredTensor, ...]":
        """The tensor itself, as `Matrix.tensors`."""
        return (self,)


@dataclass(frozen=True)
class Source:
    """Records of a checkpoint by name; `prefix` is the layer prefix that `find` prepends.

    whole  for a slice of a matrix: source and shape of the matrix, and first output of the slice
    """

    records: Mapping[str, TensorRecord]
    prefix: str = ""
    whole: "tuple[Source, tuple[int, ...], int] | None" = None

    def find(self, name: str) -> TensorRecord | None:
        """Return the record of a tensor, or None."""
        return self.records.get(self.prefix + name)

    def expect(self, stored: StoredTensor) -> TensorRecord:
        """Return the record of a tensor; raises CheckpointError for another shape or dtype."""
        name = self.prefix + stored.name
        record = self.find(stored.name)
        if record is None:
            change = f"download the checkpoint again, or {OTHER_CONFIG}"
            raise CheckpointError(f"tensor {name!r} is missing from the weights", change=change)
        tensor = f"{record.path.name}: tensor {name!r}"
        if record.shape != stored.shape:
            need, have = (str(list(shape)) for shape in (stored.shape, record.shape))
            problem = f"{tensor} is misshapen"
            raise CheckpointError(problem, need=need, have=have, change=OTHER_CONFIG)
        allowed = FLOATS.values() if stored.dtype is None else (stored.dtype,)
        if record.stored_dtype() not in allowed:
            need = "one of " + ", ".join(allowed)
            change = f"use an unquantised checkpoint, or {OTHER_CONFIG}"
            raise CheckpointError(f"{tensor} has dtype {record.dtype!r}", need=need, change=change)
        return replace(record, key=stored.name)

    def read(self, stored: StoredTensor) -> "Tensor":
        """Read a small tensor; raises CheckpointError as `expect`, or if reading fails."""
        import torch  # not at the top: a plan reads sizes alone

        record = self.expect(stored)
        if record.stamp is None:  # its header was read on the hub
            problem = f"the plan needs tensor {record.name!r}, but only headers were fetched"
            raise CheckpointError(problem, change="download the checkpoint first")
        content = bytearray(record.read(0, record.nbytes))
        if len(content) != record.nbytes:
            problem = f"{record.path.name} has become shorter"
            raise CheckpointError(problem, change="download it again")
        dtype = record.stored_dtype().torch
        if not content:
            return torch.empty(stored.shape, dtype=dtype)
        return torch.frombuffer(content, dtype=dtype).view(stored.shape)
