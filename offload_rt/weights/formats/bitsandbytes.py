"""bitsandbytes in 4 bits: nf4, whose scales may be quantised as well (double quantisation)."""

import json
from typing import Any

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError
from offload_rt.packing import NF4, Packing
from offload_rt.weights import quantized
from offload_rt.weights.formats import Source, StoredTensor
from offload_rt.weights.quantized import NestedScales, QuantizedFormat, QuantizedMatrix
from offload_rt.weights.source import OTHER_CONFIG

_STATE = "weight.quant_state.bitsandbytes__nf4"
# Bytes of the longest state that is read; real ones have some two hundred.
_LONGEST = 1 << 16

matches = quantized.of_method("bitsandbytes")


class Format(QuantizedFormat):
    """Value times scale in float32, then the dtype of the computation, as bitsandbytes' 4-bit
    products.
    """

    name = "bitsandbytes"
    unused = frozenset({"quant_map", "bitsandbytes__nf4"})

    def __init__(self, quantization_config: dict[str, Any]) -> None:
        if not quantized.setting(
            quantization_config, ("load_in_4bit", "_load_in_4bit"), False, (False, True)
        ):
            raise quantized.refuse("only load_in_4bit is understood")
        quantized.setting(quantization_config, ("bnb_4bit_quant_type",), "fp4", ("nf4",))
        quantized.setting(quantization_config, ("bnb_4bit_quant_storage",), "uint8", ("uint8",))
        super().__init__()

    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> QuantizedMatrix | None:
        """See `QuantizedFormat.matrix`."""
        record = source.find(f"{module}.weight")
        if record is None:
            return None
        import torch  # not at the top: a plan without files reads no table

        origin, full, first = source.whole or (source, shape, 0)
        if full[1] != shape[1]:
            raise CheckpointError(f"{source.prefix}{module}: blocks run on from row to row")
        state = _state(origin, f"{module}.{_STATE}", full)
        table = origin.read(StoredTensor(f"{module}.weight.quant_map", (16,), DType.FLOAT32))
        if not torch.equal(table, torch.tensor(NF4)):
            raise CheckpointError(
                f"tensor {source.prefix + module + '.weight.quant_map'!r} is not the table of nf4"
            )
        size = _number(state, "blocksize", shape[1])
        codes = StoredTensor("weight", (shape[0] * shape[1] // 2, 1), DType.UINT8)
        n_scales = shape[0] * shape[1] // size
        is_nested = state.get("nested_blocksize") is not None
        nested = None
        offset = state.get("nested_offset")
        if is_nested:
            if not isinstance(offset, float | int) or state.get("nested_dtype") != "float32":
                raise CheckpointError(
                    f"{source.prefix}{module}: nested scales are not of float32 with an offset"
                )
            block = _number(state, "nested_blocksize")
            # A part has those of the whole, which are few: it may begin within a block. The offset
            # is another in each layer, the first scale in each part: the name in the block tells
            # them.
            name = "weight.nested_absmax"
            begin = first * shape[1] // size
            n_all = -(-full[0] * full[1] // size // block)
            scales = StoredTensor(name, (n_all,), DType.FLOAT32, f"{name}{offset!r} {begin}")
            codes_of = StoredTensor("weight.nested_quant_map", (256,), DType.FLOAT32)
            nested = NestedScales(scales, codes_of, block, offset, begin)
        own = StoredTensor(
            "weight.absmax", (n_scales,), DType.UINT8 if is_nested else DType.FLOAT32
        )
        return QuantizedMatrix(
            shape, codes, Packing("nf4", 4, (1, size)), own, product=DType.FLOAT32, nested=nested
        )


def _state(source: Source, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """What bitsandbytes notes of a matrix. Raises CheckpointError where it is damaged or of another
    matrix.
    """
    record = source.find(name)
    length = (
        record.shape
        if record is not None and len(record.shape) == 1 and record.shape[0] < _LONGEST
        else (0,)
    )
    content = bytes(source.read(StoredTensor(name, length, DType.UINT8)).tolist())
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"tensor {source.prefix + name!r} is not JSON ({error})") from error
    if (
        not isinstance(state, dict)
        or state.get("quant_type") != "nf4"
        or state.get("shape") != list(shape)
    ):
        problem = f"tensor {source.prefix + name!r} tells of another matrix"
        raise CheckpointError(problem, need=f"nf4 of shape {list(shape)}", change=OTHER_CONFIG)
    return state


def _number(state: dict[str, Any], name: str, multiple: int = 0) -> int:
    """A positive number of which `multiple` is one."""
    value = state.get(name)
    if type(value) is not int or not 1 <= value <= 1 << 24 or multiple % value:
        raise CheckpointError(
            f"{name} is {value!r}", need="a positive number that divides a row of weights"
        )
    return value
