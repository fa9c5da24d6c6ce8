"""Sparse views of a KV cache for self-drafting, with a fixed row budget for any text length."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_rt import ops
from offload_rt.kv.cache import ContiguousCache, KVBuffer, KVCache
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import Attention
from offload_rt.ops.reference import rotate

# Share of the budget occupied by a refill; the rest is reserved for new tokens.
_FILLED = 3 / 4


class SparseCache(ContiguousCache):
    """View with at most `budget` verified rows of a source cache, followed by drafted rows.

    The view is complete until the budget is exceeded. A refill then selects `n_kept` older rows,
    by a policy of the subclass, followed by the most recent rows. Verified rows are copied from the
    source and overwrite drafted rows. Queries and keys keep their positions in the text, except for
    keys rotated by a subclass.

    source        cache of the same model and sequence, which determines the committed tokens
    first_recent  token stored directly after the older rows
    """

    def __init__(self, source: KVCache, buffer: KVBuffer, budget: int, spec: Architecture) -> None:
        super().__init__(buffer)
        self.source = source
        self.budget = budget
        self.spec = spec
        self.n_kept = 0
        self.first_recent = 0
        self._n_copied = 0

    @property
    def n_held(self) -> int:
        return self.n_kept + self.n_committed - self.first_recent

    @abstractmethod
    def fill(self, n_verified: int, n_filled: int) -> int:
        """Set `n_kept` and `first_recent`; return how many tokens are not recomputed."""

    def rewind_to(self, tokens: Sequence[int]) -> int:
        """Copy new rows from the source; return the length of the common prefix with `tokens`."""
        verified = self.source.committed
        n = len(verified)
        is_same = verified[: self._n_copied] == self.committed[: self._n_copied]
        if not is_same or self.n_kept + n - self.first_recent > self.budget:
            self.n_kept = self.first_recent = 0
            if n > self.budget:
                n = self.fill(n, int(self.budget * _FILLED))
            self._n_copied = self.first_recent
        self.copy(range(self._n_copied, n), self.n_kept + self._n_copied - self.first_recent)
        self._n_copied = n
        self.committed = verified[:n]
        return super().rewind_to(tokens)

    def move(self, rows: Sequence[int], first: int) -> None:
        """Leave accepted rows in place; they are replaced by rows of the source."""

    def copy(self, tokens: range, at: int, turn: tuple[Tensor, Tensor] | None = None) -> None:
        """Copy the source's rows of `tokens` to rows `at` onwards, with rotated keys if `turn`."""
        if not tokens:
            return
        for layer in range(len(self.buffer.keys)):
            k, v = self.source.rows(layer, tokens)
            keys = k if turn is None else rotate(k, *turn)
            self.buffer.keys[layer, :, at : at + len(tokens)] = keys
            self.buffer.values[layer, :, at : at + len(tokens)] = v


# Attention sinks. The paper needs four; StreamingLLM's and MagicDec's repositories keep 16.
_N_SINKS = 16


class WindowCache(SparseCache):
    """First rows (sinks) and a window of recent rows, at contiguous positions.

    Rotary attention depends only on position differences. Therefore the sinks are rotated up to the
    window; all further keys and queries keep their positions.
    """

    def fill(self, n_verified: int, n_filled: int) -> int:
        """Copy the sinks to positions directly before the window."""
        self.n_kept = min(_N_SINKS, self.budget // 8)
        self.first_recent = n_verified - n_filled + self.n_kept
        shift = torch.tensor([self.first_recent - self.n_kept])
        rotary = self.spec.row_inputs(shift, shift + 1, torch.float32)
        cos, sin = ops.to_device(rotary, self.buffer.keys.device)
        size = torch.hypot(cos, sin)  # divide out RoPE scaling: cached keys already include it
        self.copy(range(self.n_kept), 0, (cos / size, sin / size))
        return n_verified


# Last tokens, which select rows and are kept; rows per chunk; SnapKV pooling width.
_N_RECENT = 32
_CHUNK = 8
_POOL = 5


class ChosenCache(SparseCache):
    """View that recomputes the last tokens against all source rows, and copies the best rows."""

    _is_selecting = False

    @staticmethod
    @abstractmethod
    def select_rows(n: int, q: Tensor, keys: Tensor, scale: float, lse: Tensor) -> Tensor:
        """Return the n rows kept by each head, (n_kv_heads, n) int64, ascending.

        q     (rows, n_kv_heads, heads per group, head_dim) queries of the last tokens
        keys  (n_kv_heads, older rows, head_dim)
        lse   (rows, n_kv_heads, heads per group) log-sum-exp of each query's scaled scores over all
              visible rows
        """

    @property
    def n_seen(self) -> int:
        """All rows of the source during selection, else the rows of the view."""
        return self.n_committed if self._is_selecting else self.n_held

    def rewind_to(self, tokens: Sequence[int]) -> int:
        if self._is_selecting:  # interrupted: start again
            self._is_selecting = False
            self.committed = []
        return super().rewind_to(tokens)

    def fill(self, n_verified: int, n_filled: int) -> int:
        """Reserve whole chunks before the last tokens, which are recomputed."""
        n_recent = min(_N_RECENT, self.budget // 4)
        self.n_kept = (n_filled - n_recent) // _CHUNK * _CHUNK
        self.first_recent = (n_verified - n_recent) // _CHUNK * _CHUNK
        self._is_selecting = True
        return self.first_recent

    def commit(self, rows: Sequence[int]) -> None:
        super().commit(rows)
        self._is_selecting = False

    def in_place(self) -> KVBuffer | None:
        return None if self._is_selecting else super().in_place()

    def attend(self, asked: Attention, start: int, mask: ops.TreeMask) -> Tensor:
        if not self._is_selecting:
            return super().attend(asked, start, mask)
        layer = asked.layer
        scale = asked.scale
        assert asked.k is not None and asked.v is not None, "self-drafting shares no rows"
        first = self.n_kept
        new_rows = slice(first + start, first + start + len(asked.q))
        layer_kv = self.buffer.keys[layer], self.buffer.values[layer]
        q = ops.rotate_and_store(asked.q, asked.k, asked.v, asked.rotary, *layer_kv, new_rows)
        older = self.source.rows(layer, range(self.n_committed))
        recent = layer_kv[0][:, first : new_rows.stop], layer_kv[1][:, first : new_rows.stop]
        parts = zip((older, recent), mask.split(self.n_committed), strict=True)
        partial = [ops.partial_attention(q, *rows, visible, scale) for rows, visible in parts]
        out, lse = ops.merge(*partial[0], *partial[1])
        q = q.view(len(q), len(older[0]), -1, q.shape[-1])
        best = self.select_rows(first, q, older[0], scale, lse.view(q.shape[:-1]))
        for target, rows in zip(layer_kv, older, strict=True):
            target[:, :first] = rows.gather(1, best[..., None].expand(-1, -1, q.shape[-1]))
        return out


class SnapKVCache(ChosenCache):
    """Select rows by the attention of the last tokens, pooled over neighbouring rows."""

    @staticmethod
    def select_rows(n: int, q: Tensor, keys: Tensor, scale: float, lse: Tensor) -> Tensor:
        """Sum attention over the last tokens and the heads of a group, then average neighbours."""
        heads = zip((q.float() * scale).unbind(1), keys, lse.unbind(1), strict=True)
        attention = [  # per head, to bound the memory of the scores
            (head_q @ k.float().T - total[..., None]).exp_().sum((0, 1))
            for head_q, k, total in heads
        ]
        pooled = F.avg_pool1d(torch.stack(attention), _POOL, stride=1, padding=_POOL // 2)
        return pooled.topk(n).indices.sort().values


class RetrievalCache(ChosenCache):
    """Select chunks by the last query and the chunks' mean keys; always keep the first chunk."""

    @staticmethod
    def select_rows(n: int, q: Tensor, keys: Tensor, scale: float, lse: Tensor) -> Tensor:
        """Rank chunks by attention share, summed over the heads of a group."""
        means = keys.float().reshape(len(keys), -1, _CHUNK, keys.shape[-1]).mean(2)
        shares = torch.einsum("hgd,hcd->hgc", q[-1].float() * scale, means).softmax(-1).sum(1)
        shares[:, 0] = torch.inf
        chunks = shares.topk(n // _CHUNK).indices.sort().values
        return (chunks[..., None] * _CHUNK + torch.arange(_CHUNK, device=chunks.device)).flatten(1)
