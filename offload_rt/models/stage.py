"""A range of a model's layers, where the layers are divided among ranks (GPipe, Huang et al. 2019, arXiv 1811.06965)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor

from offload_rt.models.architecture import (
    Architecture,
    KVShape,
    LayerWeights,
    Mixture,
    PassContext,
    StateContext,
    StateShape,
    TensorShape,
    of_whole,
)
from offload_rt.system.ranks import Ranks


@dataclass(frozen=True)
class _OfStage:
    """The pass under way, to layers that number keys and values, and states, by the whole model."""

    context: PassContext
    first: int
    first_state: int

    @property
    def row_inputs(self) -> tuple[Any, ...]:
        return self.context.row_inputs

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, **options: Any) -> Tensor:
        return self.context.attend(layer - self.first, q, k, v, **options)

    def recur(self, layer: int, shape: StateShape, *rows: Tensor) -> Tensor:
        return cast("StateContext", self.context).recur(layer - self.first_state, shape, *rows)


def _of_layer(name: str) -> Any:
    """A method of the whole model that is asked of a layer."""
    return lambda self, i, *args: getattr(self.whole, name)(self.layers[i], *args)


@dataclass(frozen=True)
class Stage(Architecture):
    """The layers of one rank. Hidden states come from the rank before and go to the next; those that the head wants, to rank 0.

    Rank 0 has embedding and head.
    whole   the model
    layers  of it, which are numbers 0, 1, ... here
    ranks   None: the stage computes by itself, with hidden states that mean nothing
    """

    whole: Architecture
    layers: range
    rank: int
    ranks: Ranks | None = field(compare=False, repr=False)

    @classmethod
    def of(cls, whole: Architecture, layers: range, ranks: Ranks) -> "Stage":
        """The layers of `ranks.rank`, some of `divisible(whole)`."""
        sizes = {one.name: getattr(whole, one.name) for one in fields(Architecture)} | {"n_layers": len(layers)}
        return cls(**sizes, whole=whole, layers=layers, rank=ranks.rank, ranks=ranks)

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Of these layers."""
        return tuple(self.whole.kv_shapes[n] for i in self.layers for n in self.whole.kv_layers(i))

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """Of these layers."""
        return self.whole.state_shapes[: sum(i in self.layers for i in self.whole.state_layers)]

    @property
    def mixture(self) -> Mixture | None:
        """Of these layers."""
        whole = self.whole.mixture
        own = tuple(self.layers.index(i) for i in whole.layers if i in self.layers) if whole else ()
        return whole._replace(layers=own) if whole and own else None

    layer_prefix, layer_tensors, flops, window = map(_of_layer, ("layer_prefix", "layer_tensors", "flops", "window"))
    expert_names = _of_layer("expert_names")
    is_unused, row_inputs = map(of_whole, ("is_unused", "row_inputs"))
    is_native, notice = (property(of_whole(name)) for name in ("is_native", "notice"))

    @cached_property
    def _first(self) -> tuple[int, int]:
        """Layers of the cache, and with a state, that stand before these."""
        before = range(self.layers.start)
        return sum(len(self.whole.kv_layers(i)) for i in before), sum(i in before for i in self.whole.state_layers)

    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """All of them on rank 0; the others of a native decoder have no tables. What other models tell layers may need them."""
        found = self.whole.non_layer_tensors()
        return tuple(one for one in found if self.rank == 0 or not self.is_native or len(one.shape) == 1)

    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """The model's; what the first layer gets is room for hidden states where another rank computes them."""
        if self.rank == 0 or not self.is_native:
            return self.whole.embed(weights, ids, row_inputs)
        return torch.zeros(len(ids), self.hidden_size, dtype=weights.dtype, device=ids.device), row_inputs

    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """The model's, on hidden states from the rank before, for the next one."""
        if self.ranks is not None and i == 0 and self.rank > 0:
            self.ranks.receive(x, self.rank - 1)
        x = self.whole.layer(self.layers[i], weights, x, _OfStage(context, *self._first))
        if self.ranks is not None and i == self.n_layers - 1 and self.rank < self.ranks.size - 1:
            self.ranks.send(x, self.rank + 1)
        return x

    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """On rank 0 logits of the hidden states of these rows, which the last rank sends; the others give what they have."""
        if self.ranks is not None and len(x):
            if self.rank == self.ranks.size - 1:
                self.ranks.send(x, 0)
            elif self.rank == 0:
                x = torch.empty_like(x)
                self.ranks.receive(x, self.ranks.size - 1)
            self.ranks.finish_sending()
        return self.whole.head(weights, x) if self.rank == 0 else x

    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """The model's, without logits where there is no head."""
        return self.whole.scratch_nbytes(n_rows, n_logits if self.rank == 0 else 0, itemsize)


def divisible(model: Architecture) -> list[range]:
    """The least parts that a model's layers are divided into: each keeps all that it attends to, keys and values and, where
    layers have one, a state, so that the caches of all ranks go back to the same tokens.
    """
    n, states, found, first = model.n_layers, model.state_layers, list[range](), 0
    n_before = list(accumulate((len(model.kv_layers(i)) for i in range(n)), initial=0))
    for stop in range(1, n + 1):
        part, others = range(first, stop), (one for i in range(stop, n) for one in model.kv_read(i))
        has_state = not states or any(i in part for i in states)
        if has_state and n_before[stop] > n_before[first] and all(one >= n_before[stop] for one in others):
            found.append(part)
            first = stop
    return [*found[:-1], range(found[-1].start, n)]


def divide_layers(nbytes: Sequence[int], rooms: Sequence[int]) -> list[range]:
    """Consecutive layers for each rank, at least one, so that the rank that is fullest is as little full as can be.

    nbytes  of each layer
    rooms   bytes of each rank
    """

    def cut(load: float) -> list[range]:
        found, first = list[range](), 0
        for rank, room in enumerate(rooms):
            last, taken = first + 1, nbytes[first]
            while last < len(nbytes) - (len(rooms) - 1 - rank) and taken + nbytes[last] <= load * room:
                taken += nbytes[last]
                last += 1
            found.append(range(first, last))
            first = last
        return found

    low, high = 0.0, 2 * sum(nbytes) / min(rooms)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle)[-1].stop == len(nbytes) else (middle, high)
    return cut(high)
