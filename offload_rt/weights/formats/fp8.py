"""float8 weights with a scale per block (DeepSeek, Qwen) or per matrix."""

from typing import Any

from offload_rt.dtypes import DType
from offload_rt.packing import Packing
from offload_rt.weights import quantized
from offload_rt.weights.formats import Source, StoredTensor
from offload_rt.weights.matrix import QuantizedMatrix

matches = quantized.has_method("fp8")


class Format(quantized.QuantizedFormat):
    """Weight * `weight_scale_inv` in float32, as transformers with `dequantize=True`."""

    name = "fp8"
    unused = frozenset({"input_scale", "activation_scale", "k_scale", "v_scale"})

    def __init__(self, config: dict[str, Any]) -> None:
        quantized.setting(config, ("fmt",), "e4m3", ("e4m3",))
        schemes = ("dynamic", "static")
        quantized.setting(config, ("activation_scheme",), "dynamic", schemes)
        has_block = config.get("weight_block_size") is not None
        self._block = quantized.two_numbers(config, "weight_block_size") if has_block else None
        super().__init__(notice=quantized.finer_notice(["activations"]))

    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> QuantizedMatrix | None:
        block = self._block or shape
        grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        name = f"{module}.weight_scale_inv"
        if self._block is None and source.find(name) is None:
            name = f"{module}.weight_scale"
        record = source.find(name)
        dtype = DType.FLOAT8_E8M0FNU if record is not None and record.dtype == "F8_E8M0" else None
        shapes = ((), (1,), grid) if self._block is None else (grid,)
        scales = StoredTensor(name, quantized.shape_of(source, name, shapes), dtype)
        codes = StoredTensor(f"{module}.weight", shape, DType.FLOAT8_E4M3FN)
        packing = Packing("plain", 8, block)
        return QuantizedMatrix(shape, codes, packing, scales, product=DType.FLOAT32)
