"""A rank's shard of a checkpoint: the bytes of each stored tensor that belong to its submatrix."""

import math
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from offload_rt.errors import CheckpointError, UnsupportedModelError
from offload_rt.models.layers import TensorShape
from offload_rt.parallel.division import Cut
from offload_rt.parallel.tensor_parallel import TensorParallelModel
from offload_rt.system.ranks import Ranks
from offload_rt.weights.checkpoint import Checkpoint, stored_block
from offload_rt.weights.formats import Matrix, StoredTensor, WeightFormat
from offload_rt.weights.header import TensorRecord
from offload_rt.weights.layout import BlockRecord
from offload_rt.weights.source import Source


def divide(checkpoint: Checkpoint, model: TensorParallelModel) -> Checkpoint:
    """Return the checkpoint of a rank's shard.

    Matrices that a format cannot divide by inputs, e.g. with groups in any order, are divided by
    outputs instead; this changes the styles of the model.
    Raises UnsupportedModelError for an indivisible tensor.
    """
    whole = model.whole
    division = model.division
    for i in range(whole.n_layers):
        source = Source(checkpoint.tensors, whole.layer_prefix(i))
        for tensor in whole.layer_tensors(i):
            if (cut := division.cut(*tensor)) is not None and cut.dim == 1:
                try:
                    shard(checkpoint.format, tensor, cut, source)
                except CheckpointError:
                    division.cut_by_outputs(tensor.name)

    def block(tensors: tuple[TensorShape, ...], prefix: str = "") -> BlockRecord:
        source = Source(checkpoint.tensors, prefix)
        shards = list[BlockRecord]()
        for tensor in filter(lambda tensor: division.has(tensor.name), tensors):
            try:
                shards.append(shard(checkpoint.format, tensor, division.cut(*tensor), source))
            except CheckpointError as error:
                what = f"{prefix}{tensor.name} of format {checkpoint.format.name}"
                problem = f"{what} cannot be divided among {model.size} ranks"
                raise UnsupportedModelError(problem, change="start fewer ranks") from error
        records = tuple(record for part in shards for record in part)
        matrices = {name: matrix for part in shards for name, matrix in part.matrices.items()}
        return BlockRecord(records, matrices)

    layers = [block(whole.layer_tensors(i), whole.layer_prefix(i)) for i in range(whole.n_layers)]
    non_layer = block(whole.non_layer_tensors())
    return replace(checkpoint, spec=model, layers=tuple(layers), non_layer=non_layer)


def shard_checkpoint(checkpoint: Checkpoint, rank: int, size: int, is_exact: bool) -> Checkpoint:
    """Return the shard of an absent rank, without compute; raises UnsupportedModelError."""
    ranks = cast(Ranks, SimpleNamespace(rank=rank, size=size))
    return divide(checkpoint, TensorParallelModel.for_rank(checkpoint.spec, ranks, is_exact))


def shard(
    format: WeightFormat, tensor: TensorShape, cut: Cut | None, source: Source
) -> BlockRecord:
    """Return the block of a shard by stored shapes; raises CheckpointError if inseparable."""
    name, shape = tensor
    whole = stored_block(format, [tensor], source)
    if cut is None:
        return whole
    # The shard is a checkpoint of this matrix alone.
    names = (source.prefix + record.key for record in whole)
    records = {name: source.records[name] for name in names}
    first = cut.first if cut.dim == 0 else 0
    shard_source = Source(records, source.prefix, (source, shape, first))
    part = format.stored(name, cut.shape(shape), None, shard_source)
    shapes: list[tuple[int, ...] | None] = [None] * len(whole.tensors)
    # If sizes increase in whole groups, a larger shard is not storable.
    with suppress(CheckpointError):
        larger_shape = cut._replace(n=cut.n + 1).shape(shape)
        larger = format.stored(name, larger_shape, None, shard_source)
        shapes = [piece.shape for piece in larger.tensors]
    tensors = tuple(
        _cut_record(record, piece, cut, shape[cut.dim], larger_piece)
        for record, piece, larger_piece in zip(whole, part.tensors, shapes, strict=True)
    )
    matrices = {name.removesuffix(".weight"): part} if isinstance(part, Matrix) else {}
    return BlockRecord(tensors, matrices)


def _cut_record(
    record: TensorRecord, part: StoredTensor, cut: Cut, total: int, larger: tuple[int, ...] | None
) -> TensorRecord:
    """Return the bytes of a stored tensor that belong to `part`, that of a slice of `total` rows.

    larger  shape for a slice with another row or column; an equal shape means that the slice ends
            within a group of weights, which is an error
    """
    shape = record.shape + (1,) * (len(part.shape) - len(record.shape))
    dims = [i for i, (a, b) in enumerate(zip(shape, part.shape, strict=True)) if a != b]
    if not dims:
        return replace(record, shape=part.shape)
    dim = dims[0]
    n = part.shape[dim]
    is_even = cut.first * shape[dim] % total == 0 and n * total == cut.n * shape[dim]
    if len(dims) > 1 or not is_even or (larger is not None and larger[dim] == n):
        raise CheckpointError(f"{record.name} is not divisible")
    n_pieces = math.prod(shape[:dim])
    stride = record.nbytes // n_pieces
    unit = stride // shape[dim]
    start = record.start + cut.first * shape[dim] // total * unit
    pieces = replace(record, n_pieces=n_pieces, stride=stride)
    return replace(pieces, shape=part.shape, start=start, stop=start + unit * n)
