"""Sparse views of a KV cache for self-drafting, with a fixed row budget for any text length."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from offload_rt.kv.cache import ContiguousCache, KVBuffer, KVCache
from offload_rt.models.architecture import Architecture
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
        """Older and recent rows in use."""
        return self.n_kept + self.n_committed - self.first_recent

    @abstractmethod
    def fill(self, n_verified: int, n_filled: int) -> int:
        """Select about `n_filled` of `n_verified` rows; set `n_kept` and `first_recent`.

        Returns the new number of committed tokens; later tokens are recomputed.
        """

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
        """Copy the source's rows of `tokens` to rows `at` onwards, in all layers.

        turn  cosines and sines (1, head_dim) to rotate the keys, or None
        """
        if not tokens:
            return
        keys = self.buffer.keys
        values = self.buffer.values
        for layer in range(len(keys)):
            k, v = self.source.rows(layer, tokens)
            if turn is not None:
                k = rotate(k, *turn)
            keys[layer, :, at : at + len(tokens)] = k
            values[layer, :, at : at + len(tokens)] = v
