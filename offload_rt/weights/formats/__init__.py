"""How weights are stored and used: one file for each format.

Each file has `matches(quantization_config) -> bool` and a class `Format`, a `WeightFormat` made
from the same argument: the `quantization_config` of a config.json, None where there is none; of a
GGUF file its `Storage`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from offload_rt.dtypes import DType
from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import LayerWeights
from offload_rt.system import registry
from offload_rt.weights.layout import Layout
from offload_rt.weights.source import Source, StoredTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Source", "StoredTensor", "WeightFormat", "format_of"]


class WeightFormat(ABC):
    """How the tensors of an architecture are stored, and used where their bytes lie; as they are,
    unless a format says more.

    notice  what the user should know of how it computes; empty if nothing
    """

    name: ClassVar[str]
    # Whether products never depend on the number of rows, even where torch's product is faster.
    is_batch_invariant = False

    def __init__(self, quantization_config: object = None, notice: str = "") -> None:
        """Raises UnsupportedModelError for a config that is not understood."""
        self.notice = notice

    def stored(
        self, name: str, shape: tuple[int, ...], dtype: DType | None, source: Source
    ) -> tuple[StoredTensor, ...]:
        """The stored tensors that hold the tensor `name` of the architecture; those that are no
        codes are of `dtype`.

        Raises CheckpointError where what the source holds of it contradicts the config.
        """
        return (StoredTensor(name, shape, dtype),)

    def is_unused(self, name: str, source: Source) -> bool:
        """Whether a checkpoint may hold this tensor, none of the stored ones, although nothing is
        computed with it.
        """
        return False

    @abstractmethod
    def view(self, layout: Layout, block: Tensor, dtype: torch.dtype) -> LayerWeights:
        """The weights of a block, to compute with in `dtype`.

        block  (>= layout.nbytes,) uint8, alive and unchanged while the view is used
        """

    def scratch_nbytes(self, stored: StoredTensor, n_rows: int, dtype: DType) -> int:
        """Bytes taken besides while up to `n_rows` rows go through the matrix in this stored
        tensor, in `dtype`.
        """
        return math.prod(stored.shape) * dtype.itemsize if stored.dtype != dtype else 0


def format_of(quantization_config: object) -> WeightFormat:
    """The format of a config.json with this quantization_config; None: without one.

    Raises UnsupportedModelError if no file of the folder knows it.
    """
    names = registry.names("weights.formats")
    for module in (registry.find("weights.formats", name) for name in names):
        if module.matches(quantization_config):
            found: WeightFormat = module.Format(quantization_config)
            return found
    method = (
        quantization_config.get("quant_method")
        if isinstance(quantization_config, dict)
        else quantization_config
    )
    raise UnsupportedModelError(
        f"config.json: key 'quantization_config' of quant_method {method!r} is not understood",
        have=", ".join(names),
        change="use an unquantised checkpoint",
    )
