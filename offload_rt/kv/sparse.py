"""Views of a cache by which a model drafts for itself: a fixed number of rows of a text of any length."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from offload_rt.kv.cache import ContiguousCache, KVBuffer, KVCache
from offload_rt.models.architecture import Architecture
from offload_rt.ops.reference import rotate

# Part of the budget that is filled at once; the rest is for tokens to come.
_FILLED = 3 / 4


class SparseCache(ContiguousCache):
    """At most `budget` rows of the verified tokens of another cache, and behind them the rows drafted since.

    It has all of them as long as there is room. Then it is filled anew: `n_kept` older rows, by which the kinds differ, stand
    before those of the most recent tokens. Rows are copies of the source's, so what was verified takes the place of what was
    drafted. Queries, and keys unless a kind turns them, have the positions of the text.

    source        of the same model and sequence; it alone decides which tokens are committed
    first_recent  the token whose row stands behind the older ones
    """

    def __init__(self, source: KVCache, buffer: KVBuffer, budget: int, spec: Architecture) -> None:
        super().__init__(buffer)
        self.source, self.budget, self.spec = source, budget, spec
        self.n_kept = self.first_recent = self._n_copied = 0

    @property
    def n_held(self) -> int:
        """Older rows and recent ones."""
        return self.n_kept + self.n_committed - self.first_recent

    @abstractmethod
    def fill(self, n_verified: int, n_filled: int) -> int:
        """Bring older rows and set `n_kept` and `first_recent`, so that about `n_filled` rows of the `n_verified` are taken.

        Returns how many tokens are committed from now on; the others are left to be computed.
        """

    def rewind_to(self, tokens: Sequence[int]) -> int:
        """Copy what the source has and this has not; returns how many of `tokens` need not be computed."""
        verified, n = self.source.committed, len(self.source.committed)
        is_same = verified[: self._n_copied] == self.committed[: self._n_copied]
        if not is_same or self.n_kept + n - self.first_recent > self.budget:
            self.n_kept = self.first_recent = 0
            if n > self.budget:
                n = self.fill(n, int(self.budget * _FILLED))
            self._n_copied = self.first_recent
        self.copy(range(self._n_copied, n), self.n_kept + self._n_copied - self.first_recent)
        self._n_copied, self.committed = n, verified[:n]
        return super().rewind_to(tokens)

    def move(self, rows: Sequence[int], first: int) -> None:
        """Rows of accepted nodes stay where they are: those of the source will take their place."""

    def copy(self, tokens: range, at: int, turn: tuple[Tensor, Tensor] | None = None) -> None:
        """Copy the source's rows of some tokens to rows `at` and on, in all layers.

        turn  cosines and sines (1, head_dim) by which the keys are rotated; None: not at all
        """
        if not tokens:
            return
        keys, values = self.buffer.keys, self.buffer.values
        for layer in range(len(keys)):
            k, v = self.source.rows(layer, tokens)
            if turn is not None:
                k = rotate(k, *turn)
            keys[layer, :, at : at + len(tokens)] = k
            values[layer, :, at : at + len(tokens)] = v
