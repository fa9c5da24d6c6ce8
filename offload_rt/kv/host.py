"""Keys and values beyond the device: blocks of rows that come over the link ahead of their use,
each attended to by itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.kv.cache import Attention, KVBuffer, KVCache, RowRange
from offload_rt.kv.split import PAGE_ROWS, KVShare, RowFormat
from offload_rt.models.architecture import Architecture


class RowStore(Protocol):
    """Memory beyond the device, in blocks of `block_rows` rows of all layers, and what comes from
    it in a pass.

    format  of the rows
    """

    format: RowFormat
    block_rows: int

    def allocate(self) -> int:
        """The number of a block that nobody uses. Raises LinkError where there is no room for
        another one.
        """

    def free(self, blocks: Sequence[int]) -> None:
        """Take blocks back."""

    def write(self, pieces: Sequence[tuple[RowRange, Tensor]]) -> None:
        """Write rows (n, format.nbytes) of the device to these ranges. Raises LinkError."""

    def read(self, places: Sequence[RowRange]) -> Tensor:
        """The rows of these ranges, one behind the other, on the host. Raises LinkError."""

    def receive(self) -> Tensor:
        """The next of the ranges that the pass under way brings to the device, until the next call.
        Raises LinkError.
        """


class HostCache(KVCache):
    """Rows on the device and beyond.

    Rows [0, n_resident) stay in the buffer. Rows [n_resident, n_sent) are in blocks of the store
    and come back in each pass. The rows from n_sent on, the pending ones among them, lie in the
    buffer behind the resident ones; when there is no room for more of them they are sent together.
    A prompt that is longer than that room is staged: its rows of one layer lie together while it
    computes that layer, and at the end of it those that no tree can move are sent.
    """

    def __init__(
        self, model: Architecture, buffer: KVBuffer, store: RowStore, share: KVShare
    ) -> None:
        super().__init__(share.n_rows)
        self._windows = tuple(model.window(i) for i in range(model.n_layers))
        self._buffer = buffer
        self._store = store
        self._n_resident = share.n_resident
        self._n_sent, self._blocks = share.n_resident, list[int]()
        self._staged: KVBuffer | None = None

    @property
    def _shift(self) -> int:
        """Rows that are not resident lie so many places before their number."""
        return self._n_sent - self._n_resident

    @property
    def _n_left(self) -> int:
        """Pending rows, the first ones, that do not stay in the room for recent rows when they are
        staged.
        """
        return len(self._pending) - (self._buffer.capacity - self._n_resident)

    def begin(self, tokens: Sequence[int]) -> None:
        """Make room; sends committed rows, or stages the pending ones, where there is none."""
        super().begin(tokens)
        self._staged, n = None, len(tokens)
        if self.n_committed - self._shift + n > self._buffer.capacity:
            self._send_committed()
        if self.n_committed - self._shift + n > self._buffer.capacity:
            _, n_heads, _, head_dim = self._buffer.keys.shape
            self._staged = KVBuffer(
                *(self._buffer.keys.new_empty(1, n_heads, n, head_dim) for _ in range(2))
            )

    def beyond(self, layer: int) -> Iterator[RowRange]:
        """Blocks of a layer that hold rows which its window reaches."""
        return (one for _, one in self._seen_beyond(layer))

    def _seen_beyond(self, layer: int) -> Iterator[tuple[int, RowRange]]:
        """These with the number of the first row of each."""
        n_unseen = max(self._first_seen(self._windows[layer]) - self._n_resident, 0)
        return self._ranges(
            layer, self._n_resident + n_unseen // PAGE_ROWS * PAGE_ROWS, self._n_sent
        )

    def _ranges(self, layer: int, first: int, stop: int) -> Iterator[tuple[int, RowRange]]:
        """Where rows [first, stop) of a layer lie beyond, block by block, and the number of the
        first row of each.
        """
        while first < stop:
            block, start = divmod(first - self._n_resident, self._store.block_rows)
            end = min(start + stop - first, self._store.block_rows)
            yield first, RowRange(layer, self._blocks[block], start, end)
            first += end - start

    def attend(self, asked: Attention) -> Tensor:
        """Write k and v behind the rows there are; attend to what is on the device and to each
        block that comes.
        """
        layer = asked.layer
        start = asked.start
        mask = asked.mask
        scale = asked.scale
        assert asked.k is not None and asked.v is not None, "the plan is for native models"
        if self._staged is None:
            keys = self._buffer.keys[layer]
            values = self._buffer.values[layer]
            shift = self._shift
        else:
            keys = self._staged.keys[0]
            values = self._staged.values[0]
            shift = self.n_committed
        first = self.n_committed + start - shift
        rows = slice(first, first + len(asked.q))
        q = ops.rotate_and_store(asked.q, asked.k, asked.v, asked.rotary, keys, values, rows)
        if shift == 0:
            out = ops.tree_attention(
                q, keys[:, : mask.n_keys], values[:, : mask.n_keys], mask, scale
            )
        else:
            out = _attend(q, self._parts(layer, (keys, values, shift), mask), mask, scale)
        if self._staged is not None and start + len(q) == len(self._pending):
            self._settle(layer, self._staged)
        return out

    def _parts(
        self, layer: int, recent: tuple[Tensor, Tensor, int], mask: ops.TreeMask
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Keys, values and number of the first row of all that a layer sees."""
        keys, values, shift = recent
        first = self.n_committed if self._staged is not None else self._n_sent
        yield (
            keys[:, first - shift : mask.n_keys - shift],
            values[:, first - shift : mask.n_keys - shift],
            first,
        )
        n_near = min(self._n_resident, self.n_committed)
        if n_near > self._first_seen(mask.window):
            yield self._buffer.keys[layer, :, :n_near], self._buffer.values[layer, :, :n_near], 0
        for first, _ in self._seen_beyond(layer):
            yield *self._store.format.unpack(self._store.receive()), first

    def _first_seen(self, window: int | None) -> int:
        """The first row that a pending row may see."""
        return 0 if window is None else max(self.n_committed - window + 1, 0)

    def _settle(self, layer: int, staged: KVBuffer) -> None:
        """Bring the staged rows of a layer to where they stay: among the resident ones, beyond, and
        among the recent ones.
        """
        n_near = max(self._n_resident - self.n_committed, 0)
        n_left = self._n_left
        first = self.n_committed
        for to, rows in (
            (self._buffer.keys[layer], staged.keys[0]),
            (self._buffer.values[layer], staged.values[0]),
        ):
            to[:, first : first + n_near] = rows[:, :n_near]
            to[:, self._n_resident :] = rows[:, n_left:]
        rows = self._store.format.pack(
            staged.keys[:, :, n_near:n_left], staged.values[:, :, n_near:n_left]
        )
        self._send(range(layer, layer + 1), rows)

    def _send_committed(self) -> None:
        """Send all committed rows that are not resident."""
        if self.n_committed > self._n_sent:
            at = slice(self._n_resident, self.n_committed - self._shift)
            rows = self._store.format.pack(
                self._buffer.keys[:, :, at], self._buffer.values[:, :, at]
            )
            self._send(range(len(rows)), rows)
            self._n_sent = self.n_committed

    def _send(self, layers: range, rows: Tensor) -> None:
        """Write rows (layers, n, nbytes) behind those that were sent."""
        n_sent = self._n_sent
        stop = self._n_sent + rows.shape[1]
        self._hold(stop)
        self._store.write([
            (one, of_layer[first - n_sent : first - n_sent + one.stop - one.start])
            for layer, of_layer in zip(layers, rows, strict=True) for first,
            one in self._ranges(layer, n_sent, stop)
        ])  # fmt: skip

    def commit(self, rows: Sequence[int]) -> None:
        """See `KVCache.commit`; of staged rows, those that were sent are kept where they are."""
        if self._staged is not None:
            assert list(rows[: self._n_left]) == list(range(self._n_left)), (
                "rows of a prompt are all committed"
            )
            self._n_sent = self.n_committed + self._n_left
            self._staged = None
        super().commit(rows)

    def discard(self) -> None:
        """Drop all pending rows."""
        super().discard()
        self._staged = None

    def move(self, rows: Sequence[int], first: int) -> None:
        """Move rows in the buffer: pending ones that may move are there."""
        ops.commit_rows(
            self._buffer.keys, self._buffer.values, torch.tensor(rows), first - self._shift
        )

    def rewind_to(self, tokens: Sequence[int]) -> int:
        """See `KVCache.rewind_to`; gives back the blocks that are not needed any more."""
        n = super().rewind_to(tokens)
        self._n_sent = min(self._n_sent, max(n, self._n_resident))
        self._hold(self._n_sent)
        return n

    def assume(self, n: int) -> None:
        """Take the first n rows for committed, those that are not resident for sent."""
        super().assume(n)
        self._n_sent = max(n, self._n_resident)
        self._hold(self._n_sent)

    def extend(self, capacity: int, n_nodes: int) -> bool:
        """See `KVCache.extend`: any number of rows may be beyond the device, but a tree is on
        it.
        """
        is_wide = n_nodes <= self._buffer.capacity - self._n_resident
        self.capacity = max(self.capacity, capacity) if is_wide else self.capacity
        return is_wide

    def close(self) -> None:
        """Give all blocks back."""
        self._hold(self._n_resident)

    def _hold(self, stop: int) -> None:
        """Have the blocks that rows up to `stop` take, and no others."""
        n = -(-(stop - self._n_resident) // self._store.block_rows)
        self._store.free(self._blocks[n:])
        del self._blocks[n:]
        while len(self._blocks) < n:
            self._blocks.append(self._store.allocate())

    def rows(self, layer: int, tokens: range) -> tuple[Tensor, Tensor]:
        """From the buffer, and from beyond, which the host waits for."""
        keys = self._buffer.keys[layer]
        values = self._buffer.values[layer]
        n_sent = self._n_sent
        near = slice(tokens.start, min(tokens.stop, self._n_resident))
        recent = slice(
            max(tokens.start, n_sent) - self._shift, max(tokens.stop, n_sent) - self._shift
        )
        parts = [(keys[:, at], values[:, at]) for at in (near, recent)]
        if there := [
            one
            for _, one in self._ranges(
                layer, max(tokens.start, near.stop), min(tokens.stop, n_sent)
            )
        ]:
            parts.insert(
                1,
                self._store.format.unpack(ops.to_device([self._store.read(there)], keys.device)[0]),
            )
        first, second = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return first, second


def _attend(
    q: Tensor, parts: Iterable[tuple[Tensor, Tensor, int]], mask: ops.TreeMask, scale: float
) -> Tensor:
    """Attention to keys in parts, which are joined in float32 or better.

    q      (n, n_heads, head_dim)
    parts  keys, values (n_kv_heads, rows, head_dim), number of the first row; those of the tree are
           the last rows of one
    Returns (n, n_heads, head_dim).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    joined: tuple[Tensor, Tensor] | None = None
    for keys, values, first in parts:
        out, lse = ops.partial_attention(
            q, keys, values, mask.part(first, first + keys.shape[1]), scale
        )
        joined = (out.to(wide), lse) if joined is None else ops.merge(*joined, out, lse)
    assert joined is not None, "a row sees itself"
    return joined[0].to(q.dtype)
