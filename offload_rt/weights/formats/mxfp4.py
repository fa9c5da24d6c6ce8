"""MXFP4 of gpt-oss: codes of all experts in one tensor, a power of two per 32 inputs."""

from offload_rt.dtypes import DType
from offload_rt.packing import Packing
from offload_rt.weights.formats import Source, StoredTensor
from offload_rt.weights.matrix import QuantizedMatrix
from offload_rt.weights.quantized import QuantizedFormat, has_method

_GROUP = 32

matches = has_method("mxfp4")


class Format(QuantizedFormat):
    """Value * power of two, exact in bfloat16, as `Mxfp4Config(dequantize=True)`."""

    name = "mxfp4"

    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> QuantizedMatrix | None:
        is_coded = shape[1] % _GROUP == 0 and source.find(f"{module}.blocks") is not None
        return matrix_of(module, shape) if is_coded else None


def matrix_of(module: str, shape: tuple[int, int]) -> QuantizedMatrix:
    """Return the storage of a matrix whose rows are whole groups."""
    dims = (1, shape[0], shape[1] // _GROUP, _GROUP // 2)
    codes = StoredTensor(f"{module}.blocks", dims, DType.UINT8)
    scales = StoredTensor(f"{module}.scales", dims[:3], DType.UINT8)
    packing = Packing("e2m1", 4, (1, _GROUP))
    return QuantizedMatrix(shape, codes, packing, scales, product=DType.BFLOAT16)
