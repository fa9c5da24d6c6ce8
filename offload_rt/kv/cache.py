"""Keys and values of one sequence: committed rows, and the pending rows of the pass under way."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.errors import CapacityError
from offload_rt.models.architecture import Architecture


@dataclass(frozen=True, eq=False)
class KVBuffer:
    """Memory for keys and values, each (n_layers, n_kv_heads, capacity, head_dim)."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, spec: Architecture, capacity: int, dtype: torch.dtype, device: torch.device) -> "KVBuffer":
        """Memory in which nothing has been written yet."""
        shape = (spec.n_layers, spec.n_kv_heads, capacity, spec.head_dim)
        return cls(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))

    @property
    def capacity(self) -> int:
        """Rows."""
        return self.keys.shape[2]


class KVCache:
    """Rows [0, n_committed) hold the tokens in `committed`; the rows behind them are pending, or unused.

    keys, values  (n_layers, n_kv_heads, capacity, head_dim)
    """

    def __init__(self, store: KVBuffer) -> None:
        self.store, self.capacity = store, store.capacity
        self.keys, self.values = store.keys, store.values
        self.committed: list[int] = []
        self._pending: list[int] = []

    @property
    def n_committed(self) -> int:
        """Rows that hold committed tokens."""
        return len(self.committed)

    def begin(self, tokens: Sequence[int]) -> None:
        """Make room for one pending row for each token, behind the committed ones.

        Raises CapacityError if there is not enough.
        """
        need = self.n_committed + len(tokens)
        if need > self.capacity:
            raise CapacityError(
                "the cache",
                need=f"{need} rows",
                have=str(self.capacity),
                change="raise --max-model-len or lower --tree-size",
            )
        self._pending = list(tokens)

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of pending rows [start, start + n) and return all rows up to them.

        k, v  (n, n_kv_heads, head_dim)
        Returns keys and values, each (n_kv_heads, n_committed + start + n, head_dim), as views.
        """
        first = self.n_committed + start
        last = first + k.shape[0]
        self.keys[layer, :, first:last] = k.transpose(0, 1)
        self.values[layer, :, first:last] = v.transpose(0, 1)
        return self.keys[layer, :, :last], self.values[layer, :, :last]

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these pending rows, in order, and forget the others.

        rows  ascending indices into the pending rows
        """
        assert all(a < b for a, b in itertools.pairwise(rows)), "rows ascend"
        start = self.n_committed
        n_in_place = next((i for i, row in enumerate(rows) if row != i), len(rows))
        moved = rows[n_in_place:]
        if moved:
            source = torch.tensor(moved, device=self.keys.device) - n_in_place
            ops.commit_rows(self.keys, self.values, source, start + n_in_place)
        self.committed += [self._pending[row] for row in rows]
        self._pending = []

    def discard(self) -> None:
        """Forget all pending rows, as when a pass failed."""
        self._pending = []

    def rewind_to(self, tokens: Sequence[int]) -> int:
        """Keep the longest common prefix of the committed tokens and `tokens`; return its length."""
        n = len(self.committed)
        if list(tokens[:n]) != self.committed:  # seldom; and a long text is soon compared as a whole
            pairs = enumerate(zip(self.committed, tokens, strict=False))
            n = next((i for i, (have, want) in pairs if have != want), min(n, len(tokens)))
            del self.committed[n:]
        return n


class ReusableKVBuffer:
    """A store for one cache at a time, which stays where it is from one to the next.

    capacity  rows
    new       makes it, when it is first reused
    """

    def __init__(self, capacity: int, new: Callable[[int], KVBuffer]) -> None:
        self._capacity, self._new = capacity, new
        self._store: KVBuffer | None = None
        self._borrower: weakref.ref[KVCache] | None = None

    def acquire(self, n_rows: int) -> KVCache | None:
        """An empty cache; None if it has no room for so many rows, or another cache is still in use."""
        if n_rows > self._capacity or self._is_in_use:
            return None
        self._store = self._store or self._new(self._capacity)
        for part in (self._store.keys, self._store.values):
            part.zero_()  # what an earlier sequence left there may be no number
        cache = KVCache(self._store)
        self._borrower = weakref.ref(cache)
        return cache

    def release(self) -> None:
        """Give the memory back, unless a cache is in use."""
        if not self._is_in_use:
            self._store = None

    @property
    def _is_in_use(self) -> bool:
        return self._borrower is not None and self._borrower() is not None
