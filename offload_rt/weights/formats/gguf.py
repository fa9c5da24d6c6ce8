"""The types of GGUF: blocks along the inputs with their scales in them. Each matrix of a file has
its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError
from offload_rt.models.architecture import LayerWeights
from offload_rt.packing import BLOCKS
from offload_rt.weights import quantized
from offload_rt.weights.formats import Source, StoredTensor
from offload_rt.weights.gguf import ROPE_FREQS, Storage
from offload_rt.weights.layout import Layout
from offload_rt.weights.source import OTHER_CONFIG

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt.ops.dequantize import BlockMatrix

_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")


def matches(quantization_config: object) -> bool:
    """What the reader of GGUF files makes of them."""
    return isinstance(quantization_config, Storage)


@dataclass(frozen=True)
class GgufMatrix(quantized.Matrix):
    """A matrix in blocks of this type."""

    type: str

    def encoded(self, tensors: Mapping[str, Tensor]) -> BlockMatrix:
        """See `Matrix.encoded`."""
        from offload_rt.ops.dequantize import BlockMatrix  # not at the top: a plan computes nothing

        return BlockMatrix(self.shape, tensors[self.codes.name], self.type)


class Format(quantized.QuantizedFormat):
    """Scale times code, less a minimum, in float32, as llama.cpp and transformers do; then the
    dtype of the computation.
    """

    name = "gguf"

    def __init__(self, quantization_config: Storage) -> None:
        self.head_dim = quantization_config.head_dim
        super().__init__()

    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> GgufMatrix | None:
        """See `QuantizedFormat.matrix`."""
        record = source.find(f"{module}.weight")
        if record is None or record.dtype not in BLOCKS:
            return None
        block = BLOCKS[record.dtype]
        if shape[1] % block.n:
            problem = (
                f"{record.path.name}: tensor {record.name!r} is of {record.dtype}, in blocks of"
                f" {block.n} weights"
            )
            raise CheckpointError(problem, have=f"rows of {shape[1]}", change=OTHER_CONFIG)
        nbytes = shape[1] // block.n * block.size
        # The type is another in each layer: the name in the block tells it.
        codes = StoredTensor("weight", (shape[0], nbytes), DType.UINT8, record.dtype)
        return GgufMatrix(shape, codes, record.dtype)

    def is_unused(self, name: str, source: Source) -> bool:
        """What has gone into the config."""
        return name == ROPE_FREQS

    def view(self, layout: Layout, block: Tensor, dtype: torch.dtype) -> View:
        """See `WeightFormat.view`."""
        return View(self, layout, block, dtype)


class View(quantized.View):
    """The weights of one layer, see `WeightFormat.view`."""

    def __init__(self, format: Format, layout: Layout, block: Tensor, dtype: torch.dtype) -> None:
        super().__init__(format, layout, block, dtype)
        self._head_dim = format.head_dim

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `LayerWeights.linear`; numbers that llama.cpp rotates as a pair go half a head
        apart.
        """
        y = super().linear(x, name)
        if self._head_dim is None or name not in _ROTATED:
            return y
        return y.view(len(y), -1, self._head_dim // 2, 2).transpose(2, 3).reshape(y.shape)

    def linears(self, x: Tensor, names: Sequence[str]) -> tuple[Tensor, ...]:
        """One product after the other where one of them needs its numbers put in order."""
        if self._head_dim is None or set(names).isdisjoint(_ROTATED):
            return super().linears(x, names)
        return LayerWeights.linears(self, x, names)
