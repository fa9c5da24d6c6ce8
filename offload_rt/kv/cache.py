"""KV cache of a sequence: committed rows, and pending rows of the current pass."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile
from operator import eq
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.errors import CapacityError
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import Attention, KVShape


class RowRange(NamedTuple):
    """Rows [start, stop) of a layer within a block of off-device memory."""

    layer: int
    block: int
    start: int
    stop: int


class KVCache(ABC):
    """Rows [0, n_committed) store the tokens `committed`; later rows are pending or unused.

    Subclasses decide on storage and attention; this class tracks tokens.

    leader  cache to copy committed rows from in the next pass; None if rows are present
    buffer  memory of all rows on the device, for CUDA graphs; None if some rows are elsewhere
    """

    leader: "KVCache | None" = None
    buffer: "KVBuffer | None" = None

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed: list[int] = []
        self._pending: list[int] = []

    @abstractmethod
    def attend(self, asked: Attention, start: int, mask: ops.TreeMask) -> Tensor:
        """Store keys and values; return attention outputs (n, n_heads, head_dim of v).

        start  index of the first row among the pending rows
        mask   visibility of the first n_committed + start + n rows
        """

    def in_place(self) -> "KVBuffer | None":
        """Return the memory of all layers if `attend` only stores rows there and reads them."""
        return None

    @abstractmethod
    def move(self, rows: Sequence[int], first: int) -> None:
        """Move rows `first + rows` to `first` onwards in all layers; ascending, rows[i] >= i."""

    @abstractmethod
    def rows(self, layer: int, tokens: range) -> tuple[Tensor, Tensor]:
        """Return keys and values (n_kv_heads, n, head_dim), valid until the next operation."""

    def offloaded(self, layer: int) -> Iterable[RowRange]:
        """Return the off-device rows each `attend` call of a layer reads, in order."""
        return ()

    def assume(self, n: int) -> None:
        """Mark the first n rows as committed, with arbitrary content."""
        self.committed = [0] * n

    def extend(self, capacity: int, n_nodes: int) -> bool:
        """Extend to `capacity` rows, with trees of `n_nodes`, in place; return success."""
        return capacity <= self.capacity

    def copy_prefix(self, leader: "KVCache", tokens: list[int]) -> None:
        """Start with tokens of a leader cache, which has their rows or computes them next pass."""

    def to_host(self) -> "MovedRows | None":
        """Copy the committed tokens and rows to host memory, if the cache supports it."""
        return None

    def load(self, moved: "MovedRows") -> None:
        """Load tokens and rows saved by `to_host`, if the cache supports it."""

    def close(self) -> None:
        """Return shared memory."""

    @property
    def n_committed(self) -> int:
        """Number of committed tokens, equal to the position of the first pending token."""
        return len(self.committed)

    @property
    def n_held(self) -> int:
        """Rows in use by committed tokens; fewer than `n_committed` in sparse caches."""
        return self.n_committed

    @property
    def n_seen(self) -> int:
        """Number of committed rows visible to pending rows."""
        return self.n_held

    def begin(self, tokens: Sequence[int]) -> None:
        """Reserve a pending row per token, after the committed rows; raises CapacityError."""
        need = self.n_held + len(tokens)
        if need > self.capacity:
            have = str(self.capacity)
            change = "raise --max-model-len or lower --tree-size"
            raise CapacityError("the KV cache", need=f"{need} rows", have=have, change=change)
        self._pending = list(tokens)

    def commit(self, rows: Sequence[int]) -> None:
        """Commit pending rows, ascending; later rows stay pending only if none was moved."""
        assert all(a < b for a, b in pairwise(rows)), "rows ascend"
        n_in_place = next((i for i, row in enumerate(rows) if row != i), len(rows))
        moved = [row - n_in_place for row in rows[n_in_place:]]
        if moved:
            self.move(moved, self.n_held + n_in_place)
        self.committed += [self._pending[row] for row in rows]
        self._pending = [] if moved else self._pending[len(rows) :]

    def discard(self) -> None:
        """Drop all pending rows: those of rejected nodes, or of a failed pass."""
        self._pending = []

    def rewind_to(self, tokens: Sequence[int]) -> int:
        """Keep the longest common prefix of committed tokens and `tokens`; return its length."""
        if list(tokens[: self.n_committed]) != self.committed:  # comparing whole lists is fast
            del self.committed[n_shared(self.committed, tokens) :]
        return self.n_committed


def n_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    return sum(takewhile(bool, map(eq, a, b)))


@dataclass(frozen=True, eq=False)
class KVBuffer:
    """Keys and values, each (n_layers, n_kv_heads, capacity, head_dim); values may be narrower."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(
        cls, shapes: Sequence[KVShape], capacity: int, dtype: torch.dtype, device: torch.device
    ) -> "KVBuffer":
        """Allocate uninitialised memory for layers of equal shape."""
        n_heads, *dims = shapes[0]
        empty = partial(torch.empty, dtype=dtype, device=device)
        return cls(*(empty(len(shapes), n_heads, capacity, dim) for dim in dims))

    @property
    def capacity(self) -> int:
        """Number of rows."""
        return self.keys.shape[2]

    def clear(self, first: int = 0) -> None:
        """Zero the rows from `first` on; earlier sequences may have left NaN."""
        for part in (self.keys, self.values):
            part[:, :, first:].zero_()

    def attend(
        self, layer: int, rows: slice | Tensor, asked: Attention, mask: ops.TreeMask
    ) -> Tensor:
        """Store k and v in `rows` of a layer; attend with q to the first mask.n_keys rows."""
        parts = self.keys[layer], self.values[layer]
        q = asked.q
        if asked.k is not None and asked.v is not None:
            q = ops.rotate_and_store(q, asked.k, asked.v, asked.rotary, *parts, rows)
        keys, values = (part[:, : mask.n_keys] for part in parts)
        return ops.tree_attention(q, keys, values, mask, asked.scale, asked.softcap, asked.sinks)


class MovedRows(NamedTuple):
    """Contents moved between caches: tokens, rows in host memory, and states by position."""

    tokens: list[int]
    rows: list[KVBuffer]
    states: dict[int, Any]


class ContiguousCache(KVCache):
    """Cache with all rows on the compute device, in a buffer per distinct layer shape.

    places  (buffer index, layer index within the buffer) of each layer
    """

    buffer: KVBuffer

    def __init__(
        self, buffer: KVBuffer, *more: KVBuffer, places: Sequence[tuple[int, int]] = ()
    ) -> None:
        super().__init__(buffer.capacity)
        self.buffer = buffer
        self._buffers = (buffer, *more)
        self._places = places

    @classmethod
    def empty(
        cls, model: Architecture, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Create an empty cache for `capacity` rows."""
        shapes = model.kv_shapes
        kinds = list(dict.fromkeys(shapes))
        places = [(kinds.index(shape), shapes[:i].count(shape)) for i, shape in enumerate(shapes)]
        groups = ([kind] * shapes.count(kind) for kind in kinds)
        buffers = (KVBuffer.empty(group, capacity, dtype, device) for group in groups)
        return cls(*buffers, places=places)

    def attend(self, asked: Attention, start: int, mask: ops.TreeMask) -> Tensor:
        first = self.n_held + start
        buffer, layer = self._place(asked.layer)
        if self.leader is not None and start == 0:
            keys, values = self.leader.rows(asked.layer, range(first))
            buffer.keys[layer, :, :first] = keys
            buffer.values[layer, :, :first] = values
        return buffer.attend(layer, slice(first, first + len(asked.q)), asked, mask)

    def in_place(self) -> KVBuffer | None:
        return self.buffer if self.leader is None and len(self._buffers) == 1 else None

    def copy_prefix(self, leader: KVCache, tokens: list[int]) -> None:
        """Copy by layer in that pass, after the leader attended; recompute rows off the device."""
        if leader.buffer is not None:
            self.committed = tokens
            self.leader = leader

    def commit(self, rows: Sequence[int]) -> None:
        super().commit(rows)
        self.leader = None

    def discard(self) -> None:
        """See `KVCache.discard`. Rows not yet copied from a leader may be missing: restart."""
        super().discard()
        if self.leader is not None:
            self.committed = []
            self.leader = None

    def to_host(self) -> MovedRows:
        n = self.n_committed
        pairs = [(buffer.keys[:, :, :n], buffer.values[:, :, :n]) for buffer in self._buffers]
        rows = [KVBuffer(*(part.to("cpu", copy=True) for part in pair)) for pair in pairs]
        return MovedRows(self.committed, rows, {})

    def load(self, moved: MovedRows) -> None:
        self.committed = moved.tokens
        n = len(moved.tokens)
        for target, source in zip(self._buffers, moved.rows, strict=True):
            target.keys[:, :, :n] = source.keys
            target.values[:, :, :n] = source.values

    def move(self, rows: Sequence[int], first: int) -> None:
        for buffer in self._buffers:
            ops.commit_rows(buffer.keys, buffer.values, torch.tensor(rows), first)

    def rows(self, layer: int, tokens: range) -> tuple[Tensor, Tensor]:
        buffer, layer = self._place(layer)
        at = slice(tokens.start, tokens.stop)
        return buffer.keys[layer, :, at], buffer.values[layer, :, at]

    def _place(self, layer: int) -> tuple[KVBuffer, int]:
        n, layer = self._places[layer] if self._places else (0, layer)
        return self._buffers[n], layer
