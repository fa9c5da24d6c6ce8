"""GGUF quantisation types: blocks along the inputs with embedded scales; one type per matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError
from offload_rt.models.layers import LayerWeights
from offload_rt.packing import BLOCKS
from offload_rt.weights.formats import Matrix, Source, StoredTensor
from offload_rt.weights.gguf import ROPE_FREQS, Storage
from offload_rt.weights.layout import Layout
from offload_rt.weights.quantized import QuantizedFormat
from offload_rt.weights.source import OTHER_CONFIG
from offload_rt.weights.view import View

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt.ops.dequantize import BlockMatrix

_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


def matches(quantization_config: object) -> bool:
    """Match the result of the GGUF reader."""
    return isinstance(quantization_config, Storage)


@dataclass(frozen=True)
class GgufMatrix(Matrix):
    """Matrix in blocks of the GGUF type `type`."""

    codes: StoredTensor
    type: str
    has_integers = True

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        return (self.codes,)

    def weight(self, tensors: Mapping[str, Tensor]) -> BlockMatrix:
        from offload_rt.ops.dequantize import BlockMatrix  # not at the top: a plan computes nothing

        return BlockMatrix(self.shape, tensors[self.codes.name], self.type)


class Format(QuantizedFormat):
    """code * scale - minimum in float32, as llama.cpp and transformers; then the compute dtype."""

    name = "gguf"

    def __init__(self, quantization_config: Storage) -> None:
        self._head_dim = quantization_config.head_dim
        super().__init__()

    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> GgufMatrix | None:
        record = source.find(f"{module}.weight")
        if record is None or record.dtype not in BLOCKS:
            return None
        block = BLOCKS[record.dtype]
        if shape[1] % block.n:
            kind = f"{record.dtype}, in blocks of {block.n} weights"
            problem = f"{record.path.name}: tensor {record.name!r} is of {kind}"
            raise CheckpointError(problem, have=f"rows of {shape[1]}", change=OTHER_CONFIG)
        nbytes = shape[1] // block.n * block.size
        codes = StoredTensor(f"{module}.weight", (shape[0], nbytes), DType.UINT8)
        return GgufMatrix(shape, codes, record.dtype)

    def is_unused(self, name: str, source: Source) -> bool:
        return name == ROPE_FREQS  # moved into the config

    def view(self, layout: Layout, block: Tensor, dtype: torch.dtype) -> LayerWeights:
        if self._head_dim is None:
            return super().view(layout, block, dtype)
        view = _RotatedView(layout, block, dtype, self.arithmetic)
        view.head_dim = self._head_dim
        return view


class _RotatedView(View):
    """View that moves pairs of llama.cpp's rotation half a head apart."""

    has_pairs = True
    head_dim: int

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        values = super().tensor(name, dtype)
        return self._reordered(values[None], name.removesuffix(".bias"))[0]

    def rows(self, ids: Tensor, name: str) -> Tensor:
        if name in _ROTATED:
            half = self.head_dim // 2
            within = ids % self.head_dim
            ids = ids - within + within % half * 2 + within // half
        return super().rows(ids, name)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self._reordered(super().linear(x, name), name)

    def linears(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple(map(self._reordered, super().linears(x, names), names))

    def _reordered(self, y: Tensor, name: str) -> Tensor:
        if name not in _ROTATED:
            return y
        return y.reshape(len(y), -1, self.head_dim // 2, 2).transpose(2, 3).reshape(y.shape)
