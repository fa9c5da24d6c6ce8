"""Base of the quantised formats, and checks of their configs."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError, UnsupportedModelError, config_error
from offload_rt.weights.formats import Matrix, Source, StoredTensor, WeightFormat
from offload_rt.weights.header import FLOATS

# Maximum bytes of a tensor read to check for zeros.
_MOST_ZEROS = 1 << 26
_FINER = "here they are kept in the dtype of the computation, which is finer"


class QuantizedFormat(WeightFormat):
    """Format with quantised matrices; a matrix stored as floats in the file is used unchanged."""

    # Unused checkpoint tensors, by the last part of their names.
    unused: frozenset[str] = frozenset()
    # Tensors unused if they contain zeros, written by some tools in place of absent tensors.
    unused_zeros: frozenset[str] = frozenset()

    @abstractmethod
    def matrix(self, module: str, shape: tuple[int, int], source: Source) -> Matrix | None:
        """Return the storage of a matrix (n_out, n_in), None if plain; raises CheckpointError."""

    def stored(
        self, name: str, shape: tuple[int, ...], dtype: DType | None, source: Source
    ) -> StoredTensor | Matrix:
        record = source.find(name)
        module = name.removesuffix(".weight")
        matrix = None
        if len(shape) == 2 and module != name and (record is None or record.dtype not in FLOATS):
            matrix = self.matrix(module, (shape[0], shape[1]), source)
        return matrix or super().stored(name, shape, dtype, source)

    def is_unused(self, name: str, source: Source) -> bool:
        kind = name.rpartition(".")[2]
        record = source.find(name)
        if kind not in self.unused_zeros or record is None or record.nbytes > _MOST_ZEROS:
            return kind in self.unused
        if record.stamp is None:  # of a header on the hub
            return True
        content = source.read(StoredTensor(name, record.shape, record.stored_dtype()))
        return not content.view(-1).view(DType.UINT8.torch).any()


def finer_notice(values: list[str]) -> str:
    """Return the notice about values kept in the compute dtype; empty without such values."""
    made_for = f"the checkpoint is made for quantised {' and '.join(values)}"
    return f"{made_for}; {_FINER}" if values else ""


def refuse(problem: str, need: str = "") -> UnsupportedModelError:
    """Return an error about the quantization_config."""
    return config_error(f"quantization_config: {problem}", need=need)


def has_method(name: str) -> Callable[[object], bool]:
    """Return the `matches` of a format: whether a quantization_config has this quant_method."""
    return lambda config: isinstance(config, dict) and config.get("quant_method") == name


def is_table_of_tables(value: object) -> bool:
    """Return whether a value of a config is a table whose values are tables."""
    return isinstance(value, dict) and all(isinstance(item, dict) for item in value.values())


def _first(config: Mapping[str, Any], names: tuple[str, ...], default: object) -> tuple[str, Any]:
    present = ((name, config[name]) for name in names if config.get(name) is not None)
    return next(present, (names[0], default))


def setting(
    config: Mapping[str, Any], names: tuple[str, ...], default: object, allowed: tuple[object, ...]
) -> Any:
    """Return the first of these keys; raises UnsupportedModelError unless it is in `allowed`."""
    name, value = _first(config, names, default)
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise refuse(f"{name} is {value!r}", need="one of " + ", ".join(map(str, allowed)))
    return value


def group_size(config: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    """Return the inputs per scale, -1 for a complete row; raises UnsupportedModelError."""
    name, value = _first(config, names, default)
    if type(value) is not int or not (value == -1 or 1 <= value <= 1 << 24):
        raise refuse(f"{name} is {value!r}", need="a positive number, or -1")
    return value


def two_numbers(config: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return a pair of positive numbers; raises UnsupportedModelError for other values."""
    value: Any = config.get(name)
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(number) is int and number > 0 for number in value):
        raise refuse(f"{name} is {value!r}", need="two positive numbers")
    return value[0], value[1]


def nontrivial_groups(
    source: Source, stored: StoredTensor, size: int, n_groups: int
) -> StoredTensor | None:
    """Return groups, None if consecutive; raises CheckpointError outside [0, n_groups)."""
    record = source.find(stored.name)
    # Without the file, assume consecutive groups, as in nearly all checkpoints.
    if record is None or record.stamp is None:
        return None
    groups = source.read(stored)
    if groups.tolist() == [i // size for i in range(len(groups))] or (groups == -1).all():
        return None
    first, last = map(int, groups.aminmax())
    if first < 0 or last >= n_groups:
        problem = f"tensor {source.prefix + stored.name!r} names groups that are not there"
        need, have = f"0 to {n_groups - 1}", f"{first} to {last}"
        change = "download the checkpoint again"
        raise CheckpointError(problem, need=need, have=have, change=change)
    return stored


def shape_of(source: Source, name: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return the shape of a tensor if it is in `shapes`, else the first of `shapes`."""
    record = source.find(name)
    return record.shape if record is not None and record.shape in shapes else shapes[0]


def matches_pattern(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the start of a name; raises UnsupportedModelError."""
    try:
        return re.match(pattern, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise refuse(f"{pattern!r} is no regular expression ({error})") from error
