"""Checkpoints, checked completely before the first weight is read."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from offload_rt.dtypes import DTYPES, DType
from offload_rt.errors import CheckpointError
from offload_rt.models.architecture import Architecture
from offload_rt.models.families import parse_architecture
from offload_rt.models.layers import TensorShape
from offload_rt.weights.files import PROCESSOR_FILES, read_config, tensors_of
from offload_rt.weights.formats import Matrix, WeightFormat, format_of
from offload_rt.weights.gguf import SUFFIX, read_gguf
from offload_rt.weights.header import FLOATS, TensorRecord
from offload_rt.weights.layout import PAGE, BlockRecord
from offload_rt.weights.locate import find_config, hub_headers, is_here, locate
from offload_rt.weights.source import OTHER_CONFIG, Source


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint with all expected tensors."""

    path: Path  # directory or GGUF file
    spec: Architecture
    format: WeightFormat
    layers: tuple[BlockRecord, ...]  # each in the order of `spec.layer_tensors(i)`
    non_layer: BlockRecord  # in the order of `spec.non_layer_tensors()`
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    # All tensors by the model's names.
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict, compare=False, repr=False)
    images: tuple[BlockRecord, ...] = ()  # if used: tensors outside its blocks, then its blocks
    # Complete checkpoint, if this is a part.
    whole: "Checkpoint | None" = field(default=None, compare=False, repr=False)

    @property
    def blocks(self) -> tuple[BlockRecord, ...]:
        """Layers, the tensors outside the layers, then the vision tower if it is used."""
        return (*self.layers, self.non_layer, *self.images)

    @property
    def records(self) -> Iterator[TensorRecord]:
        """Records of all blocks."""
        return (record for block in self.blocks for record in block)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def dtype(self) -> DType:
        """Dtype of the embedding; if quantised, of the config, else of the first float tensor."""
        if self.non_layer.tensors[0].dtype not in FLOATS and self.spec.dtype_name is not None:
            return DTYPES[self.spec.dtype_name]
        records = (*self.non_layer, *self.layers[0])
        floats = (FLOATS[record.dtype] for record in records if record.dtype in FLOATS)
        return next(floats, DType.FLOAT32)

    def by_expert(self) -> "tuple[Checkpoint, tuple[BlockRecord, ...]] | None":
        """Separate the experts of mixtures: the checkpoint without experts, and a block per expert.

        Experts are ordered by layer. Returns None if a stacked tensor has no row per expert.
        """
        mixture = self.spec.mixture
        if mixture is None:
            return None
        layers = list(self.layers)
        experts = list[BlockRecord]()
        for i in mixture.layers:
            divided = _divide_experts(layers[i], self.spec.expert_names(i), mixture.n_experts)
            if divided is None:
                return None
            layers[i], blocks = divided
            experts += blocks
        return replace(self, layers=tuple(layers)), tuple(experts)

    def image_blocks(self) -> tuple[BlockRecord, ...]:
        """Return the vision tower; empty if unsupported, or without an image processor."""
        tower = self.spec.images
        if tower is None or not any((self.path / name).exists() for name in PROCESSOR_FILES):
            return ()
        source = Source(self.tensors)
        return tuple(stored_block(self.format, part, source) for part in tower.parts)

    @cached_property
    def identity(self) -> str:
        """Short hash of the weights: config, and name, shape, dtype and a page of each tensor.

        The page distinguishes fine-tunes, which have equal headers. Copies, new downloads and other
        shards have the same identity, unlike file times. The cost is a small read per tensor.
        Raises CheckpointError if a file cannot be read.
        """
        digest = hashlib.sha256(repr(sorted(self.config.items())).encode())
        for record in (self.whole or self).records:
            nbytes = record.stop - record.start
            middle = (record.start + record.stop) // 2 - record.start
            page = record.read(middle, min(PAGE, nbytes - middle))
            digest.update(repr((record.name, record.shape, record.dtype)).encode() + page)
        return digest.hexdigest()[:24]


def _divide_experts(
    layer: BlockRecord, owners: Mapping[str, int | None], n_experts: int
) -> tuple[BlockRecord, list[BlockRecord]] | None:
    """Divide a layer into tensors of no expert and a block per expert, by owners of modules."""

    def owner(key: str) -> str:
        names = accumulate(key.split("."), "{}.{}".format)
        return next((name for name in names if name in owners), "")

    rest = list[TensorRecord]()
    tensors: list[list[TensorRecord]] = [[] for _ in range(n_experts)]
    for record in layer:
        name = owner(record.key)
        expert = owners.get(name)
        if not name:
            rest.append(record)
        elif expert is not None:
            tensors[expert].append(record)
        elif record.key == name and record.shape[0] == n_experts:
            for n, records in enumerate(tensors):
                row = record.rows(n, 1)
                records.append(replace(row, shape=row.shape[1:], key=f"{name}.{n}"))
        else:
            return None
    matrices: dict[int | None, dict[str, Matrix]] = {n: {} for n in (None, *range(n_experts))}
    for module, matrix in layer.matrices.items():
        matrices[owners.get(owner(module))][module] = matrix
    blocks = [BlockRecord(tuple(records), matrices[n]) for n, records in enumerate(tensors)]
    return BlockRecord(tuple(rest), matrices[None]), blocks


def open_headers(model: str, revision: str | None = None, offline: bool = False) -> Checkpoint:
    """Open a checkpoint by its headers only; raises as `locate` and `open_checkpoint`."""
    if offline or is_here(model, revision):
        return open_checkpoint(locate(model, revision, offline))
    config = find_config(model, revision)
    weight_format = format_of(config.get("quantization_config"))
    spec = parse_architecture(without_quantization(config))
    return assemble(Path(model), config, spec, weight_format, hub_headers(model, revision, offline))


def open_checkpoint(path: Path) -> Checkpoint:
    """Read config and headers once; check name, shape and dtype of all tensors.

    path  a directory or GGUF file, as returned by `locate`
    Raises UnsupportedModelError for an unsupported config, CheckpointError for other problems.
    """
    is_gguf = path.suffix == SUFFIX
    config, stored = read_gguf(path) if is_gguf else (read_config(path), None)
    weight_format = format_of(config.get("quantization_config"))
    spec = parse_architecture(without_quantization(config))
    stored = tensors_of(path) if stored is None else stored
    return assemble(path, config, spec, weight_format, stored)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy, which model classes may modify, without `quantization_config`."""
    copy = deepcopy(dict(config))
    copy.pop("quantization_config", None)
    return copy


def assemble(
    path: Path,
    config: Mapping[str, Any],
    spec: Architecture,
    weight_format: WeightFormat,
    stored: Mapping[str, TensorRecord],
) -> Checkpoint:
    """Assemble a checkpoint; raises CheckpointError for missing, mismatched or unknown tensors."""
    spec, parts = spec.of_checkpoint({name: record.shape for name, record in stored.items()})
    tensors = {
        name: stored[part.name].rows(part.first, part.n_rows) if part.n_rows else stored[part.name]
        for name, part in parts.items()
    }
    layers = tuple(
        stored_block(weight_format, spec.layer_tensors(i), Source(tensors, spec.layer_prefix(i)))
        for i in range(spec.n_layers)
    )
    rest = stored_block(weight_format, spec.non_layer_tensors(), Source(tensors))
    checkpoint = Checkpoint(path, spec, weight_format, layers, rest, config, tensors)
    expected = {(record.name, record.start) for record in checkpoint.records}
    for name, record in tensors.items():
        is_expected = (record.name, record.start) in expected or spec.is_unused(name)
        if not is_expected and not weight_format.is_unused(name, Source(tensors)):
            part = f"no part of a {spec.family} model"
            problem = f"{record.path.name}: tensor {name!r} belongs to {part}"
            raise CheckpointError(problem, change=OTHER_CONFIG)
    return checkpoint


def stored_block(
    weight_format: WeightFormat, tensors: Iterable[TensorShape], source: Source
) -> BlockRecord:
    """Return the block of an architecture's tensors; raises CheckpointError."""
    records = list[TensorRecord]()
    matrices = dict[str, Matrix]()
    for name, shape in tensors:
        stored = weight_format.stored(name, shape, None, source)
        records += map(source.expect, stored.tensors)
        if isinstance(stored, Matrix):
            matrices[name.removesuffix(".weight")] = stored
    return BlockRecord(tuple(records), matrices)
