"""Pauses of drafting: passes without drafts while drafting costs more than it gains."""

from collections.abc import Sequence as Batch

import numpy as np

from offload_rt.cost.estimator import CostEstimator
from offload_rt.executor.sequence import Sequence
from offload_rt.executor.stats import PassTimes

# Drafted passes before a decision, and the weight of all earlier passes in it.
_PROBE = 3
_CARRIED = 0.3
# A drafted pass multiplies the weight of earlier passes by this factor.
_MEMORY = 0.9
# Passes of the first pause; each further pause doubles them, up to the limit.
_SHORTEST, _LONGEST = 16, 128
# Passes that measure plain decoding, unless drafting is clearly faster than its estimate.
_MEASURING = 2
_CLEAR = 1.5
# Estimated time of a drafted pass, in plain passes, up to which drafting never pauses: rows of
# streamed models are nearly free, and a pause teaches the drafter nothing.
_FREE = 1.05
# Weight of the newest plain pass.
_NEWEST = 0.25
# Growth of the context after which the estimate is repeated.
_GROWTH = 1.1


class Pauses:
    """Compare measured passes with and without drafts, in units of an estimated plain pass.

    The unit makes passes of different contexts comparable. A new batch begins with drafts. After a
    pause, a few drafted passes measure whether drafting pays.

    is_drafting  whether the current pass has drafts
    """

    def __init__(self, cost: CostEstimator) -> None:
        self._cost = cost
        self._batch: list[Sequence] = []
        self._estimate_s, self._context = 1.0, 0
        self._plain = 0.0  # a plain pass; 0: not measured
        self._n_tokens = self._time = 0.0  # of drafted passes, faded
        self._n_rows, self._draft_s = 1, 0.0  # of the latest drafted pass
        self._n_probed = 0
        self._n_left = 0  # passes of the pause
        self._n_next = _SHORTEST
        self.is_drafting = True

    def drafts(self, batch: Batch[Sequence]) -> bool:
        """Decide whether the next pass of a batch has drafts."""
        if self._batch != batch:
            self._batch = list(batch)
            self._n_left, self._n_next, self._context = 0, _SHORTEST, 0
            self._probe()
        elif self._n_left > 0:
            self._n_left -= 1
            if self._n_left == 0:
                self._probe()
        elif self._n_probed >= _PROBE:
            self._decide()
        self.is_drafting = self._n_left == 0
        return self.is_drafting

    def passed(self, times: PassTimes, n_tokens: int) -> None:
        """Learn from the current pass, which yielded `n_tokens` tokens and had no prompt."""
        context = self._length()
        n = len(self._batch)
        if context > _GROWTH * self._context:
            self._context = context
            self._estimate_s = float(self._cost.seconds(np.array([n]), context, 0.0, n)[0])
        time = (times.ended - times.started) / self._estimate_s
        if self.is_drafting:
            self._n_probed += 1
            self._n_rows, self._draft_s = times.n_rows, times.drafted - times.started
            self._n_tokens = _MEMORY * self._n_tokens + n_tokens / n
            self._time = _MEMORY * self._time + time
        else:
            self._plain += (_NEWEST if self._plain else 1.0) * (time - self._plain)

    def _probe(self) -> None:
        self._n_probed = 0
        self._n_tokens *= _CARRIED
        self._time *= _CARRIED

    def _decide(self) -> None:
        """Begin a pause if plain passes yield more tokens per second, or are not measured."""
        n = len(self._batch)
        rows, draft_s = np.array([n, self._n_rows]), np.array([0.0, self._draft_s])
        plain_s, drafted_s = self._cost.seconds(rows, self._length(), draft_s, n)
        if drafted_s <= _FREE * plain_s:
            return
        if not self._plain:
            self._n_left = 0 if self._n_tokens > _CLEAR * self._time else _MEASURING
        elif self._time > self._n_tokens * self._plain:
            self._n_left = self._n_next
            self._n_next = min(2 * self._n_next, _LONGEST)
        else:
            self._n_next = _SHORTEST

    def _length(self) -> int:
        return max(len(sequence.tokens) for sequence in self._batch)
