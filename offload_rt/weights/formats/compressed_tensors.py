"""compressed-tensors (llm-compressor): integers, float8 and MXFP4 with several scale strategies."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError
from offload_rt.packing import Packing
from offload_rt.weights import quantized
from offload_rt.weights.formats import Source, StoredTensor
from offload_rt.weights.matrix import QuantizedMatrix, ZeroPoints
from offload_rt.weights.source import OTHER_CONFIG

_ANY_BITS = tuple(range(1, 9))
_ANY_BLOCK = ("tensor", "channel", "group", "block")
_PACKED = "pack-quantized"
_MXFP4 = "mxfp4-pack-quantized"
# Types, bits and strategies allowed per config format.
_ALLOWED: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]] = {
    _PACKED: (("int",), _ANY_BITS, ("channel", "group")),
    "int-quantized": (("int",), _ANY_BITS, _ANY_BLOCK),
    "float-quantized": (("float",), (8,), _ANY_BLOCK),
    "naive-quantized": (("int", "float"), (8,), _ANY_BLOCK),
    _MXFP4: (("float",), (4,), ("group",)),
}

matches = quantized.has_method("compressed-tensors")


@dataclass(frozen=True)
class _Scheme:
    # Module names, regular expressions after "re:", or classes such as Linear.
    targets: tuple[str, ...]
    format: str
    bits: int
    is_float: bool
    is_symmetric: bool
    block: tuple[int, int]  # rows and columns per scale; 0 for all

    def rank(self, module: str) -> int:
        """Return the precision of a match: 3 name, 2 regular expression, 1 class, 0 no match."""
        if module in self.targets:
            return 3
        patterns = (target[3:] for target in self.targets if target.startswith("re:"))
        if any(quantized.matches_pattern(pattern, module) for pattern in patterns):
            return 2
        return int(("Embedding" if module.endswith("embed_tokens") else "Linear") in self.targets)


class Format(quantized.QuantizedFormat):
    """Tensors of the package `compressed_tensors`, decompressed in the same way."""

    name = "compressed_tensors"
    unused = frozenset({
        "weight_shape", "weight_g_idx", "input_scale", "input_zero_point", "input_global_scale",
        "output_scale", "output_zero_point", "q_scale", "q_zero_point", "k_scale", "k_zero_point",
        "v_scale", "v_zero_point",
    })  # fmt: skip
    unused_zeros = frozenset({"weight_zero_point"})

    def __init__(self, config: dict[str, Any]) -> None:
        for key in ("sparsity_config", "transform_config"):
            value = config.get(key)
            if value and not (isinstance(value, dict) and value.get("format") == "dense"):
                raise quantized.refuse(f"{key} is not understood")
        groups = config.get("config_groups")
        if not (groups and quantized.is_table_of_tables(groups)):
            raise quantized.refuse("config_groups is missing or no table of tables")
        overall = config.get("format")
        self._schemes = [
            _scheme(group, group.get("format") or overall)
            for group in groups.values()
            if group.get("weights") is not None
        ]
        keys = ("input_activations", "output_activations")
        has_activations = any(group.get(key) for group in groups.values() for key in keys)
        finer = ["activations"] if has_activations else []
        finer += ["keys and values"] if config.get("kv_cache_scheme") else []
        super().__init__(notice=quantized.finer_notice(finer))

    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> QuantizedMatrix | None:
        scheme = self._scheme_of(source.prefix + module)
        if scheme is None:
            return None
        block = (scheme.block[0] or shape[0], min(scheme.block[1] or shape[1], shape[1]))
        grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        shapes = {1: (grid, grid[:1])}.get(grid[1], (grid,)) + (((),) if grid == (1, 1) else ())
        name = f"{module}.weight_scale"
        scales = StoredTensor(name, quantized.shape_of(source, name, shapes), None)
        zeros = StoredTensor(f"{module}.weight_zero_point", scales.shape, DType.INT8)
        if scheme.format == _PACKED:
            _check_shape(source, f"{module}.weight_shape", shape)
            packing = Packing("rows", scheme.bits, block, 1 << scheme.bits - 1)
            codes = StoredTensor(f"{module}.weight_packed", packing.code_shape(*shape), DType.INT32)
            words = Packing("columns", scheme.bits, block).code_shape(shape[0], grid[1])
            zeros = zeros._replace(shape=words, dtype=DType.INT32)
            points = None if scheme.is_symmetric else ZeroPoints(zeros, "columns")
            groups = StoredTensor(f"{module}.weight_g_idx", shape[1:], DType.INT32)
            order = quantized.nontrivial_groups(source, groups, block[1], grid[1])
            return QuantizedMatrix(shape, codes, packing, scales, points, order)
        if scheme.format == _MXFP4:
            packing = Packing("e2m1", 4, block)
            codes = StoredTensor(f"{module}.weight_packed", packing.code_shape(*shape), DType.UINT8)
            scales = scales._replace(dtype=DType.UINT8)
            return QuantizedMatrix(shape, codes, packing, scales, product=DType.BFLOAT16)
        dtype = DType.FLOAT8_E4M3FN if scheme.is_float else DType.INT8
        codes = StoredTensor(f"{module}.weight", shape, dtype)
        points = None if scheme.is_symmetric else ZeroPoints(zeros, "plain")
        return QuantizedMatrix(shape, codes, Packing("plain", 8, block), scales, points)

    def _scheme_of(self, module: str) -> _Scheme | None:
        """Return the scheme with the most precise match; a single scheme matches every module."""
        if len(self._schemes) < 2:
            return next(iter(self._schemes), None)
        best = max(self._schemes, key=lambda scheme: scheme.rank(module))
        return best if best.rank(module) else None


def _check_shape(source: Source, name: str, shape: tuple[int, int]) -> None:
    record = source.find(name)
    if record is None or record.stamp is None:
        return
    dtype = DType.INT32 if record.dtype == "I32" else DType.INT64
    stored = source.read(StoredTensor(name, (2,), dtype)).tolist()
    need = list(shape)
    if stored != need:
        problem = f"{record.path.name}: tensor {source.prefix + name!r} tells of another matrix"
        raise CheckpointError(problem, need=str(need), have=str(stored), change=OTHER_CONFIG)


def _scheme(group: Mapping[str, Any], format: object) -> _Scheme:
    weights = group["weights"]
    targets = group.get("targets")
    if not isinstance(weights, dict):
        raise quantized.refuse("weights of a group are no table")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise quantized.refuse("targets of a group are no list of names")
    if not isinstance(format, str) or format not in _ALLOWED:
        need = "one of " + ", ".join(_ALLOWED)
        raise quantized.refuse(f"format {format!r} is not understood", need=need)
    types, all_bits, strategies = _ALLOWED[format]
    quantized.setting(weights, ("dynamic",), False, (False,))
    is_float = quantized.setting(weights, ("type",), "int", types) == "float"
    choices = (True,) if is_float else (True, False)
    symmetric = quantized.setting(weights, ("symmetric",), True, choices)
    bits = quantized.setting(weights, ("num_bits",), 8, all_bits)
    size = quantized.group_size(weights, ("group_size",), -1)
    default = "group" if size > 0 else "channel" if weights.get("group_size") == -1 else "tensor"
    strategy = quantized.setting(weights, ("strategy",), default, strategies)
    block = {"tensor": (0, 0), "channel": (1, 0)}.get(strategy, (1, max(size, 0)))
    if strategy == "block":
        block = quantized.two_numbers(weights, "block_structure")
    return _Scheme(tuple(targets), format, bits, is_float, symmetric, block)
