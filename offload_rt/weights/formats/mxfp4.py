"""MXFP4 as gpt-oss has it: the codes of all experts in one tensor, in blocks of 32 inputs, and a
power of two for each.
"""

from offload_rt.dtypes import DType
from offload_rt.packing import Packing
from offload_rt.weights.formats import Source, StoredTensor
from offload_rt.weights.quantized import QuantizedFormat, QuantizedMatrix, of_method

_SIZE = 32

matches = of_method("mxfp4")


class Format(QuantizedFormat):
    """Value times power of two, as transformers with `Mxfp4Config(dequantize=True)`; bfloat16 holds
    every product.
    """

    name = "mxfp4"

    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> QuantizedMatrix | None:
        """Of one expert, see `QuantizedFormat.matrix`."""
        n_out, n_in = shape
        if n_in % _SIZE or source.find(f"{module}.blocks") is None:
            return None
        codes = StoredTensor("blocks", (1, n_out, n_in // _SIZE, _SIZE // 2), DType.UINT8)
        scales = StoredTensor("scales", codes.shape[:3], DType.UINT8)
        return QuantizedMatrix(
            shape, codes, Packing("e2m1", 4, (1, _SIZE)), scales, product=DType.BFLOAT16
        )
