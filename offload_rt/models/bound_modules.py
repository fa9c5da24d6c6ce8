"""Modules of transformers without weights, which read a layer's weights while these are bound."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload_rt.models.layers import LayerWeights, TensorShape


class BoundTensor(NamedTuple):
    """A parameter or buffer of a module, with its name and shape in the layer's block.

    dtype  None for the compute dtype
    """

    table: dict[str, Any]
    key: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None


class StoredParts(NamedTuple):
    """Tensors of a layer that the checkpoint stores in parts, without the layer's prefix.

    experts  expert modules of each parameter with experts
    split    parts of each tensor that is split along the first dimension
    """

    experts: dict[str, list[list[str]]]
    split: dict[str, list[TensorShape]]


WHOLE = StoredParts({}, {})


@dataclass
class BoundPart:
    """Modules whose weights are bound together.

    shapes   of all tensors by name
    tensors  tensors to replace; linear modules read their weights themselves
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tensors: list[BoundTensor] = field(default_factory=list)


class BoundModules:
    """Binds weights to parts of a model. Its linear modules call `LayerWeights.linear`.

    dtype  of the model, which stands for the compute dtype
    tied   names of tensors by id, where they differ from the names of modules
    """

    def __init__(self, dtype: torch.dtype, tied: Mapping[int, str] = MappingProxyType({})) -> None:
        self._dtype = dtype
        self._tied = tied
        self._weights: LayerWeights | None = None

    def add(
        self, part: BoundPart, module: nn.Module, name: str, n_prefix: int = 0
    ) -> list[BoundTensor]:
        """Add a module to a part; return its tensors, named without the first characters."""
        tensors = []
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    named = (self._tied.get(id(tensor)) or f"{name}.{key}")[n_prefix:]
                    dtype = None if tensor.dtype == self._dtype else tensor.dtype
                    tensors.append(BoundTensor(table, key, named, tuple(tensor.shape), dtype))
        part.shapes |= {tensor.name: tensor.shape for tensor in tensors}
        if type(module) is nn.Linear:
            linear = partial(self._linear, tensors[0].name.removesuffix(".weight"))
            module.forward = linear  # type: ignore[method-assign]
        else:
            part.tensors += tensors
        return tensors

    def _linear(self, name: str, x: Tensor) -> Tensor:
        assert self._weights is not None, "modules run within `bound`"
        return self._weights.linear(x, name)

    @contextmanager
    def bound(
        self,
        part: BoundPart,
        weights: LayerWeights,
        value: Callable[[BoundTensor], Any] | None = None,
        absent: Collection[str] = (),
    ) -> Iterator[None]:
        """Bind weights to a part; on exit, bind the weights of before.

        value   returns the replacement of a tensor; default: the tensor of the weights
        absent  names of tensors without a replacement
        """
        before = self._weights
        self._weights = weights
        tensors = [tensor for tensor in part.tensors if tensor.name not in absent]
        try:
            for tensor in tensors:
                stored = value(tensor) if value else weights.tensor(tensor.name, tensor.dtype)
                tensor.table[tensor.key] = stored
            yield
        finally:
            self._weights = before
            for tensor in tensors:
                tensor.table[tensor.key] = None


def computed_buffers(model: Any) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Compute buffers such as rotary frequencies by transformers' own initialization.

    Returns the table, key and value of each.
    """
    modules = list(model.modules())
    buffers = [
        (module._buffers, key)
        for module in modules
        for key, buffer in module._buffers.items()
        if buffer is not None and key in module._non_persistent_buffers_set
    ]
    for table, key in buffers:
        table[key] = torch.empty_like(table[key], device="cpu")
    for module in modules:  # skip parameters: without values, their initialization is wasted
        if not module._non_persistent_buffers_set and not module._modules:
            module._is_hf_initialized = True
    model.initialize_weights()
    for module in modules:  # freeze frequencies that would depend on the sequence length
        if kind := getattr(module, "rope_type", ""):
            fixed: Any = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
            module.rope_type = fixed
    return [(table, key, table[key]) for table, key in buffers]
