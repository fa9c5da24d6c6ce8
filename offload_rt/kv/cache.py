"""Keys and values of one sequence: committed rows, and the pending rows of the pass under way."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.errors import CapacityError
from offload_rt.kv.split import KVBytes
from offload_rt.models.architecture import Architecture, KVShape
from offload_rt.ops.reference import rotate


class RowRange(NamedTuple):
    """Rows [start, stop) of a layer in a block beyond the device."""

    layer: int
    block: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Attention:
    """What a layer asks of a cache: to keep keys and values of pending rows [start, start + n), and the attention of these.

    q       (n, n_heads, head_dim)
    k, v    (n, n_kv_heads, head_dim); None: they are there already
    mask    what the rows look at among the n_committed + start + n first ones
    rotary  cosines and sines (n, head_dim) each, by which q and k are rotated first; None: not at all
    softcap, sinks  see `PassContext.attend`
    """

    layer: int
    start: int
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    mask: ops.TreeMask
    scale: float
    rotary: tuple[Tensor, Tensor] | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def query(self, row: int) -> "Attention | None":
        """The query of a pending row alone, rotated; None where it is not among these."""
        at = slice(row - self.start, row - self.start + 1)
        q = self.q[at] if self.rotary is None else rotate(self.q[at], *(one[at] for one in self.rotary))
        return replace(self, q=q, k=None, v=None, rotary=None) if 0 <= at.start < len(self.q) else None


class KVCache(ABC):
    """Rows [0, n_committed) hold the tokens `committed`; the rows behind them are pending, or unused.

    A kind of cache decides where the rows lie and how they are attended to; tokens are kept here.

    keeps_query  whether the queries of the last layer are wanted
    asked        what that layer asked for the pending rows, where a pass was not captured; else None
    query        the part of it that is of the token committed last
    leader       has the committed rows, which this one copies in its next pass; None: they are here
    """

    keeps_query = False
    asked: Attention | None = None
    query: Attention | None = None
    leader: "KVCache | None" = None

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed: list[int] = []
        self._pending: list[int] = []

    @abstractmethod
    def attend(self, asked: Attention) -> Tensor:
        """Keep what is to be kept; returns (n, n_heads, head_dim of v)."""

    @abstractmethod
    def move(self, rows: Sequence[int], first: int) -> None:
        """Move rows `first + rows` to `first` and on, in all layers; rows ascend, rows[i] >= i."""

    @abstractmethod
    def rows(self, layer: int, tokens: range) -> tuple[Tensor, Tensor]:
        """Keys, as they were rotated, and values of committed tokens, (n_kv_heads, n, head_dim) each; not to be kept."""

    def beyond(self, layer: int) -> Iterable[RowRange]:
        """What each call of `attend` for a layer needs brought to the device, in order."""
        return ()

    def assume(self, n: int) -> None:
        """Take the first n rows for committed, whatever they hold."""
        self.committed = [0] * n

    def extend(self, capacity: int, n_nodes: int) -> bool:
        """Have room for so many rows, trees of `n_nodes` among them, where no row has to move; returns whether there is."""
        return capacity <= self.capacity

    def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Give back what the cache has of memory that others use as well."""

    @property
    def n_committed(self) -> int:
        """Committed tokens, which is the position of the first pending one."""
        return len(self.committed)

    @property
    def n_held(self) -> int:
        """Rows that committed tokens take, before the pending ones; fewer where a kind of cache does not keep all."""
        return self.n_committed

    @property
    def n_seen(self) -> int:
        """Committed rows that the pending ones see."""
        return self.n_held

    def begin(self, tokens: Sequence[int]) -> None:
        """Make room for one pending row for each token, behind the committed ones.

        Raises CapacityError if there is not enough.
        """
        need = self.n_held + len(tokens)
        if need > self.capacity:
            change = "raise --max-model-len or lower --tree-size"
            raise CapacityError("the cache", need=f"{need} rows", have=str(self.capacity), change=change)
        self._pending = list(tokens)

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these pending rows, in order. Those behind stay pending if no row was moved, else all others are dropped.

        rows  ascending indices into the pending rows
        """
        assert all(a < b for a, b in itertools.pairwise(rows)), "rows ascend"
        n_in_place = next((i for i, row in enumerate(rows) if row != i), len(rows))
        moved = [row - n_in_place for row in rows[n_in_place:]]
        if moved:
            self.move(moved, self.n_held + n_in_place)
        self.committed += [self._pending[row] for row in rows]
        if self.asked is not None and rows:
            self.query, self.asked = self.asked.query(rows[-1]), None
        self._pending = [] if moved else self._pending[len(rows) :]

    def discard(self) -> None:
        """Drop all pending rows, as when a pass failed."""
        self._pending, self.asked = [], None

    def rewind_to(self, tokens: Sequence[int]) -> int:
        """Keep the longest common prefix of the committed tokens and `tokens`; return its length."""
        n = len(self.committed)
        if list(tokens[:n]) != self.committed:  # rare, and comparing whole lists is fast
            n = n_shared(self.committed, tokens)
            del self.committed[n:]
        return n


def n_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True, eq=False)
class KVBuffer:
    """Memory for keys and values, each (n_layers, n_kv_heads, capacity, head_dim); those of values may be narrower."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, shapes: Sequence[KVShape], capacity: int, dtype: torch.dtype, device: torch.device) -> "KVBuffer":
        """Uninitialised memory for layers of these shapes, which are all the same."""
        n_heads, *dims = shapes[0]
        return cls(*(torch.empty(len(shapes), n_heads, capacity, dim, dtype=dtype, device=device) for dim in dims))

    @property
    def capacity(self) -> int:
        """Rows."""
        return self.keys.shape[2]

    def clear(self, first: int = 0) -> None:
        """Zero the rows from `first` on, which an earlier sequence may have left as NaN."""
        for part in (self.keys, self.values):
            part[:, :, first:].zero_()

    def attend(self, layer: int, rows: slice | Tensor, asked: Attention) -> Tensor:
        """Write k and v to `rows` of a layer; attention of q to the first mask.n_keys rows."""
        keys, values, q, mask = self.keys[layer], self.values[layer], asked.q, asked.mask
        if asked.k is not None and asked.v is not None:
            q = ops.rotate_and_store(q, asked.k, asked.v, asked.rotary, keys, values, rows)
        seen = keys[:, : mask.n_keys], values[:, : mask.n_keys]
        return ops.tree_attention(q, *seen, mask, asked.scale, asked.softcap, asked.sinks)


class MovedRows(NamedTuple):
    """What a cache leaves to another one: tokens, their rows in memory of the host, and states by position, if it has some."""

    tokens: list[int]
    rows: list[KVBuffer]
    states: dict[int, Any]


class ContiguousCache(KVCache):
    """All rows in one buffer on the device that computes, or in one for all layers of the same shape.

    more  buffers besides the first, and for each layer its buffer and its number there
    """

    def __init__(self, buffer: KVBuffer, *more: KVBuffer, places: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(buffer.capacity)
        self.buffer = buffer
        self._buffers, self._places = (buffer, *more), places

    @classmethod
    def empty(cls, model: Architecture, capacity: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A cache without tokens, with room for `capacity` rows."""
        shapes, places = list(dict.fromkeys(model.kv_shapes)), list[tuple[int, int]]()
        for shape in model.kv_shapes:
            n = shapes.index(shape)
            places.append((n, sum(one == n for one, _ in places)))
        of_shape = (tuple(one for one in model.kv_shapes if one == shape) for shape in shapes)
        return cls(*(KVBuffer.empty(one, capacity, dtype, device) for one in of_shape), places=places)

    @staticmethod
    def nbytes(model: Architecture, n_rows: int, itemsize: int) -> KVBytes:
        """What caches of so many rows take, with elements of `itemsize` bytes: all on the device."""
        return KVBytes(device=n_rows * model.kv_nbytes(itemsize))

    def attend(self, asked: Attention) -> Tensor:
        """Write k and v behind the rows there are, and attend to all of them."""
        first = self.n_held + asked.start
        n, layer = self._places[asked.layer] if self._places else (0, asked.layer)
        buffer = self._buffers[n]
        if self.leader is not None and asked.start == 0:
            keys, values = self.leader.rows(asked.layer, range(first))
            buffer.keys[layer, :, :first], buffer.values[layer, :, :first] = keys, values
        return buffer.attend(layer, slice(first, first + len(asked.q)), asked)

    def follow(self, leader: KVCache, tokens: list[int]) -> None:
        """Begin with these tokens, whose rows another cache has, or has once it has attended in the next pass.

        They are copied in that pass, layer by layer.
        """
        self.committed, self.leader = tokens, leader

    def commit(self, rows: Sequence[int]) -> None:
        """See `KVCache.commit`."""
        super().commit(rows)
        self.leader = None

    def discard(self) -> None:
        """See `KVCache.discard`; what was to be copied may not be there."""
        super().discard()
        if self.leader is not None:
            self.committed, self.leader = [], None

    def to_host(self) -> MovedRows:
        """The committed tokens and copies of their rows."""
        n = self.n_committed
        parts = [(one.keys[:, :, :n], one.values[:, :, :n]) for one in self._buffers]
        rows = [KVBuffer(*(part.to("cpu", copy=True) for part in pair)) for pair in parts]
        return MovedRows(self.committed, rows, {})

    def load(self, moved: MovedRows) -> None:
        """Begin with these tokens and their rows, as `to_host` has given them."""
        self.committed, n = moved.tokens, len(moved.tokens)
        for to, source in zip(self._buffers, moved.rows, strict=True):
            to.keys[:, :, :n], to.values[:, :, :n] = source.keys, source.values

    def move(self, rows: Sequence[int], first: int) -> None:
        """Move rows in place."""
        for buffer in self._buffers:
            ops.commit_rows(buffer.keys, buffer.values, torch.tensor(rows), first)

    def rows(self, layer: int, tokens: range) -> tuple[Tensor, Tensor]:
        """Where they lie."""
        n, layer = self._places[layer] if self._places else (0, layer)
        at = slice(tokens.start, tokens.stop)
        return self._buffers[n].keys[layer, :, at], self._buffers[n].values[layer, :, at]
