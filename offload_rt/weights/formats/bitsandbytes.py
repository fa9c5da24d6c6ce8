"""bitsandbytes in 4 bits: nf4, with scales optionally quantised (double quantisation)."""

import json
from typing import Any

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError
from offload_rt.packing import NF4, Packing
from offload_rt.weights import quantized
from offload_rt.weights.formats import Source, StoredTensor
from offload_rt.weights.matrix import NestedScales, QuantizedMatrix
from offload_rt.weights.source import OTHER_CONFIG

# Maximum bytes of a quantisation state; published states have about 200.
_LONGEST = 1 << 16

matches = quantized.has_method("bitsandbytes")


class Format(quantized.QuantizedFormat):
    """value * scale in float32, then the compute dtype, as bitsandbytes' 4-bit products."""

    name = "bitsandbytes"
    unused = frozenset({"quant_map", "bitsandbytes__nf4"})

    def __init__(self, config: dict[str, Any]) -> None:
        if not quantized.setting(config, ("load_in_4bit", "_load_in_4bit"), False, (False, True)):
            raise quantized.refuse("only load_in_4bit is understood")
        quantized.setting(config, ("bnb_4bit_quant_type",), "fp4", ("nf4",))
        quantized.setting(config, ("bnb_4bit_quant_storage",), "uint8", ("uint8",))
        super().__init__()

    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> QuantizedMatrix | None:
        name = f"{module}.weight"
        if source.find(name) is None:
            return None
        origin, full_shape, first_row = source.whole or (source, shape, 0)
        if full_shape[1] != shape[1]:
            raise CheckpointError(f"{source.prefix}{module}: blocks run on from row to row")
        state = _state(origin, f"{name}.quant_state.bitsandbytes__nf4", full_shape)
        table_name = f"{name}.quant_map"
        table = origin.read(StoredTensor(table_name, (len(NF4),), DType.FLOAT32))
        if not table.equal(table.new_tensor(NF4)):
            raise CheckpointError(f"tensor {origin.prefix + table_name!r} is not the table of nf4")
        size = _number(state, "blocksize", shape[1])
        nested = None
        if state.get("nested_blocksize") is not None:
            n_scales = -(-full_shape[0] * full_shape[1] // size)
            nested = _nested(source, module, state, n_scales, first_row * shape[1] // size)
        codes = StoredTensor(name, (shape[0] * shape[1] // 2, 1), DType.UINT8)
        dtype = DType.FLOAT32 if nested is None else DType.UINT8
        scales = StoredTensor(f"{name}.absmax", (shape[0] * shape[1] // size,), dtype)
        packing = Packing("nf4", 4, (1, size))
        return QuantizedMatrix(shape, codes, packing, scales, product=DType.FLOAT32, nested=nested)


def _nested(
    source: Source, module: str, state: dict[str, Any], n_scales: int, first: int
) -> NestedScales:
    """Return the double quantisation of `n_scales` scales; a slice uses those from `first`."""
    offset = state.get("nested_offset")
    if not isinstance(offset, float | int) or state.get("nested_dtype") != "float32":
        problem = f"{source.prefix}{module}: nested scales are not of float32 with an offset"
        raise CheckpointError(problem)
    block = _number(state, "nested_blocksize")
    outer = StoredTensor(f"{module}.weight.nested_absmax", (-(-n_scales // block),), DType.FLOAT32)
    table = StoredTensor(f"{module}.weight.nested_quant_map", (256,), DType.FLOAT32)
    return NestedScales(outer, table, block, offset, first)


def _state(source: Source, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Read the quantisation state of a matrix; raises CheckpointError if damaged or mismatched."""
    record = source.find(name)
    is_short = record is not None and len(record.shape) == 1 and record.shape[0] < _LONGEST
    length = record.shape if record is not None and is_short else (0,)
    content = bytes(source.read(StoredTensor(name, length, DType.UINT8)).tolist())
    try:
        state = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"tensor {source.prefix + name!r} is not JSON ({error})") from error
    expected = {"quant_type": "nf4", "shape": list(shape)}
    if not isinstance(state, dict) or state | expected != state:
        problem = f"tensor {source.prefix + name!r} tells of another matrix"
        raise CheckpointError(problem, need=f"nf4 of shape {list(shape)}", change=OTHER_CONFIG)
    return state


def _number(state: dict[str, Any], name: str, multiple: int = 0) -> int:
    """Return a positive number that divides `multiple`; raises CheckpointError."""
    value = state.get(name)
    if type(value) is not int or not 1 <= value <= 1 << 24 or multiple % value:
        need = "a positive number that divides a row of weights"
        raise CheckpointError(f"{name} is {value!r}", need=need)
    return value
