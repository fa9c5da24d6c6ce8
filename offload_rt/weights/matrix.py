"""Quantised matrices: stored tensors and parameters, dequantised just before a product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from offload_rt.dtypes import DType
from offload_rt.packing import Order, Packing, product_nbytes
from offload_rt.weights.source import StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt.ops import dequantize
    from offload_rt.ops.dequantize import BlockMatrix, CodedMatrix
else:
    from offload_rt.lazy import dequantize, torch


@dataclass(frozen=True)
class Matrix(ABC):
    """Matrix of a module, shape (n_out, n_in), in one or several tensors of a block."""

    shape: tuple[int, int]

    @property
    def has_integers(self) -> bool:
        """Whether a weight is an integer code times a scale, as rounded inputs need it."""
        return False

    @property
    @abstractmethod
    def tensors(self) -> tuple[StoredTensor, ...]:
        """All tensors, named by module and part."""

    @abstractmethod
    def weight(self, tensors: Mapping[str, Tensor]) -> CodedMatrix | BlockMatrix:
        """Return the argument of `ops.linear`, given the tensors of a block by name."""

    def scratch_nbytes(self, dtype: DType, has_card: bool) -> int:
        """Return the temporary bytes of a product in `dtype`."""
        return product_nbytes(*self.shape, dtype.itemsize, has_card)

    def n_coded_rows(self, dtype: DType) -> float:
        """Return the most rows in `dtype` that a GPU multiplies by the codes without decoding."""
        return 0


@dataclass(frozen=True)
class ZeroPoints:
    """Zero points packed in `order`, shaped as the scales; `plus` is added modulo 2^bits."""

    tensor: StoredTensor
    order: Order
    plus: int = 0


@dataclass(frozen=True)
class NestedScales:
    """Quantised scales: table[code] * (scale of each `block` of codes) + `offset`, in float32."""

    scales: StoredTensor
    table: StoredTensor
    block: int
    offset: float
    first: int = 0  # for a slice, index of its first scale among the scales of the matrix

    def decode(self, codes: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the scales (n,) float32 of codes (n,) uint8."""
        stop = self.first + codes.numel()
        outer = tensors[self.scales.name][self.first // self.block : -(-stop // self.block)]
        spread = outer.repeat_interleave(self.block)[self.first % self.block :][: codes.numel()]
        return tensors[self.table.name][codes.int()] * spread + self.offset


@dataclass(frozen=True)
class QuantizedMatrix(Matrix):
    """Codes and scales. Packing orders `columns` and `awq` store the transpose."""

    codes: StoredTensor
    packing: Packing
    scales: StoredTensor
    zeros: ZeroPoints | None = None
    groups: StoredTensor | None = None  # group index of each input, instead of consecutive groups
    product: DType | None = None  # dtype of code * scale; None for the dtype of the scales
    nested: NestedScales | None = None

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        zeros = None if self.zeros is None else self.zeros.tensor
        nested = () if self.nested is None else (self.nested.scales, self.nested.table)
        parts = (self.codes, self.scales, zeros, self.groups, *nested)
        return tuple(part for part in parts if part is not None)

    @property
    def has_integers(self) -> bool:
        """See `Matrix.has_integers`: int8, as `has_bytes` of csrc/linear_cpu.h."""
        is_plain = self.packing.order in ("plain", "rows") and not (self.zeros or self.groups)
        step = self.packing.block[1]
        is_even = self.shape[1] % 32 == 0 and (step % 32 == 0 or step >= self.shape[1])
        is_int8 = self.packing.bits == 8 and self.codes.dtype != DType.FLOAT8_E4M3FN
        return is_plain and is_even and is_int8

    def n_coded_rows(self, dtype: DType) -> float:
        zeros = None if self.zeros is None else self.zeros.order
        is_direct = self.groups is None and dtype.itemsize == 2
        return self.packing.n_coded_rows(self.shape[1], zeros) if is_direct else 0

    @cached_property
    def _stored_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = self.shape[::-1] if self.packing.is_transposed else self.shape
        grid = tuple(-(-n // size) for n, size in zip(shape, self.packing.block, strict=True))
        return self.packing.code_shape(*shape), grid

    def weight(self, tensors: Mapping[str, Tensor]) -> CodedMatrix:
        words, grid = self._stored_shapes
        scales = tensors[self.scales.name]
        if self.nested is not None:
            scales = self.nested.decode(scales, tensors)
        product = torch.float32 if scales.dtype in dequantize.POWERS_OF_TWO else scales.dtype
        product = self.product.torch if self.product else product
        zeros = None
        if self.zeros is not None:
            packed = tensors[self.zeros.tensor.name]
            zeros = dequantize.ZeroCodes(packed, self.zeros.order, self.zeros.plus)
        groups = None if self.groups is None else tensors[self.groups.name]
        codes = tensors[self.codes.name].view(words)
        return dequantize.CodedMatrix(
            self.shape, self.packing, codes, scales.view(grid), zeros, groups, product
        )
