"""Pauses of drafting: passes without drafts while drafting costs more than it gains."""

from collections.abc import Sequence as Batch

import numpy as np

from offload_rt.cost.estimator import CostEstimator
from offload_rt.executor.sequence import PassTimes, Sequence

# Share of the time of plain passes that drafted passes may lose.
_SHARE = 0.01
# Bounds of the balance, and its value when a batch begins.
_LEAST, _MOST = -0.5, 4.0
_INITIAL = 0.5
# Plain passes to measure, and least weight of the newest. Before, an estimate replaces them, and
# drafting continues only with at least this gain per pass, up to this balance.
_MEASURED = 8
_NEWEST = 0.1
_CLEAR, _CLEAR_BALANCE = 0.5, 2.0
# Estimated time of a drafted pass, in plain passes, up to which drafting never pauses: rows of
# streamed models are nearly free, and a pause teaches the drafter nothing.
_FREE = 1.05
# Growth of the context after which the estimate is repeated.
_GROWTH = 1.1


class Pauses:
    """Balance the time that drafted passes gain and lose; pause while the balance is negative.

    The balance counts plain passes. Each plain pass adds `_SHARE`, which limits the time that
    drafting may lose. Times are relative to an estimated plain pass of the same context.

    is_drafting  whether the current pass has drafts
    """

    def __init__(self, cost: CostEstimator) -> None:
        self._cost = cost
        # Learning does not change the unit.
        self._unit = cost.fixed(cost.level_s)
        self._batch: list[Sequence] = []
        self._estimate_s, self._context = 1.0, 0
        self._plain, self._n_plain = 1.0, 0  # mean plain pass, and number of measured ones
        self._balance = 0.0
        self._n_drafted = 0
        self._is_free = True  # as far as known
        self.is_drafting = True

    def drafts(self, batch: Batch[Sequence]) -> bool:
        """Decide whether the next pass of a batch has drafts."""
        if self._batch != batch:
            self._batch = list(batch)
            self._context = 0
            self._balance = _INITIAL
        least = 0.0
        if self._n_plain < _MEASURED:
            least = min(_INITIAL + _CLEAR * self._n_drafted, _CLEAR_BALANCE)
        self.is_drafting = self._is_free or self._balance >= least
        return self.is_drafting

    def passed(self, times: PassTimes, n_tokens: int) -> None:
        """Learn from the current pass, which yielded `n_tokens` tokens and had no prompt."""
        n = len(self._batch)
        context = max(len(sequence.tokens) for sequence in self._batch)
        if context > _GROWTH * self._context:
            self._context = context
            self._estimate_s = float(self._unit.seconds(np.array([n]), context, 0.0, n)[0])
        time = (times.ended - times.started) / self._estimate_s
        gain = _SHARE
        if self.is_drafting:
            self._n_drafted += 1
            gain = n_tokens / n - time / self._plain
            rows = np.array([n, times.n_rows])
            draft_s = np.array([0.0, times.drafted - times.started])
            plain_s, drafted_s = self._cost.seconds(rows, context, draft_s, n)
            self._is_free = drafted_s <= _FREE * plain_s
        else:
            self._n_plain += 1
            self._plain += max(_NEWEST, 1 / self._n_plain) * (time - self._plain)
        self._balance = min(max(self._balance + gain, _LEAST), _MOST)
