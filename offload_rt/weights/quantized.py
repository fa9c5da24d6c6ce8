"""What the quantised formats share: matrices that are dequantised one at a time, just before their
product.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError, UnsupportedModelError
from offload_rt.packing import REFERENCE_NBYTES, Order, Packing
from offload_rt.weights.formats import Source, StoredTensor, WeightFormat, dense
from offload_rt.weights.header import FLOATS
from offload_rt.weights.layout import Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt.ops.dequantize import BlockMatrix, CodedMatrix, ZeroCodes

# Bytes of the largest tensor that is read to see whether it holds zeros.
_MOST_ZEROS = 1 << 26
_FINER = (
    "the checkpoint is made for quantised {}; here they are kept in the dtype of the computation,"
    " which is finer"
)


@dataclass(frozen=True)
class ZeroPoints:
    """Zero points, stored in an order of codes as a matrix of the shape of the scales.

    plus  what is added to them, modulo 2^bits
    """

    tensor: StoredTensor
    order: Order
    plus: int = 0

    def of(self, tensors: Mapping[str, Tensor]) -> ZeroCodes:
        """The zero points in stored tensors by name."""
        from offload_rt.ops.dequantize import ZeroCodes

        return ZeroCodes(tensors[self.tensor.name], self.order, self.plus)


@dataclass(frozen=True)
class NestedScales:
    """Scales that are codes themselves: table[code] times the scale of each `block` of them, plus
    `offset`, in float32.

    first  of a part of a matrix, its first scale among those of the whole
    """

    scales: StoredTensor
    table: StoredTensor
    block: int
    offset: float
    first: int = 0


@dataclass(frozen=True)
class Matrix(ABC):
    """How a matrix is stored; its tensors have names behind that of the module, such as
    "weight_packed".

    shape  (n_out, n_in)
    codes  the tensor that tells that the matrix is there
    """

    shape: tuple[int, int]
    codes: StoredTensor

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """All its tensors."""
        return (self.codes,)

    @abstractmethod
    def encoded(self, tensors: Mapping[str, Tensor]) -> CodedMatrix | BlockMatrix:
        """Return the matrix for `ops.linear`, in tensors by their names of `stored`."""


@dataclass(frozen=True)
class QuantizedMatrix(Matrix):
    """One of codes and scales; where the codes are packed by columns or for AWQ, they are of its
    transpose.

    product  dtype of code times scale; None: that of the scales
    """

    packing: Packing
    scales: StoredTensor
    zeros: ZeroPoints | None = None
    groups: StoredTensor | None = None
    product: DType | None = None
    nested: NestedScales | None = None

    @property
    def stored(self) -> tuple[StoredTensor, ...]:
        """See `Matrix.stored`."""
        zeros = None if self.zeros is None else self.zeros.tensor
        nested = () if self.nested is None else (self.nested.scales, self.nested.table)
        parts = (self.codes, self.scales, zeros, self.groups, *nested)
        return tuple(one for one in parts if one is not None)

    def encoded(self, tensors: Mapping[str, Tensor]) -> CodedMatrix:
        """See `Matrix.encoded`."""
        import torch  # not at the top: a plan computes nothing

        from offload_rt.ops.dequantize import POWERS_OF_TWO, CodedMatrix

        stored_shape = self.shape[::-1] if self.packing.groups_rows else self.shape
        grid = tuple(
            -(-n // size) for n, size in zip(stored_shape, self.packing.block, strict=True)
        )
        scales = self._scales(tensors).view(grid)
        is_power = scales.dtype in POWERS_OF_TWO
        product = (
            self.product.torch if self.product else torch.float32 if is_power else scales.dtype
        )
        return CodedMatrix(
            self.shape, self.packing,
            tensors[self.codes.name].view(self.packing.words(*stored_shape)), scales,
            None if self.zeros is None else self.zeros.of(tensors),
            None if self.groups is None else tensors[self.groups.name], product,
        )  # fmt: skip

    def _scales(self, tensors: Mapping[str, Tensor]) -> Tensor:
        scales = tensors[self.scales.name]
        if self.nested is None:
            return scales
        first = self.nested.first
        block = self.nested.block
        n = scales.numel()
        outer = tensors[self.nested.scales.name][first // block : -(-(first + n) // block)]
        spread = outer.repeat_interleave(block)[first % block :][:n]
        return tensors[self.nested.table.name][scales.int()] * spread + self.nested.offset


class QuantizedFormat(WeightFormat):
    """Which tensors are quantised is what the file says: a matrix that lies in it as floats is used
    as it is.
    """

    # Tensors of a checkpoint that are not read, by the last part of their names.
    unused: frozenset[str] = frozenset()
    # Those that are not read if they hold zeros, which some tools write where there is nothing.
    unused_zeros: frozenset[str] = frozenset()

    def __init__(self, quantization_config: object = None, notice: str = "") -> None:
        super().__init__(quantization_config, notice)
        self._matrices: dict[str, set[Matrix]] = {}
        self._of_layout: dict[Layout, dict[str, Matrix]] = {}

    @abstractmethod
    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> Matrix | None:
        """How the matrix of this module (n_out, n_in), which the source does not hold as floats, is
        stored.

        None where the config has it unquantised. Raises CheckpointError where the source
        contradicts the config.
        """

    def stored(
        self, name: str, shape: tuple[int, ...], dtype: DType | None, source: Source
    ) -> tuple[StoredTensor, ...]:
        """See `WeightFormat.stored`."""
        record = source.find(name)
        module = name.removesuffix(".weight")
        if len(shape) == 2 and module != name and (record is None or record.dtype not in FLOATS):
            matrix = self.matrix(module, (shape[0], shape[1]), source)
            if matrix is not None:
                self._matrices.setdefault(module, set()).add(matrix)
                return tuple(
                    one.of(module)._replace(dtype=one.dtype or dtype) for one in matrix.stored
                )
        return super().stored(name, shape, dtype, source)

    def is_unused(self, name: str, source: Source) -> bool:
        """See `WeightFormat.is_unused`."""
        kind = name.rpartition(".")[2]
        record = source.find(name)
        if (
            kind not in self.unused_zeros
            or record is None
            or record.stop - record.start > _MOST_ZEROS
        ):
            return kind in self.unused
        if record.stamp is None:  # of a header on the hub
            return True
        content = source.read(StoredTensor(name, record.shape, record.stored_dtype()))
        return not content.view(-1).view(DType.UINT8.torch).any()

    def view(self, layout: Layout, block: Tensor, dtype: torch.dtype) -> View:
        """See `WeightFormat.view`."""
        return View(self, layout, block, dtype)

    def scratch_nbytes(self, stored: StoredTensor, n_rows: int, dtype: DType) -> int:
        """A dequantised matrix, and what the reference takes besides."""
        module, _, part = stored.name.rpartition(".")
        own = (part, stored.shape, stored.dtype)
        found = ((one.codes, math.prod(one.shape)) for one in self._matrices.get(module, ()))
        numbers = max(
            (n for codes, n in found if (codes.key, codes.shape, codes.dtype) == own), default=0
        )
        if numbers:
            return numbers * dtype.itemsize + REFERENCE_NBYTES
        return super().scratch_nbytes(stored, n_rows, dtype) if part in ("weight", "bias") else 0

    def matrices(self, layout: Layout) -> dict[str, Matrix]:
        """The quantised matrices of a block, by module."""
        if layout not in self._of_layout:
            entries = {(entry.name, entry.shape): entry.dtype for entry in layout.entries}

            def is_there(module: str, matrix: Matrix) -> bool:
                found = [
                    (entries.get((one.of(module).key, one.shape)), one.dtype)
                    for one in matrix.stored
                ]
                return all(dtype is not None and wanted in (None, dtype) for dtype, wanted in found)

            # Without its groups a matrix is a part of one with them.
            self._of_layout[layout] = {
                module: max(there, key=lambda one: len(one.stored))
                for module, kinds in self._matrices.items()
                if (there := [one for one in kinds if is_there(module, one)])
            }
        return self._of_layout[layout]


class View(dense.View):
    """The weights of one layer, see `WeightFormat.view`."""

    def __init__(
        self, format: QuantizedFormat, layout: Layout, block: Tensor, dtype: torch.dtype
    ) -> None:
        super().__init__(layout, block, dtype, format.is_batch_invariant)
        self._format, self._matrices = format, format.matrices(layout)

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """See `LayerWeights.rows`; only these rows are dequantised, if the matrix is stored by
        rows.
        """
        import torch

        from offload_rt.ops.linear import dequantize

        weight = self._weight(name)
        if isinstance(weight, torch.Tensor):
            return super().rows(ids, name)
        out = torch.empty(len(ids) * weight.shape[1], dtype=self._dtype, device=ids.device)
        return dequantize(weight, out, ids)

    def _weight(self, name: str) -> Tensor | CodedMatrix | BlockMatrix:
        matrix = self._matrices.get(name)
        return super()._weight(name) if matrix is None else matrix.encoded(self._stored(name))

    def _stored(self, name: str) -> dict[str, Tensor]:
        return {one.name: self._tensors[one.of(name).key] for one in self._matrices[name].stored}


def finer_notice(what: list[str]) -> str:
    """That these are not quantised here although the checkpoint asks for it; empty if there are
    none.
    """
    return _FINER.format(" and ".join(what)) if what else ""


def refuse(problem: str, need: str = "") -> UnsupportedModelError:
    """An error about the quantization_config."""
    return UnsupportedModelError(f"config.json: quantization_config: {problem}", need=need)


def of_method(name: str) -> Callable[[object], bool]:
    """Whether a quantization_config is of this quant_method: the `matches` of a format."""
    return lambda config: isinstance(config, dict) and config.get("quant_method") == name


def _first(config: Mapping[str, Any], names: tuple[str, ...], default: object) -> tuple[str, Any]:
    """The first of these keys that the config has, and its value."""
    found = ((name, config[name]) for name in names if config.get(name) is not None)
    return next(found, (names[0], default))


def setting(
    config: Mapping[str, Any], names: tuple[str, ...], default: object, allowed: tuple[object, ...]
) -> Any:
    """The value of the first of these keys that the config has. Raises UnsupportedModelError if it
    is none of `allowed`.
    """
    name, value = _first(config, names, default)
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise refuse(f"{name} is {value!r}", need="one of " + ", ".join(map(str, allowed)))
    return value


def group_size(config: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    """Numbers that share a scale; -1: all of a row. Raises UnsupportedModelError for what is no
    such number.
    """
    name, value = _first(config, names, default)
    if type(value) is not int or not (value == -1 or 1 <= value <= 1 << 24):
        raise refuse(f"{name} is {value!r}", need="a positive number, or -1")
    return value


def two_numbers(config: Mapping[str, Any], name: str) -> tuple[int, int]:
    """A pair of positive numbers. Raises UnsupportedModelError if the value of the key is none."""
    value = config.get(name)
    if not (
        isinstance(value, list)
        and len(value) == 2
        and all(type(one) is int and one > 0 for one in value)
    ):
        raise refuse(f"{name} is {value!r}", need="two positive numbers")
    return value[0], value[1]


def groups_of(
    source: Source, module: str, stored: StoredTensor, size: int, n_groups: int
) -> StoredTensor | None:
    """The tensor of the groups of inputs, unless it is not there or only says that they lie one
    behind the other.

    Raises CheckpointError where it names a group that is not there.
    """
    full = stored.of(module)
    record = source.find(full.name)
    if record is None or record.stamp is None:  # of a header on the hub: most only say that
        return None
    import torch

    groups = source.read(full)
    if (
        torch.equal(groups, (torch.arange(len(groups)) // size).to(groups.dtype))
        or (groups == -1).all()
    ):
        return None
    if int(groups.min()) < 0 or int(groups.max()) >= n_groups:
        raise CheckpointError(
            f"tensor {source.prefix + full.name!r} names groups that are not "
            f"there", need=f"0 to {n_groups - 1}",
            have=f"{int(groups.min())} to "
                 f"{int(groups.max())}", change="download the checkpoint again",
        )  # fmt: skip
    return stored


def shape_of(source: Source, name: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The shape that a tensor has if it is one of these, else the first of them."""
    record = source.find(name)
    return record.shape if record is not None and record.shape in shapes else shapes[0]


def matches_pattern(pattern: str, name: str) -> bool:
    """Whether a regular expression of a config matches the beginning of a name. Raises
    UnsupportedModelError if it is none.
    """
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise refuse(f"{pattern!r} is no regular expression ({error})") from error
