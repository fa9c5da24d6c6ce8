"""KV cache with off-device rows: blocks of rows are prefetched and attended to separately."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.kv.cache import KVBuffer, KVCache, RowRange
from offload_rt.kv.memory import KVMemory
from offload_rt.kv.split import PAGE_ROWS, KVShare
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import Attention
from offload_rt.offload.offloaded_rows import OffloadedRows


@dataclass
class HostMemory(KVMemory):
    """Memory of caches whose rows may exceed the device; a store keeps the other rows."""

    store: OffloadedRows

    def new_cache(
        self, capacity: int, is_alone: bool = False, share: KVShare | None = None
    ) -> KVCache:
        if share is None or share.n_on_device >= capacity:
            return super().new_cache(capacity)
        return HostCache(self.spec, self.new_buffer(share.n_on_device), self.store, share)

    def load(self, caches: Sequence[KVCache]) -> AbstractContextManager[None]:
        layers = range(self.spec.n_layers)
        return self.store.prefetch(
            [rows for i in layers for cache in caches for rows in cache.offloaded(i)]
        )


class HostCache(KVCache):
    """Cache with resident, offloaded and recent rows.

    Rows [0, n_resident) stay in the buffer. Rows [n_resident, n_offloaded) are in blocks of the
    store and prefetched in each pass. Later rows, including pending rows, follow the resident rows
    in the buffer; when the buffer is full, they are offloaded together.
    A prompt longer than the free buffer is staged: a temporary buffer contains its rows of a single
    layer. At the end of the layer, all rows that no tree can move are offloaded.
    """

    def __init__(
        self, model: Architecture, buffer: KVBuffer, store: OffloadedRows, share: KVShare
    ) -> None:
        super().__init__(share.n_rows)
        self._windows = tuple(model.window(i) for i in range(model.n_layers))
        self._buffer = buffer
        self._store = store
        self._n_resident = share.n_resident
        self._n_offloaded = share.n_resident
        self._blocks: list[int] = []
        self._staged: KVBuffer | None = None

    @property
    def _shift(self) -> int:
        """Offset between the number of a recent row and its place in the buffer."""
        return self._n_offloaded - self._n_resident

    @property
    def _n_left(self) -> int:
        """Number of leading staged rows without a place among the recent rows."""
        return len(self._pending) - (self._buffer.capacity - self._n_resident)

    def begin(self, tokens: Sequence[int]) -> None:
        super().begin(tokens)
        self._staged = None
        n = len(tokens)
        keys = self._buffer.keys
        n_recent = self.n_committed - self._n_offloaded
        if n_recent > 0 and self.n_committed - self._shift + n > self._buffer.capacity:
            at = slice(self._n_resident, self.n_committed - self._shift)
            self._offload(range(len(keys)), self._buffer, at)
            self._n_offloaded = self.n_committed
        if self.n_committed - self._shift + n > self._buffer.capacity:
            shape = (1, keys.shape[1], n, keys.shape[3])
            self._staged = KVBuffer(keys.new_empty(shape), keys.new_empty(shape))

    def offloaded(self, layer: int) -> Iterator[RowRange]:
        return (rows for _, rows in self._visible_offloaded(layer))

    def _visible_offloaded(self, layer: int) -> Iterator[tuple[int, RowRange]]:
        """Yield offloaded ranges in the attention window and the number of their first row."""
        n_unseen = max(self._first_seen(self._windows[layer]) - self._n_resident, 0)
        first = self._n_resident + n_unseen // PAGE_ROWS * PAGE_ROWS
        return self._ranges(layer, first, self._n_offloaded)

    def _ranges(self, layer: int, first: int, stop: int) -> Iterator[tuple[int, RowRange]]:
        """Yield the ranges of offloaded rows [first, stop) and the number of their first row."""
        while first < stop:
            block, start = divmod(first - self._n_resident, self._store.block_rows)
            end = min(start + stop - first, self._store.block_rows)
            yield first, RowRange(layer, self._blocks[block], start, end)
            first += end - start

    def attend(self, asked: Attention, start: int, mask: ops.TreeMask) -> Tensor:
        layer = asked.layer
        scale = asked.scale
        assert asked.k is not None and asked.v is not None, "the plan is for native models"
        shift = self._shift if self._staged is None else self.n_committed
        buffer = self._buffer if self._staged is None else self._staged
        at = layer if self._staged is None else 0
        keys, values = buffer.keys[at], buffer.values[at]
        first = self.n_committed + start - shift
        rows = slice(first, first + len(asked.q))
        q = ops.rotate_and_store(asked.q, asked.k, asked.v, asked.rotary, keys, values, rows)
        recent = keys[:, : mask.n_keys - shift], values[:, : mask.n_keys - shift]
        if shift == 0:
            out = ops.tree_attention(q, *recent, mask, scale)
        else:
            out = _attend(q, self._parts(layer, recent, mask), mask, scale)
        if self._staged is not None and start + len(q) == len(self._pending):
            self._settle(layer, self._staged)
        return out

    def _parts(
        self, layer: int, recent: tuple[Tensor, Tensor], mask: ops.TreeMask
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield keys, values and the number of the first row of all visible parts."""
        n_skipped = self._n_resident if self._staged is None else 0
        first = self._n_offloaded if self._staged is None else self.n_committed
        yield recent[0][:, n_skipped:], recent[1][:, n_skipped:], first
        n_near = min(self._n_resident, self.n_committed)
        if n_near > self._first_seen(mask.window):
            yield self._buffer.keys[layer, :, :n_near], self._buffer.values[layer, :, :n_near], 0
        for first, _ in self._visible_offloaded(layer):
            yield *self._store.format.unpack(self._store.receive()), first

    def _first_seen(self, window: int | None) -> int:
        return 0 if window is None else max(self.n_committed - window + 1, 0)

    def _settle(self, layer: int, staged: KVBuffer) -> None:
        n_near = max(self._n_resident - self.n_committed, 0)
        n_left = self._n_left
        near = slice(self.n_committed, self.n_committed + n_near)
        buffer = self._buffer
        for target, rows in ((buffer.keys, staged.keys), (buffer.values, staged.values)):
            target[layer, :, near] = rows[0, :, :n_near]
            target[layer, :, self._n_resident :] = rows[0, :, n_left:]
        self._offload(range(layer, layer + 1), staged, slice(n_near, n_left))

    def _offload(self, layers: range, buffer: KVBuffer, at: slice) -> None:
        """Write rows of a buffer of these layers after the offloaded rows."""
        rows = self._store.format.pack(buffer.keys[:, :, at], buffer.values[:, :, at])
        stop = self._n_offloaded + rows.shape[1]
        self._resize(stop)
        pieces = []
        for layer, layer_rows in zip(layers, rows, strict=True):
            for first, place in self._ranges(layer, self._n_offloaded, stop):
                start = first - self._n_offloaded
                pieces.append((place, layer_rows[start : start + place.stop - place.start]))
        self._store.write(pieces)

    def commit(self, rows: Sequence[int]) -> None:
        """See `KVCache.commit`. Offloaded staged rows are already in place."""
        if self._staged is not None:
            n_left = self._n_left
            assert [*rows[:n_left]] == [*range(n_left)], "rows of a prompt are all committed"
            self._n_offloaded = self.n_committed + n_left
            self._staged = None
        super().commit(rows)

    def discard(self) -> None:
        super().discard()
        self._staged = None

    def move(self, rows: Sequence[int], first: int) -> None:
        start = first - self._shift
        ops.commit_rows(self._buffer.keys, self._buffer.values, torch.tensor(rows), start)

    def rewind_to(self, tokens: Sequence[int]) -> int:
        n = super().rewind_to(tokens)
        self._n_offloaded = min(self._n_offloaded, max(n, self._n_resident))
        self._resize(self._n_offloaded)
        return n

    def assume(self, n: int) -> None:
        """See `KVCache.assume`. Rows that are not resident count as offloaded."""
        super().assume(n)
        self._n_offloaded = max(n, self._n_resident)
        self._resize(self._n_offloaded)

    def extend(self, capacity: int, n_nodes: int) -> bool:
        """See `KVCache.extend`. Only the size of trees is limited, by the buffer."""
        is_wide = n_nodes <= self._buffer.capacity - self._n_resident
        if is_wide:
            self.capacity = max(self.capacity, capacity)
        return is_wide

    def close(self) -> None:
        self._resize(self._n_resident)

    def _resize(self, stop: int) -> None:
        """Allocate or free blocks for the offloaded rows up to `stop`."""
        n = -(-(stop - self._n_resident) // self._store.block_rows)
        self._store.free(self._blocks[n:])
        del self._blocks[n:]
        while len(self._blocks) < n:
            self._blocks.append(self._store.allocate())

    def rows(self, layer: int, tokens: range) -> tuple[Tensor, Tensor]:
        keys = self._buffer.keys[layer]
        values = self._buffer.values[layer]
        n_offloaded = self._n_offloaded
        near = slice(tokens.start, min(tokens.stop, self._n_resident))
        recent = slice(*(max(n, n_offloaded) - self._shift for n in (tokens.start, tokens.stop)))
        parts = [(keys[:, at], values[:, at]) for at in (near, recent)]
        ranges = self._ranges(layer, max(tokens.start, near.stop), min(tokens.stop, n_offloaded))
        if places := [place for _, place in ranges]:
            (rows,) = ops.to_device([self._store.read(places)], keys.device)
            parts.insert(1, self._store.format.unpack(rows))
        first, second = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return first, second


def _attend(
    q: Tensor, parts: Iterable[tuple[Tensor, Tensor, int]], mask: ops.TreeMask, scale: float
) -> Tensor:
    """Attend to the parts of `HostCache._parts`; merge the outputs in float32 or better."""
    wide = torch.promote_types(q.dtype, torch.float32)
    merged: tuple[Tensor, Tensor] | None = None
    for keys, values, first in parts:
        out, lse = ops.partial_attention(
            q, keys, values, mask.part(first, first + keys.shape[1]), scale
        )
        merged = (out.to(wide), lse) if merged is None else ops.merge(*merged, out, lse)
    assert merged is not None, "a row sees itself"
    return merged[0].to(q.dtype)
