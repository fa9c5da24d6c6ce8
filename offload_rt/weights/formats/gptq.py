"""GPTQ of AutoGPTQ and GPTQModel: packed along the inputs; groups in any order (desc_act)."""

from collections.abc import Mapping
from typing import Any

from offload_rt.dtypes import DType
from offload_rt.packing import Packing
from offload_rt.weights import quantized
from offload_rt.weights.formats import Source, StoredTensor
from offload_rt.weights.matrix import QuantizedMatrix, ZeroPoints

matches = quantized.has_method("gptq")


class Format(quantized.QuantizedFormat):
    """scale * (code - zero) in the dtype of the scales; the first version stores zero - 1."""

    name = "gptq"
    unused = frozenset({"g_idx"})
    unused_zeros = frozenset({"bias"})

    def __init__(self, config: dict[str, Any]) -> None:
        layouts = ("gptq", "gptq_v2")
        layout = quantized.setting(config, ("checkpoint_format", "format"), "gptq", layouts)
        if config.get("is_marlin_format"):
            need = "one of " + ", ".join(layouts)
            raise quantized.refuse("the marlin layout is not understood", need=need)
        quantized.setting(config, ("pack_dtype",), "int32", ("int32",))
        self._plus = 1 if layout == "gptq" else 0
        self._config = config
        self._overrides = config.get("dynamic") or {}
        if not quantized.is_table_of_tables(self._overrides):
            raise quantized.refuse("dynamic is no table of tables")
        for override in ({}, *self._overrides.values()):
            _sizes({**config, **override})
        super().__init__()

    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> QuantizedMatrix | None:
        bits, size = _sizes(self._config_of(source.prefix + module))
        n_out, n_in = shape
        packing = Packing("columns", bits, (n_in if size == -1 else size, 1))
        n_groups = -(-n_in // packing.block[0])
        codes = StoredTensor(f"{module}.qweight", packing.code_shape(n_in, n_out), DType.INT32)
        words = Packing("rows", bits, (1, 1)).code_shape(n_groups, n_out)
        zeros = StoredTensor(f"{module}.qzeros", words, DType.INT32)
        groups = StoredTensor(f"{module}.g_idx", (n_in,), DType.INT32)
        scales = StoredTensor(f"{module}.scales", (n_groups, n_out), None)
        points = ZeroPoints(zeros, "rows", self._plus)
        order = quantized.nontrivial_groups(source, groups, packing.block[0], n_groups)
        return QuantizedMatrix(shape, codes, packing, scales, points, order)

    def _config_of(self, module: str) -> Mapping[str, Any]:
        for name, override in self._overrides.items():
            pattern = name.removeprefix("+:")
            if not name.startswith("-:") and quantized.matches_pattern(pattern, module):
                return {**self._config, **override}
        return self._config


def _sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    bits = quantized.setting(config, ("bits",), 4, (2, 3, 4, 8))
    return bits, quantized.group_size(config, ("group_size",), 128)
