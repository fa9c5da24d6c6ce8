"""Earlier predictions of the target as candidates, indexed by the tokens before them.

Token Recycling (Luo et al. 2024, arXiv 2408.08696): predictions are stored with their probabilities
under the last tokens before them, of several lengths.
"""

from array import array
from bisect import bisect
from collections import OrderedDict, abc
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from offload_rt.cost.tree_size import Calibration
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.pair_stats import PairStats

# Maximum tokens per table key, and maximum keys of all sequences, about 300 bytes each.
_LONGEST = 3
# Prior ratio of acceptance to stored probability, by the tokens of the key.
_PRIOR = (0.0, 0.35, 0.6, 0.8)
_MOST_KEYS = 1 << 17
# Predictions stored per key.
N_PREDICTED = 8

Context = tuple[int, ...]


def context_of(tokens: abc.Sequence[int], path: Context = ()) -> Context:
    """Return the key of a text and a path of a tree below its last token."""
    return (*tokens[-_LONGEST:], *path)[-_LONGEST:]


class Prediction(NamedTuple):
    """Predicted tokens with their probabilities, stored under a key of `n_key` tokens."""

    n_key: int
    tokens: "array[int]"
    probs: "array[float]"


class PredictionTable:
    """Latest top target predictions, indexed by the preceding tokens."""

    def __init__(self, capacity: int = _MOST_KEYS) -> None:
        self._capacity = capacity
        self._after: OrderedDict[Context, tuple[array[int], array[float]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._after)

    def __contains__(self, context: Context) -> bool:
        return context in self._after

    def keep(self, context: Context, tokens: list[int], probs: list[float]) -> None:
        """Store a prediction under all suffixes of a context; evict the least recently stored."""
        prediction = array("q", tokens), array("f", probs)
        for k in range(len(context)):
            self._after[context[k:]] = prediction
            self._after.move_to_end(context[k:])
        while len(self._after) > self._capacity:
            self._after.popitem(last=False)

    def find(self, context: Context) -> Prediction | None:
        """Return the prediction after the longest stored suffix of a context."""
        for k in range(len(context)):
            if prediction := self._after.get(context[k:]):
                return Prediction(len(context) - k, *prediction)
        return None


class KeyCalibration:
    """Acceptance of stored predictions, by the tokens of their key and their probability."""

    def __init__(self, stats: PairStats, temperature: float) -> None:
        self._calibrations = [
            stats.at(f"recycled {n}", temperature).calibration for n in range(_LONGEST + 1)
        ]
        self._edges = Calibration.EDGES.tolist()
        self.refresh()

    def refresh(self) -> None:
        """Use the observations so far for later estimates."""
        self._ratios = [
            calibration.ratios(prior).tolist()
            for calibration, prior in zip(self._calibrations, _PRIOR, strict=True)
        ]

    def chances(self, prediction: Prediction) -> Iterator[tuple[int, float]]:
        """Return the predicted tokens with their acceptance probabilities."""
        ratios = self._ratios[prediction.n_key]
        for token, p in zip(prediction.tokens, prediction.probs, strict=True):
            yield token, min(p * ratios[bisect(self._edges, p)], 1.0)

    def observe(self, prediction: Prediction, token: int) -> None:
        """Record the actual token after a key."""
        hit = prediction.tokens.index(token) if token in prediction.tokens else None
        self._calibrations[prediction.n_key].observe(np.array(prediction.probs), hit)


class Recycler:
    """Stored predictions of all sequences, with calibrations by temperature."""

    def __init__(self, stats: PairStats) -> None:
        self._stats = stats
        self._calibrations: dict[float, KeyCalibration] = {}
        self.table = PredictionTable()

    def calibration(self, temperature: float) -> KeyCalibration:
        """Return the calibration at a temperature, with all observations so far."""
        if temperature not in self._calibrations:
            self._calibrations[temperature] = KeyCalibration(self._stats, temperature)
        self._calibrations[temperature].refresh()
        return self._calibrations[temperature]

    def read(self, sequence: Sequence, predicted: TopTokens) -> None:
        """Store the target's predictions at the prompt's last tokens."""
        tokens = sequence.tokens
        n = len(predicted.tokens)
        ends = range(len(tokens) - n, len(tokens))
        self.keep([tuple(tokens[max(end - _LONGEST, 0) : end]) for end in ends], predicted)

    def learn(
        self, contexts: abc.Sequence[Context], accepted: list[int], predicted: TopTokens
    ) -> None:
        """Store the target's predictions at every node, those on the accepted path last.

        Later entries overwrite earlier ones, and the sequence continues along the accepted path.

        accepted  nodes of the accepted path, the root first
        """
        self.keep(contexts[: len(predicted.tokens)], predicted)
        on_path = TopTokens(predicted.tokens[accepted], predicted.probs[accepted])
        self.keep([contexts[node] for node in accepted], on_path)

    def keep(self, contexts: abc.Sequence[Context], predicted: TopTokens) -> None:
        """Store predictions under their contexts."""
        rows = zip(contexts, predicted.tokens.tolist(), predicted.probs.tolist(), strict=True)
        for context, tokens, probs in rows:
            self.table.keep(context, tokens, probs)

    def candidates(self, sequence: Sequence) -> "RecycledCandidates":
        """Return the candidates of a tree below the last token of a sequence."""
        return RecycledCandidates(self.table, self.calibration(sequence.temperature), sequence)


class RecycledCandidates:
    """Recycled candidates below the nodes of a tree, by the rows of the nodes."""

    def __init__(
        self, table: PredictionTable, calibration: KeyCalibration, sequence: Sequence
    ) -> None:
        self._table = table
        self._calibration = calibration
        self._sequence = sequence
        self._predictions: dict[int, Prediction] = {}

    def below(self, row: int, path: Context) -> Iterator[tuple[int, float]]:
        """Yield tokens below a path from the root, with their acceptance probabilities."""
        prediction = self._table.find(context_of(self._sequence.tokens, path))
        if prediction is None:
            return
        self._predictions[row] = prediction
        for token, p in self._calibration.chances(prediction):
            if self._sequence.n_allowed((*path, token)) > len(path):
                yield token, p

    def observe(self, row: int, token: int) -> None:
        """Record the actual token below an accepted node."""
        if row in self._predictions:
            self._calibration.observe(self._predictions[row], token)
