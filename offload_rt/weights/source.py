"""The tensors of a checkpoint, by name: what a format finds, expects and reads while a checkpoint
is opened.
"""

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
    """A tensor of a file or block. A `dtype` of None stands for any that a computation can be done
    in.

    alias  its name in a block, where that is another than in the file
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType | None
    alias: str | None = None

    @property
    def key(self) -> str:
        """Its name in a block."""
        return self.alias or self.name

    def of(self, module: str) -> "StoredTensor":
        """The same with the name of a module before its own."""
        return self._replace(
            name=f"{module}.{self.name}", alias=self.alias and f"{module}.{self.alias}"
        )


@dataclass(frozen=True)
class Source:
    """Tensors under their names without `prefix`, which is that of a layer.

    whole  where they are those of a part of a matrix: the source of that, its shape, and its output
           that the part begins with
    """

    records: Mapping[str, TensorRecord]
    prefix: str = ""
    whole: "tuple[Source, tuple[int, ...], int] | None" = None

    def find(self, name: str) -> TensorRecord | None:
        """The record of a tensor; None where there is none."""
        return self.records.get(self.prefix + name)

    def expect(self, stored: StoredTensor) -> TensorRecord:
        """The record of a stored tensor. Raises CheckpointError if there is none of its shape and
        dtype.
        """
        name = self.prefix + stored.name
        record = self.find(stored.name)
        if record is None:
            raise CheckpointError(
                f"tensor {name!r} is missing from the weights",
                change=f"download the checkpoint again, or {OTHER_CONFIG}",
            )
        if record.shape != stored.shape:
            raise CheckpointError(
                f"{record.path.name}: tensor {name!r} is misshapen", need=str(list(stored.shape)),
                have=str(list(record.shape)), change=OTHER_CONFIG,
            )  # fmt: skip
        allowed = FLOATS.values() if stored.dtype is None else (stored.dtype,)
        if record.stored_dtype() not in allowed:
            raise CheckpointError(
                f"{record.path.name}: tensor {name!r} has dtype {record.dtype!r}",
                need="one of " + ", ".join(allowed),
                change=f"use an unquantised checkpoint, or {OTHER_CONFIG}",
            )
        return replace(record, key=stored.key)

    def read(self, stored: StoredTensor) -> "Tensor":
        """The content of a stored tensor, for small ones. Raises CheckpointError where `expect`
        does or it cannot be read.
        """
        import torch  # not at the top: a plan reads sizes alone

        record = self.expect(stored)
        if record.stamp is None:  # its header was read on the hub
            problem = (
                f"tensor {record.name!r} says how weights are stored, and no weight is fetched for"
                " a plan"
            )
            raise CheckpointError(problem, change="download the checkpoint first")
        try:
            with record.path.open("rb", buffering=0) as file:
                file.seek(record.start)
                content = bytearray(file.read(record.stop - record.start))
        except OSError as error:
            raise CheckpointError(f"{record.path}: {error.strerror or error}") from error
        if len(content) != record.stop - record.start:
            raise CheckpointError(
                f"{record.path.name} has become shorter", change="download it again"
            )
        if not content:
            return torch.empty(stored.shape, dtype=record.stored_dtype().torch)
        return torch.frombuffer(content, dtype=record.stored_dtype().torch).view(stored.shape)
