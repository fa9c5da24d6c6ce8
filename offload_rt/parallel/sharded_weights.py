"""The part of a checkpoint that a rank of several has: of each stored tensor the bytes of its part
of the matrix.
"""

import math
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from offload_rt.errors import CheckpointError, UnsupportedModelError
from offload_rt.models.architecture import TensorShape
from offload_rt.parallel.tensor_parallel import Cut, TensorParallelModel
from offload_rt.system.ranks import Ranks
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.formats import StoredTensor, WeightFormat
from offload_rt.weights.header import TensorRecord
from offload_rt.weights.source import Source


def divide(checkpoint: Checkpoint, model: TensorParallelModel) -> Checkpoint:
    """The records of a rank's part of a model.

    Where a format has no parts by inputs, as of groups in any order, the styles of the model come
    to say outputs.
    Raises UnsupportedModelError where a tensor is stored as one.
    """
    whole = model.whole
    for i in range(whole.n_layers):
        source = Source(checkpoint.found, whole.layer_prefix(i))
        for tensor in whole.layer_tensors(i):
            if (cut := model.cut(*tensor)) is not None and cut.dim == 1:
                try:
                    parts(checkpoint.format, tensor, cut, source)
                except CheckpointError:
                    model.cut_by_outputs(tensor.name)

    def records(tensors: tuple[TensorShape, ...], prefix: str = "") -> tuple[TensorRecord, ...]:
        source = Source(checkpoint.found, prefix)
        found = list[TensorRecord]()
        for tensor in tensors:
            if model.has(tensor.name):
                try:
                    found += parts(checkpoint.format, tensor, model.cut(*tensor), source)
                except CheckpointError as error:
                    what = f"{prefix}{tensor.name} of format {checkpoint.format.name}"
                    problem = f"{what} cannot be divided among {model.size} ranks"
                    raise UnsupportedModelError(problem, change="start fewer ranks") from error
        return tuple(found)

    layers = tuple(
        records(whole.layer_tensors(i), whole.layer_prefix(i)) for i in range(whole.n_layers)
    )
    return replace(
        checkpoint, spec=model, layers=layers, non_layer=records(whole.non_layer_tensors())
    )


def part_of(checkpoint: Checkpoint, rank: int, size: int, is_exact: bool) -> Checkpoint:
    """The part of a rank that is not there: nothing can be computed with it. Raises
    UnsupportedModelError as `divide`.
    """
    ranks = cast(Ranks, SimpleNamespace(rank=rank, size=size))
    return divide(checkpoint, TensorParallelModel.of(checkpoint.spec, ranks, is_exact))


def parts(
    format: WeightFormat, tensor: TensorShape, cut: Cut | None, source: Source
) -> list[TensorRecord]:
    """The records of a part of a matrix, however a format stores it: what it says of the part's
    shape tells where to cut.

    Raises CheckpointError where parts cannot be told apart.
    """
    name, shape = tensor
    stored = format.stored(name, shape, None, source)
    records = [source.expect(one) for one in stored]
    if cut is None:
        return records
    # A rank's part is a checkpoint of its own, in which nothing but this matrix is known.
    names = (source.prefix + one.name for one in stored)
    first = cut.first if cut.dim == 0 else 0
    own = Source({one: source.records[one] for one in names}, source.prefix, (source, shape, first))
    part = format.stored(name, cut.shape(shape), None, own)
    more: tuple[StoredTensor, ...] | None = None
    # where parts of such a size cannot be stored, this one is of whole groups
    with suppress(CheckpointError):
        more = format.stored(name, cut._replace(n=cut.n + 1).shape(shape), None, own)
    return [
        _part(
            replace(record, key=one.key),
            one,
            (cut, shape[cut.dim]),
            None if more is None else more[i].shape,
        )
        for i, (record, one) in enumerate(zip(records, part, strict=True))
    ]


def _part(
    record: TensorRecord, part: StoredTensor, of: tuple[Cut, int], more: tuple[int, ...] | None
) -> TensorRecord:
    """The bytes of a stored tensor that are of a part of its matrix.

    of    the part, and the rows or columns of the whole
    more  shape where the part has one row or column more, which begins another group of weights
    """
    (cut, whole), shape = of, record.shape + (1,) * (len(part.shape) - len(record.shape))
    dims = [i for i, (a, b) in enumerate(zip(shape, part.shape, strict=True)) if a != b]
    if not dims:
        return replace(record, shape=part.shape)
    at = dims[0]
    n = part.shape[dims[0]]
    is_even = cut.first * shape[at] % whole == 0 and n * whole == cut.n * shape[at]
    if len(dims) > 1 or not is_even or (more is not None and more[at] == n):
        raise CheckpointError(f"{record.name} has no part")
    row = record.nbytes // math.prod(shape[:at])
    nbytes = row // shape[at] * n
    start = record.start + cut.first * shape[at] // whole * (row // shape[at])
    n_pieces = math.prod(shape[:at])
    return replace(
        record, shape=part.shape, start=start, stop=start + nbytes, n_pieces=n_pieces, stride=row
    )
