"""Weight formats, one file each.

A file defines `matches(quantization_config) -> bool` and a class `Format`, a `WeightFormat` created
from the same argument: `quantization_config` of a config.json, None without one, or the `Storage`
of a GGUF file.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, ClassVar

from offload_rt.dtypes import DType
from offload_rt.errors import config_error
from offload_rt.models.layers import LayerWeights
from offload_rt.system import registry
from offload_rt.weights.layout import Layout
from offload_rt.weights.matrix import Matrix
from offload_rt.weights.source import Source, StoredTensor
from offload_rt.weights.view import Arithmetic, View

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Matrix", "Source", "StoredTensor", "WeightFormat", "format_of"]


class WeightFormat(ABC):  # formats override what differs from plain tensors
    """Storage of an architecture's tensors, by default unchanged, with a notice for the user."""

    name: ClassVar[str]
    arithmetic = Arithmetic()

    def __init__(self, quantization_config: object = None, notice: str = "") -> None:
        """Raises UnsupportedModelError for an unsupported config."""
        self.notice = notice

    def stored(
        self, name: str, shape: tuple[int, ...], dtype: DType | None, source: Source
    ) -> StoredTensor | Matrix:
        """Return a tensor's storage, plain as `dtype`; raises CheckpointError on contradictions."""
        return StoredTensor(name, shape, dtype)

    def is_unused(self, name: str, source: Source) -> bool:
        """Return whether compute ignores this checkpoint tensor, which is not stored."""
        return False

    def view(self, layout: Layout, block: Tensor, dtype: torch.dtype) -> LayerWeights:
        """Return the weights of a block (>= layout.nbytes,) uint8, for compute in `dtype`."""
        return View(layout, block, dtype, self.arithmetic)


def format_of(config: object) -> WeightFormat:
    """Return the format of a `quantization_config` or None; raises UnsupportedModelError."""
    names = registry.names("weights.formats")
    for module in (registry.find("weights.formats", name) for name in names):
        if module.matches(config):
            weight_format: WeightFormat = module.Format(config)
            return weight_format
    method = config.get("quant_method") if isinstance(config, dict) else config
    problem = f"key 'quantization_config' of quant_method {method!r} is not understood"
    raise config_error(problem, have=", ".join(names), change="use an unquantised checkpoint")
