"""Older rows chosen by the last tokens: by attention (SnapKV, Li et al. 2024), or by chunk (TriForce, Sun et al. 2024)."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from offload_rt import ops
from offload_rt.kv.cache import Attention, KVBuffer, KVCache
from offload_rt.kv.sparse import SparseCache
from offload_rt.models.architecture import Architecture

# Last tokens of a text, whose queries choose and whose rows are kept; rows of a chunk; neighbours that share attention.
_N_RECENT, _CHUNK, _POOL = 32, 8, 5


class ChosenCache(SparseCache):
    """The last tokens are computed again: they attend to all rows of the source, and layer by layer the best are copied."""

    def __init__(self, source: KVCache, buffer: KVBuffer, budget: int, spec: Architecture) -> None:
        super().__init__(source, buffer, budget, spec)
        self._is_choosing = False

    @staticmethod
    @abstractmethod
    def choose(n: int, q: Tensor, keys: Tensor, scale: float, lse: Tensor) -> Tensor:
        """The n rows that each head keeps, (n_kv_heads, n) int64, ascending.

        q     (rows, n_kv_heads, heads of a group, head_dim) queries of the last tokens
        keys  (n_kv_heads, older rows, head_dim)
        lse   (rows, n_kv_heads, heads of a group) log-sum-exp of each query's scaled scores, with all rows that it sees
        """

    @property
    def n_seen(self) -> int:
        """All rows of the source while it is chosen among them."""
        return self.n_committed if self._is_choosing else self.n_held

    def rewind_to(self, tokens: Sequence[int]) -> int:
        """See `SparseCache.rewind_to`; where a choice was not made to its end, it is made again."""
        if self._is_choosing:
            self._is_choosing, self.committed = False, []
        return super().rewind_to(tokens)

    def fill(self, n_verified: int, n_filled: int) -> int:
        """Whole chunks before the last tokens, which are left to be computed."""
        n_recent = min(_N_RECENT, self.budget // 4)
        self.n_kept = (n_filled - n_recent) // _CHUNK * _CHUNK
        self.first_recent = (n_verified - n_recent) // _CHUNK * _CHUNK
        self._is_choosing = True
        return self.first_recent

    def commit(self, rows: Sequence[int]) -> None:
        """See `KVCache.commit`; what was chosen is there."""
        super().commit(rows)
        self._is_choosing = False

    def attend(self, asked: Attention) -> Tensor:
        """To the rows here; to all of the source while it is chosen among them."""
        if not self._is_choosing:
            return super().attend(asked)
        layer, start, q, mask, scale = asked.layer, asked.start, asked.q, asked.mask, asked.scale
        assert asked.k is not None and asked.v is not None, "no model whose layers share rows drafts for itself"
        first, stop = self.n_kept, self.n_kept + start + len(q)
        own = self.buffer.keys[layer], self.buffer.values[layer]
        q = ops.rotate_and_store(q, asked.k, asked.v, asked.rotary, *own, slice(first + start, stop))
        older = self.source.rows(layer, range(self.n_committed))
        recent = own[0][:, first:stop], own[1][:, first:stop]
        parts = zip((older, recent), mask.split(self.n_committed), strict=True)
        one, other = (ops.partial_attention(q, *rows, seen, scale) for rows, seen in parts)
        out, lse = ops.merge(*one, *other)
        group = (len(q), len(older[0]), -1)
        best = self.choose(first, q.view(*group, q.shape[-1]), older[0], scale, lse.view(group))
        for mine, rows in zip(own, older, strict=True):
            mine[:, :first] = rows.gather(1, best[..., None].expand(-1, -1, q.shape[-1]))
        return out


class SnapKVCache(ChosenCache):
    """Rows by the attention that the last tokens pay to them and to their neighbours."""

    @staticmethod
    def choose(n: int, q: Tensor, keys: Tensor, scale: float, lse: Tensor) -> Tensor:
        """By attention summed over the last tokens and the heads of a group, averaged over neighbours."""
        heads = zip((q.float() * scale).unbind(1), keys, lse.unbind(1), strict=True)  # one by one: scores are many
        attention = torch.stack([(q @ k.float().T - total[..., None]).exp_().sum((0, 1)) for q, k, total in heads])
        pooled = F.avg_pool1d(attention, _POOL, stride=1, padding=_POOL // 2)
        return pooled.topk(n).indices.sort().values


class RetrievalCache(ChosenCache):
    """Chunks by the product of the last query with their mean keys; the first one stays in any case."""

    @staticmethod
    def choose(n: int, q: Tensor, keys: Tensor, scale: float, lse: Tensor) -> Tensor:
        """By its share among all chunks, summed over the heads of a group."""
        chunks = _shares(q[-1], keys, scale, _CHUNK).topk(n // _CHUNK).indices.sort().values
        return (chunks[..., None] * _CHUNK + torch.arange(_CHUNK, device=chunks.device)).flatten(1)


def _shares(q: Tensor, keys: Tensor, scale: float, size: int) -> Tensor:
    """(n_kv_heads, chunks) what a query pays to chunks of keys by their means, summed over a group; the first gets most.

    q     (n_kv_heads, heads of a group, head_dim)
    keys  (n_kv_heads, n, head_dim), n a multiple of `size`
    """
    means = keys.float().reshape(len(keys), -1, size, keys.shape[-1]).mean(2)
    shares = torch.einsum("hgd,hcd->hgc", q.float() * scale, means).softmax(-1).sum(1)
    shares[:, 0] = torch.inf
    return shares


def best_chunks(cache: KVCache, n_tokens: int, n: int, size: int) -> list[int]:
    """Numbers of the n chunks of `size` tokens that its last token attends to most, the first among them, ascending.

    Among those within the first `n_tokens`; by its last layer (SpecExtend, Cha et al. 2025). From the first call on the cache
    keeps its query; none before a pass after it.
    """
    cache.keeps_query, asked = True, cache.query
    if asked is None:
        return []
    keys, _ = cache.rows(asked.layer, range(n_tokens // size * size))
    shares = _shares(asked.q.view(len(keys), -1, keys.shape[-1]), keys, asked.scale, size)
    (best,) = ops.to_host([shares.sum(0).topk(n).indices])
    return sorted(best.tolist())
