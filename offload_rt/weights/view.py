"""Weights of a block, read in place: plain tensors and quantised matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload_rt.models.layers import LayerWeights
from offload_rt.weights.layout import Layout
from offload_rt.weights.matrix import QuantizedMatrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt.ops import dequantize, linear_cpu
    from offload_rt.ops import linear as products
    from offload_rt.ops.dequantize import Weight
    from offload_rt.ops.few_rows import Stack
    from offload_rt.ops.linear_cpu import MatrixStack
else:
    from offload_rt.lazy import dequantize, linear_cpu, products, torch


@dataclass(frozen=True)
class Arithmetic:
    """Products on a CPU that differ from exact products of rows by themselves."""

    # torch may multiply many rows of 16 bits; results may depend on other rows
    allows_torch: bool = False
    rounds_inputs: bool = False  # to 8 bits with integer codes, as llama.cpp does


_EXACT = Arithmetic()


class _Tensors(dict[str, "Tensor"]):
    """Tensors of a block, created at first use: a mixture has hundreds."""

    def __init__(self, layout: Layout, block: Tensor) -> None:
        super().__init__()
        self._entries = layout.by_name
        self._block = block

    def __missing__(self, name: str) -> Tensor:
        self[name] = made = self._entries[name].view(self._block)
        return made


class View(LayerWeights):
    """Weights of a layer, see `WeightFormat.view`; other dtypes are converted at each use."""

    def __init__(
        self, layout: Layout, block: Tensor, dtype: torch.dtype, arithmetic: Arithmetic = _EXACT
    ) -> None:
        self._tensors = _Tensors(layout, block)
        self._vectors: dict[str, Tensor] = {}
        self._matrices: dict[str, Weight] = {}
        # by the first matrix of the first expert
        self._expert_stacks: dict[str, MatrixStack | None] = {}
        self.layout = layout
        self.block = block
        self._dtype = dtype
        self._arithmetic = arithmetic

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self._tensors[name].to(dtype or self._dtype)

    def vector(self, name: str) -> Tensor:
        """See `LayerWeights.vector`; kept, because norms of GGUF files are float32."""
        if name not in self._vectors:
            self._vectors[name] = super().vector(name)
        return self._vectors[name]

    def linear(self, x: Tensor, name: str) -> Tensor:
        allows_torch = self._arithmetic.allows_torch
        return products.linear(x, self._weight(name), self._bias(name), allows_torch)

    def linears(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
        """See `LayerWeights.linears`; a single product on a GPU, to save launches, if possible."""
        weight = self.fused(names) if x.is_cuda else None
        bias = self.fused(names, "bias") if weight is not None else None
        if weight is None or (
            bias is None and any(f"{name}.bias" in self.layout.by_name for name in names)
        ):
            weights = [self._weight(name) for name in names]
            biases = [self._bias(name) for name in names]
            return tuple(products.linears(x, weights, biases, self._arithmetic.allows_torch))
        widths = [len(self._tensors[f"{name}.weight"]) for name in names]
        return tuple(torch.split(torch.nn.functional.linear(x, weight, bias), widths, dim=1))

    def stored(self, name: str) -> tuple[Weight, Tensor | None] | None:
        """See `LayerWeights.stored`; torch may multiply instead."""
        return None if self._arithmetic.allows_torch else (self._weight(name), self._bias(name))

    def linear_experts(
        self, x: Tensor, ends: Sequence[int], names: Sequence[Sequence[str]], experts: Sequence[int]
    ) -> Tensor:
        """See `LayerWeights.linear_experts`; in one call of the CPU library if it serves all."""
        key = names[0][0]
        if key not in self._expert_stacks:
            weights = [[self._weight(name) for name in group] for group in names]
            self._expert_stacks[key] = products.stack(x, weights)
        stack = self._expert_stacks[key]
        if stack is not None:
            return linear_cpu.linear_groups(x, ends, stack, experts)
        return super().linear_experts(x, ends, names, experts)

    def fused(self, names: Sequence[str], part: str = "weight") -> Tensor | None:
        entry = self.layout.fused([f"{name}.{part}" for name in names])
        if entry is None or entry.dtype.torch != self._dtype:
            return None
        return entry.view(self.block)

    def stacked(self, names: Sequence[str]) -> Stack | None:
        matrices = [self.layout.matrices.get(name) for name in names]
        first = matrices[0]
        if first is None:
            weights = [f"{name}.weight" for name in names]
            return self._stack(self._tensors[weights[0]], weights)
        if not isinstance(first, QuantizedMatrix) or first.nested is not None:
            return None
        coded = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
        weight = first.weight(self._tensors)
        codes = self._stack(weight.codes, [matrix.codes.name for matrix in coded])
        scales = self._stack(weight.scales, [matrix.scales.name for matrix in coded])
        is_uniform = [matrix.packing for matrix in coded] == [first.packing] * len(names)
        if not is_uniform or codes is None or scales is None:
            return None
        zeros = weight.zeros
        if zeros is not None:
            points = [matrix.zeros.tensor.name for matrix in coded if matrix.zeros is not None]
            packed = self._stack(zeros.codes, points)
            if len(points) < len(names) or packed is None:
                return None
            zeros = replace(zeros, codes=packed)
        return replace(weight, codes=codes, scales=scales, zeros=zeros)

    def _stack(self, first: Tensor, names: Sequence[str]) -> Tensor | None:
        """Return the named tensors as one, each with shape and strides of `first`."""
        distance = self.layout.distance(names)
        if distance is None:
            return None
        strides = distance // first.element_size(), *first.stride()
        return first.as_strided((len(names), *first.shape), strides)

    def rows(self, ids: Tensor, name: str) -> Tensor:
        """See `LayerWeights.rows`; without the CPU library, dequantises complete AWQ words."""
        weight = self._weight(name)
        if isinstance(weight, torch.Tensor):
            return torch.nn.functional.embedding(ids, weight).to(self._dtype)
        out = torch.empty(len(ids) * weight.shape[1], dtype=self._dtype, device=ids.device)
        is_awq = isinstance(weight, dequantize.CodedMatrix) and weight.packing.order == "awq"
        if not is_awq or linear_cpu.serves(out, weight):
            return products.dequantize(weight, out, ids)
        words = ids[:, None] // 8 * 8 + torch.arange(8, device=ids.device)
        rows = words.flatten().clamp(max=weight.shape[0] - 1)
        values = products.dequantize(weight, out.new_empty(8 * len(out)), rows)
        return values[torch.arange(0, len(rows), 8, device=ids.device) + ids % 8]

    def _bias(self, name: str) -> Tensor | None:
        key = f"{name}.bias"
        return self._tensors[key].to(self._dtype) if key in self.layout.by_name else None

    def _weight(self, name: str) -> Weight:
        if name not in self._matrices:
            matrix = self.layout.matrices.get(name)
            if matrix is None:
                self._matrices[name] = self._tensors[f"{name}.weight"]
            else:
                weight = matrix.weight(self._tensors)
                rounds = self._arithmetic.rounds_inputs
                self._matrices[name] = replace(weight, rounds_inputs=rounds)
        return self._matrices[name]
