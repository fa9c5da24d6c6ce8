"""A second weight format: every matrix as int8 rows with a float32 scale each, vectors as they
are.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from offload_rt.dtypes import DType
from offload_rt.models.architecture import LayerWeights
from offload_rt.weights.formats import Matrix, StoredTensor

CONFIG = {"quant_method": "int8_rows"}


def matches(quantization_config):
    return quantization_config == CONFIG


def quantized(tensors):
    """The tensors of a dense checkpoint as this format stores them."""
    stored = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            stored[name] = tensor
            continue
        scale = tensor.abs().amax(-1, keepdim=True).float() / 127
        stored[name] = (tensor / scale).round().to(torch.int8)
        stored[f"{name}_scale"] = scale
    return stored


def dequantized(stored):
    """The dense tensors that are computed with."""
    return {
        name: tensor * stored[f"{name}_scale"] if f"{name}_scale" in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale")
    }


@dataclass(frozen=True)
class Int8Matrix(Matrix):
    name: str

    @property
    def tensors(self):
        n_rows = self.shape[0]
        return (
            StoredTensor(self.name, self.shape, DType.INT8),
            StoredTensor(f"{self.name}_scale", (n_rows, 1), DType.FLOAT32),
        )

    def weight(self, tensors):
        return tensors[self.name] * tensors[f"{self.name}_scale"]


class Format:
    name = "int8_rows"
    notice = ""

    def __init__(self, quantization_config):
        pass

    def stored(self, name, shape, dtype, source):
        return StoredTensor(name, shape, dtype) if len(shape) == 1 else Int8Matrix(shape, name)

    def is_unused(self, name, source):
        return False

    def view(self, layout, block, dtype):
        return View(layout.views(block), layout.matrices, dtype)


class View(LayerWeights):
    def __init__(self, tensors, matrices, dtype):
        self._tensors = tensors
        self._matrices = matrices
        self._dtype = dtype

    def vector(self, name):
        return self._tensors[f"{name}.weight"].to(self._dtype)

    def linear(self, x, name):
        bias = self._tensors.get(f"{name}.bias")
        weight = self._matrices[name].weight(self._tensors)
        return F.linear(x, weight.to(self._dtype), None if bias is None else bias.to(self._dtype))

    def rows(self, ids, name):
        return self._matrices[name].weight(self._tensors)[ids].to(self._dtype)
