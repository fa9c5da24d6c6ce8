"""Candidates from the text: earlier predictions of the target, and prompt lookup.

Token Recycling (Luo et al. 2024, arXiv 2408.08696): predictions are stored with their probabilities
under the last tokens before them, of several lengths. After unknown tokens, the most frequent
tokens of all predictions are candidates. Prompt lookup adds its continuations.
"""

import heapq
from array import array
from bisect import bisect
from collections import OrderedDict, abc
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from offload_rt.cost.tree_size import Calibration
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.ngrams import MatchRates, copied_paths, find_matches
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.tree.topology import DraftTree

# Maximum tokens per table key, and maximum keys of all sequences, about 300 bytes each.
_LONGEST = 3
# Prior ratio of acceptance to stored probability, by the tokens of the key.
_PRIOR = (0.8, 0.35, 0.6, 0.8)
_MOST_KEYS = 1 << 17
# Predictions stored per key.
N_PREDICTED = 8
# Candidates after unknown tokens. They are selected again after this growth of the predictions.
_N_COMMON = 48
_GROWTH = 1.1
# Initial size of a growing tree. It doubles while more than half of its nodes are worth a row.
N_FIRST = 16

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
        # Summed probabilities by token; predictions so far, and when `_common` was selected.
        self._weights: dict[int, float] = {}
        self._n_kept = self._n_selected = 0
        self._common: Prediction | None = None

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
        self._n_kept += 1
        for token, p in zip(tokens, probs, strict=True):
            self._weights[token] = self._weights.get(token, 0.0) + p

    def find(self, context: Context) -> Prediction | None:
        """Return the prediction after the longest stored suffix of a context, or `_common`."""
        for k in range(len(context)):
            if prediction := self._after.get(context[k:]):
                return Prediction(len(context) - k, *prediction)
        if self._n_kept > _GROWTH * self._n_selected:
            self._n_selected = self._n_kept
            tokens = heapq.nlargest(_N_COMMON, self._weights, key=self._weights.__getitem__)
            probs = [self._weights[token] / self._n_kept for token in tokens]
            self._common = Prediction(0, array("q", tokens), array("f", probs))
        return self._common


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
    """Stored predictions of all sequences, with calibrations by temperature.

    rates  acceptance of copied tokens
    """

    def __init__(self, stats: PairStats) -> None:
        self._stats = stats
        self._calibrations: dict[float, KeyCalibration] = {}
        self.table = PredictionTable()
        self.rates = MatchRates()

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
        self, sequence: Sequence, tree: DraftTree, path: abc.Sequence[int], predicted: TopTokens
    ) -> None:
        """Store the target's predictions at every node, those on the accepted path last.

        Later entries overwrite earlier ones, and the sequence continues along the accepted path.

        path  nodes of the accepted path below the root
        """
        contexts = [context_of(sequence.tokens)]
        below = zip(tree.topology.parents.tolist(), tree.tokens.tolist(), strict=True)
        for parent, token in islice(below, 1, None):
            contexts.append(context_of(contexts[parent], (token,)))
        self.keep(contexts, predicted)
        nodes = [0, *path]
        on_path = TopTokens(predicted.tokens[nodes], predicted.probs[nodes])
        self.keep([contexts[node] for node in nodes], on_path)

    def keep(self, contexts: abc.Sequence[Context], predicted: TopTokens) -> None:
        """Store predictions under their contexts."""
        rows = zip(contexts, predicted.tokens.tolist(), predicted.probs.tolist(), strict=True)
        for context, tokens, probs in rows:
            self.table.keep(context, tokens, probs)

    def candidates(self, sequence: Sequence, n_levels: int) -> "TextCandidates":
        """Return the candidates of a tree of at most `n_levels` levels below a sequence."""
        return TextCandidates(self, sequence, n_levels)


class TextCandidates:
    """Candidates from the text below the nodes of a tree, by the tokens of their paths.

    Predictions of the target after the last tokens, and continuations of their earlier occurrences.
    """

    def __init__(self, recycler: Recycler, sequence: Sequence, n_levels: int) -> None:
        self._table = recycler.table
        self._calibration = recycler.calibration(sequence.temperature)
        self._rates = recycler.rates
        self._sequence = sequence
        self._predictions: dict[Context, Prediction] = {}
        matches = find_matches(sequence, n_levels - 1) if n_levels > 1 else []
        self._match = next(iter(matches), None)
        copied = copied_paths(matches, self._rates)
        self._copied: dict[Context, list[tuple[int, float]]] = {}
        for path, chance in copied.items():
            ratio = chance / copied.get(path[:-1], 1.0)
            self._copied.setdefault(path[:-1], []).append((path[-1], ratio))

    def below(self, path: Context) -> abc.ItemsView[int, float]:
        """Return the tokens after a path below the root, with their acceptance probabilities."""
        chances: dict[int, float] = {}
        prediction = self._table.find(context_of(self._sequence.tokens, path))
        if prediction is not None:
            self._predictions[path] = prediction
            chances = dict(self._calibration.chances(prediction))
        for token, p in self._copied.get(path, ()):
            chances[token] = max(chances.get(token, 0.0), p)
        return chances.items()

    def is_allowed(self, path: Context) -> bool:
        """Return whether the sequence's grammar allows a path."""
        return self._sequence.n_allowed(path) == len(path)

    def learn(self, after: list[int]) -> None:
        """Compare the candidates along the accepted path with the actual tokens."""
        if self._match is not None:
            self._rates.observe(self._match, after)
        for n, token in enumerate(after):
            if prediction := self._predictions.get(tuple(after[:n])):
                self._calibration.observe(prediction, token)


class TextGrowth:
    """Best-first growth of a tree by the text's candidates.

    paths  tokens from the root to each node, without the root's; the growth numbers nodes by these
    """

    def __init__(self, text: TextCandidates, n_levels: int) -> None:
        self.paths: list[Context] = []
        self._text = text
        self._n_levels = n_levels
        # Heap of (negative chance, parent, token), most probable candidate first.
        self._best: list[tuple[float, int, int]] = []

    def open(self, path: Context, chance: float) -> None:
        """Add a node with its candidates."""
        for token, p in self._text.below(path) if len(path) + 1 < self._n_levels else ():
            heapq.heappush(self._best, (-chance * p, len(self.paths), token))
        self.paths.append(path)

    def best(self) -> tuple[float, int, int] | None:
        """Return chance, parent and token of the most probable allowed candidate."""
        while self._best:
            chance, parent, token = self._best[0]
            if self._text.is_allowed((*self.paths[parent], token)):
                return -chance, parent, token
            heapq.heappop(self._best)
        return None

    def take(self) -> None:
        """Open the candidate that `best` returned."""
        chance, parent, token = heapq.heappop(self._best)
        self.open((*self.paths[parent], token), -chance)
