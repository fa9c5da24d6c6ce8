"""AWQ for AutoAWQ's `gemm` kernels: 4 bits, packed along the outputs in a special order."""

from typing import Any

from offload_rt.dtypes import DType
from offload_rt.packing import Packing
from offload_rt.weights import quantized
from offload_rt.weights.formats import Source, StoredTensor
from offload_rt.weights.matrix import QuantizedMatrix, ZeroPoints

matches = quantized.has_method("awq")


class Format(quantized.QuantizedFormat):
    """(code - zero) * scale, in the dtype of the scales, as AutoAWQ's `dequantize_gemm`."""

    name = "awq"
    unused_zeros = frozenset({"bias"})

    def __init__(self, config: dict[str, Any]) -> None:
        quantized.setting(config, ("bits", "w_bit"), 4, (4,))
        version = config.get("version") or "gemm"
        if not isinstance(version, str) or version.lower() != "gemm":
            raise quantized.refuse(f"version {version!r} is not understood", need="gemm")
        if config.get("backend") == "llm-awq":
            raise quantized.refuse("backend 'llm-awq' packs in another order", need="autoawq")
        self._size = quantized.group_size(config, ("group_size", "q_group_size"), 128)
        self._has_zeros = quantized.setting(config, ("zero_point",), True, (False, True))
        super().__init__()

    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> QuantizedMatrix | None:
        n_out, n_in = shape
        packing = Packing("awq", 4, (n_in if self._size == -1 else self._size, 1), 8)
        n_groups = -(-n_in // packing.block[0])
        codes = StoredTensor(f"{module}.qweight", packing.code_shape(n_in, n_out), DType.INT32)
        zeros = StoredTensor(f"{module}.qzeros", packing.code_shape(n_groups, n_out), DType.INT32)
        has_zeros = self._has_zeros or source.find(zeros.name) is not None
        scales = StoredTensor(f"{module}.scales", (n_groups, n_out), None)
        points = ZeroPoints(zeros, "awq") if has_zeros else None
        return QuantizedMatrix(shape, codes, packing, scales, points)
