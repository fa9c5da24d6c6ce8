"""Keys and values of one sequence: committed rows, and the pending rows of the pass under way."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.errors import CapacityError
from offload_rt.models.architecture import Architecture, KVShape


@dataclass(frozen=True)
class KVBytes:
    """Bytes that a cache takes on the device and on the host, and moves over the link in each pass."""

    device: int
    host: int = 0
    link: int = 0


class RowRange(NamedTuple):
    """Rows [start, stop) of a layer in a block beyond the device."""

    layer: int
    block: int
    start: int
    stop: int


class KVCache(ABC):
    """Rows [0, n_committed) hold the tokens `committed`; the rows behind them are pending, or unused.

    A kind of cache decides where the rows lie and how they are attended to; tokens are kept here.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.committed: list[int] = []
        self._pending: list[int] = []

    @abstractmethod
    def attend(
        self, layer: int, start: int, q: Tensor, k: Tensor | None, v: Tensor | None, mask: ops.TreeMask, scale: float,
        rotary: tuple[Tensor, Tensor] | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Keep keys and values of pending rows [start, start + n); attention of these rows.

        q       (n, n_heads, head_dim)
        k, v    (n, n_kv_heads, head_dim); None: they are there already
        mask    what they look at among the n_committed + start + n first rows
        rotary  cosines and sines (n, head_dim) each, by which q and k are rotated first; None: not at all
        softcap, sinks  see `PassContext.attend`
        Returns (n, n_heads, head_dim of v).
        """

    @abstractmethod
    def move(self, rows: Sequence[int], first: int) -> None:
        """Move rows `first + rows` to `first` and on, in all layers; rows ascend, rows[i] >= i."""

    @abstractmethod
    def rows(self, layer: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of keys and values of committed rows of a layer, as for a cache that keeps some of them elsewhere.

        indices  (n,) int64 on the device, or (n_kv_heads, n) where each head has rows of its own
        Returns (n_kv_heads, n, head_dim) each, keys as they were rotated.
        """

    def beyond(self, layer: int) -> Iterable[RowRange]:
        """What each call of `attend` for a layer needs brought to the device, in order."""
        return ()

    def assume(self, n: int) -> None:
        """Take the first n rows for committed, whatever they hold."""
        self.committed = [0] * n

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
        self._pending = [] if moved else self._pending[len(rows) :]

    def discard(self) -> None:
        """Drop all pending rows, as when a pass failed."""
        self._pending = []

    def rewind_to(self, tokens: Sequence[int]) -> int:
        """Keep the longest common prefix of the committed tokens and `tokens`; return its length."""
        n = len(self.committed)
        if list(tokens[:n]) != self.committed:  # rare, and comparing whole lists is fast
            pairs = enumerate(zip(self.committed, tokens, strict=False))
            n = next((i for i, (have, want) in pairs if have != want), min(n, len(tokens)))
            del self.committed[n:]
        return n


@dataclass(frozen=True, eq=False)
class KVBuffer:
    """Memory for keys and values, each (n_layers, n_kv_heads, capacity, head_dim); those of values may be narrower."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, model: Architecture, capacity: int, dtype: torch.dtype, device: torch.device) -> "KVBuffer":
        """Uninitialised memory for a model whose layers are all of one shape."""
        return cls.of_shapes(model.kv_shapes, capacity, dtype, device)

    @classmethod
    def of_shapes(
        cls, shapes: Sequence[KVShape], capacity: int, dtype: torch.dtype, device: torch.device
    ) -> "KVBuffer":
        """Uninitialised memory for layers of these shapes, which are all the same."""
        n_heads, *dims = shapes[0]
        return cls(*(torch.empty(len(shapes), n_heads, capacity, dim, dtype=dtype, device=device) for dim in dims))

    @property
    def capacity(self) -> int:
        """Rows."""
        return self.keys.shape[2]

    def attend(
        self, layer: int, rows: slice | Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, mask: ops.TreeMask,
        scale: float, rotary: tuple[Tensor, Tensor] | None = None, softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write k and v to `rows`; attention of q to the first mask.n_keys rows. Shapes as in `KVCache.attend`."""
        keys, values, n = self.keys[layer], self.values[layer], mask.n_keys
        if k is not None and v is not None:
            q = ops.rotate_and_store(q, k, v, rotary, keys, values, rows)
        return ops.tree_attention(q, keys[:, :n], values[:, :n], mask, scale, softcap, sinks)

    def rows(self, layer: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVCache.rows`."""
        _, n_kv_heads, _, head_dim = self.keys.shape
        at = indices.expand(n_kv_heads, -1)[..., None].expand(-1, -1, head_dim)
        return self.keys[layer].gather(1, at), self.values[layer].gather(1, at)


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
        return cls(*(KVBuffer.of_shapes(one, capacity, dtype, device) for one in of_shape), places=places)

    @staticmethod
    def nbytes(model: Architecture, n_rows: int, itemsize: int) -> KVBytes:
        """What caches of so many rows take, with elements of `itemsize` bytes: all on the device."""
        return KVBytes(device=n_rows * model.kv_nbytes(itemsize))

    def attend(
        self, layer: int, start: int, q: Tensor, k: Tensor | None, v: Tensor | None, mask: ops.TreeMask, scale: float,
        rotary: tuple[Tensor, Tensor] | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Write k and v behind the rows there are, and attend to all of them."""
        first = self.n_held + start
        n, layer = self._places[layer] if self._places else (0, layer)
        rows = slice(first, first + len(q))
        return self._buffers[n].attend(layer, rows, q, k, v, mask, scale, rotary, softcap, sinks)

    def move(self, rows: Sequence[int], first: int) -> None:
        """Move rows in place."""
        for buffer in self._buffers:
            ops.commit_rows(buffer.keys, buffer.values, torch.tensor(rows), first)

    def rows(self, layer: int, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Gathered from the buffer."""
        n, layer = self._places[layer] if self._places else (0, layer)
        return self._buffers[n].rows(layer, indices)
