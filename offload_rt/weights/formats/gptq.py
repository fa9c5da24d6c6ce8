"""GPTQ as AutoGPTQ and GPTQModel write it: packed along the inputs, whose groups may be in any
order (desc_act).
"""

from collections.abc import Mapping
from typing import Any

from offload_rt.dtypes import DType
from offload_rt.packing import Packing
from offload_rt.weights import quantized
from offload_rt.weights.formats import Source, StoredTensor
from offload_rt.weights.quantized import QuantizedFormat, QuantizedMatrix, ZeroPoints

_BITS = (2, 3, 4, 8)

matches = quantized.of_method("gptq")


class Format(QuantizedFormat):
    """scale * (code - zero), in the dtype of the scales, as GPTQModel; the first version stores
    zero - 1, modulo 2^bits.
    """

    name = "gptq"
    unused = frozenset({"g_idx"})
    unused_zeros = frozenset({"bias"})

    def __init__(self, quantization_config: dict[str, Any]) -> None:
        layouts = ("gptq", "gptq_v2")
        layout = quantized.setting(
            quantization_config, ("checkpoint_format", "format"), "gptq", layouts
        )
        if quantization_config.get("is_marlin_format"):
            raise quantized.refuse(
                "the marlin layout is not understood", need="one of " + ", ".join(layouts)
            )
        quantized.setting(quantization_config, ("pack_dtype",), "int32", ("int32",))
        self._plus = 1 if layout == "gptq" else 0
        self._config = quantization_config
        self._overrides = quantization_config.get("dynamic") or {}
        if not isinstance(self._overrides, dict) or not all(
            isinstance(one, dict) for one in self._overrides.values()
        ):
            raise quantized.refuse("dynamic is no table of tables")
        for one in (quantization_config, *self._overrides.values()):
            _sizes({**quantization_config, **one})
        super().__init__()

    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> QuantizedMatrix | None:
        """See `QuantizedFormat.matrix`."""
        bits, size = _sizes(self._of(source.prefix + module))
        n_out, n_in = shape
        packing = Packing("columns", bits, (n_in if size == -1 else size, 1))
        n_groups = -(-n_in // packing.block[0])
        codes = StoredTensor("qweight", packing.words(n_in, n_out), DType.INT32)
        words = Packing("rows", bits, (1, 1)).words(n_groups, n_out)
        zeros = ZeroPoints(StoredTensor("qzeros", words, DType.INT32), "rows", self._plus)
        groups = quantized.groups_of(
            source, module, StoredTensor("g_idx", (n_in,), DType.INT32), packing.block[0], n_groups
        )
        return QuantizedMatrix(
            shape, codes, packing, StoredTensor("scales", (n_groups, n_out), None), zeros, groups
        )

    def _of(self, module: str) -> Mapping[str, Any]:
        """The config of a module: the first override whose pattern it matches."""
        for pattern, override in self._overrides.items():
            if not pattern.startswith("-:") and quantized.matches_pattern(
                pattern.removeprefix("+:"), module
            ):
                return {**self._config, **override}
        return self._config


def _sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Bits, and inputs that share a scale. Raises UnsupportedModelError for others than are
    understood.
    """
    return quantized.setting(config, ("bits",), 4, _BITS), quantized.group_size(
        config, ("group_size",), 128
    )
