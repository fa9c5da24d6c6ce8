"""Pipeline stage: a range of a model's layers (GPipe, Huang et al. 2019, arXiv 1811.06965)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import (
    Attention,
    KVShape,
    LayerWeights,
    Mixture,
    PassContext,
    StateContext,
    StateShape,
    TensorShape,
)
from offload_rt.parallel.model_part import ModelPart
from offload_rt.system.ranks import Ranks


@dataclass(frozen=True)
class _StageContext:
    """Pass context for layers that index caches and states by the complete model."""

    context: PassContext
    first: int
    first_state: int

    @property
    def row_inputs(self) -> tuple[Any, ...]:
        return self.context.row_inputs

    def attend(self, asked: Attention) -> Tensor:
        return self.context.attend(replace(asked, layer=asked.layer - self.first))

    def recur(self, layer: int, shape: StateShape, *rows: Tensor) -> Tensor:
        return cast("StateContext", self.context).recur(layer - self.first_state, shape, *rows)


def _layer_method(name: str) -> Any:
    return lambda self, i, *args: getattr(self.whole, name)(self.layers[i], *args)


@dataclass(frozen=True)
class Stage(ModelPart):
    """Layers of a rank, between which hidden states pass. Rank 0 owns embedding and head."""

    # Hidden states cross ranks within a pass.
    supports_graphs = False

    layers: range

    @classmethod
    def for_rank(cls, whole: Architecture, layers: range, ranks: Ranks) -> "Stage":
        """Create the stage of `ranks.rank`; `layers` are a union of `divisible(whole)` parts."""
        sizes = {item.name: getattr(whole, item.name) for item in fields(Architecture)}
        sizes["n_layers"] = len(layers)
        return cls(**sizes, whole=whole, layers=layers, rank=ranks.rank, ranks=ranks)

    def alone(self) -> "Stage":
        """Return the stage without messages, computing on meaningless hidden states."""
        return replace(self, ranks=None)

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        return tuple(self.whole.kv_shapes[n] for i in self.layers for n in self.whole.kv_layers(i))

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        return self.whole.state_shapes[: sum(i in self.layers for i in self.whole.state_layers)]

    @property
    def mixture(self) -> Mixture | None:
        if (whole := self.whole.mixture) is None:
            return None
        layers = tuple(self.layers.index(i) for i in whole.layers if i in self.layers)
        return whole._replace(layers=layers) if layers else None

    layer_prefix, layer_tensors, flops, window = map(
        _layer_method, ("layer_prefix", "layer_tensors", "flops", "window")
    )
    expert_names = _layer_method("expert_names")

    @cached_property
    def _first(self) -> tuple[int, int]:
        """Number of cache layers and of state layers before this stage."""
        before = range(self.layers.start)
        n_states = sum(i in before for i in self.whole.state_layers)
        return sum(len(self.whole.kv_layers(i)) for i in before), n_states

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """Return all tensors on rank 0; native decoders need no tables on further ranks."""
        tensors = self.whole.non_layer_tensors()
        if self.rank == 0 or self.embeds_on_all_stages:
            return tensors
        return tuple(tensor for tensor in tensors if len(tensor.shape) == 1)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Embed on rank 0; further ranks of a native decoder allocate room for hidden states."""
        if self.rank == 0 or self.embeds_on_all_stages:
            return self.whole.embed(weights, ids, row_inputs)
        room = torch.zeros(len(ids), self.hidden_size, dtype=weights.dtype, device=ids.device)
        return room, row_inputs

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """Apply a layer; receive input from the previous rank, send output to the next rank."""
        if self.ranks is not None and i == 0 and self.rank > 0:
            self.ranks.receive(x, self.rank - 1)
        x = self.whole.layer(self.layers[i], weights, x, _StageContext(context, *self._first))
        if self.ranks is not None and i == self.n_layers - 1 and self.rank < self.ranks.size - 1:
            self.ranks.send(x, self.rank + 1)
        return x

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Send final rows from the last rank to rank 0, which computes logits."""
        if self.ranks is not None and len(x):
            if self.rank == self.ranks.size - 1:
                self.ranks.send(x, 0)
            elif self.rank == 0:
                x = torch.empty_like(x)
                self.ranks.receive(x, self.ranks.size - 1)
            self.ranks.finish_sending()
        return self.whole.head(weights, x) if self.rank == 0 else x

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """Return the model's activation bytes, without logits on ranks without head."""
        return self.whole.scratch_nbytes(n_rows, n_logits if self.rank == 0 else 0, itemsize)


def divisible(model: Architecture) -> list[range]:
    """Return the smallest units for splitting a model's layers.

    Each unit contains every cache layer it reads and, if the model has recurrent states, a state.
    All ranks can therefore rewind to equal positions.
    """
    n = model.n_layers
    states = model.state_layers
    parts = list[range]()
    first = 0
    n_before = list(accumulate((len(model.kv_layers(i)) for i in range(n)), initial=0))
    for stop in range(1, n + 1):
        part = range(first, stop)
        later_reads = (layer for i in range(stop, n) for layer in model.kv_read(i))
        has_state = not states or any(i in part for i in states)
        is_separate = all(layer >= n_before[stop] for layer in later_reads)
        if has_state and is_separate and n_before[stop] > n_before[first]:
            parts.append(part)
            first = stop
    return [*parts[:-1], range(parts[-1].start, n)]


def divide_layers(nbytes: Sequence[int], rooms: Sequence[int]) -> list[range]:
    """Assign consecutive layers to ranks, at least one each, minimizing the largest fill level."""

    def cut(load: float) -> list[range]:
        cuts = list[range]()
        first = 0
        for n_later, room in zip(reversed(range(len(rooms))), rooms, strict=True):
            last = first + 1
            while last < len(nbytes) - n_later and sum(nbytes[first : last + 1]) <= load * room:
                last += 1
            cuts.append(range(first, last))
            first = last
        return cuts

    low = 0.0
    high = 2 * sum(nbytes) / min(rooms)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle)[-1].stop == len(nbytes) else (middle, high)
    return cut(high)
