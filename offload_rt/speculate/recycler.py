"""Candidates from the text: earlier predictions of the target, and prompt lookup.

Token Recycling (Luo et al. 2024, arXiv 2408.08696) with changes. Predictions are stored with their
probabilities under the last tokens before them, of several lengths; predictions from a file
complete them. After unknown tokens, the most frequent tokens of all predictions are candidates.
Trees grow best-first by the product of acceptance probabilities, calibrated by the length. Prompt
lookup adds its continuations.
"""

import heapq
from array import array
from collections import OrderedDict, abc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from offload_rt.cost.tree_size import Calibration
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.ngrams import MatchRates, copied_paths, find_matches
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.predictions import LONGEST, Context, StoredPredictions
from offload_rt.tree.topology import DraftTree

# Maximum keys of all sequences, about 300 bytes each.
_MOST_KEYS = 1 << 17
# Prior ratio of acceptance to probability. Kind 0: common tokens; kinds 1 to 3: own predictions
# after 1 to 3 tokens; kinds 4 to 6: predictions of the file after 1 to 3 tokens.
_PRIOR = (0.8, 0.35, 0.6, 0.8, 0.5, 0.7, 0.8)
# Nodes of a tree whose predictions are stored: the first are the most likely.
_MOST_LEARNED = 256
# Candidates after unknown tokens. They are selected again after this growth of the predictions.
_N_COMMON = 48
_GROWTH = 1.1
# Candidates below this chance are ignored.
_LEAST = 1e-9


def context_of(tokens: abc.Sequence[int], path: Context = ()) -> Context:
    """Return the key of a text and a path of a tree below its last token."""
    return (*tokens[-LONGEST:], *path)[-LONGEST:]


class Prediction(NamedTuple):
    """Predicted tokens with their probabilities, under a key of a kind in `_PRIOR`."""

    kind: int
    tokens: "array[int]"
    probs: "array[float]"


class PredictionTable:
    """Latest top target predictions, indexed by the preceding tokens.

    stored  predictions after tokens that the target did not predict yet; None without
    """

    def __init__(self, capacity: int = _MOST_KEYS, stored: StoredPredictions | None = None) -> None:
        self._capacity = capacity
        self._stored = stored
        self._after: OrderedDict[Context, tuple[array[int], array[float]]] = OrderedDict()
        # Summed probabilities by token; predictions so far, and when `_common` was selected.
        self._weights: dict[int, float] = {}
        self._n_kept = self._n_selected = 0
        self._common: Prediction | None = None

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
            if self._stored and (prediction := self._stored.find(context[k:])):
                return Prediction(LONGEST + len(context) - k, *prediction)
        if self._n_kept > _GROWTH * self._n_selected:
            self._n_selected = self._n_kept
            tokens = heapq.nlargest(_N_COMMON, self._weights, key=self._weights.__getitem__)
            probs = [self._weights[token] / self._n_kept for token in tokens]
            self._common = Prediction(0, array("q", tokens), array("f", probs))
        return self._common


class Recycler:
    """Predictions of all sequences.

    rates  acceptance of copied tokens
    """

    def __init__(self, stats: PairStats, stored: StoredPredictions | None = None) -> None:
        self.stats = stats
        self.table = PredictionTable(stored=stored)
        self.rates = MatchRates()

    def read(self, sequence: Sequence, predicted: TopTokens) -> None:
        """Store the target's predictions at the prompt's last tokens."""
        tokens = sequence.tokens
        n = len(predicted.tokens)
        ends = range(len(tokens) - n, len(tokens))
        self.keep([tuple(tokens[max(end - LONGEST, 0) : end]) for end in ends], predicted)

    def learn(
        self, sequence: Sequence, tree: DraftTree, path: abc.Sequence[int], predicted: TopTokens
    ) -> None:
        """Store the target's predictions at the first nodes, and those on the accepted path last.

        Later entries overwrite earlier ones, and the sequence continues along the accepted path.

        path  nodes of the accepted path below the root
        """
        n = min(len(tree.topology), _MOST_LEARNED)
        contexts = {0: context_of(sequence.tokens)}
        parents, tokens = tree.topology.parents.tolist(), tree.tokens.tolist()
        for node in (*range(1, n), *(node for node in path if node >= n)):
            contexts[node] = context_of(contexts[parents[node]], (tokens[node],))
        for nodes in ([*range(n)], [0, *path]):
            part = TopTokens(*(column[nodes] for column in predicted))
            self.keep([contexts[node] for node in nodes], part)

    def keep(self, contexts: abc.Sequence[Context], predicted: TopTokens) -> None:
        """Store predictions under their contexts."""
        for row in zip(contexts, predicted.tokens.tolist(), predicted.probs.tolist(), strict=True):
            self.table.keep(*row)


class TextCandidates:
    """Candidates from the text below the nodes of a tree, by the tokens of their paths.

    Predictions of the target after the last tokens, and continuations of their earlier occurrences.
    """

    def __init__(self, recycler: Recycler, sequence: Sequence, n_levels: int) -> None:
        self._table = recycler.table
        self._rates = recycler.rates
        self._sequence = sequence
        # Acceptance of predictions, by the kind of their key and by their probability. Later
        # observations do not change these estimates.
        names = (f"recycled {n}" for n in range(len(_PRIOR)))
        estimates = [recycler.stats.at(name, sequence.temperature) for name in names]
        self._calibrations = [each.calibration for each in estimates]
        self._ratios = np.stack([*map(Calibration.ratios, self._calibrations, _PRIOR)])
        self._predictions: dict[Context, Prediction] = {}
        matches = find_matches(sequence, n_levels - 1) if n_levels > 1 else []
        self._match = next(iter(matches), None)
        copied = copied_paths(matches, self._rates)
        self._copied: dict[Context, list[tuple[int, float]]] = {}
        for path, chance in copied.items():
            ratio = chance / copied.get(path[:-1], 1.0)
            self._copied.setdefault(path[:-1], []).append((path[-1], ratio))

    def below(self, paths: abc.Sequence[Context]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the candidates after some paths below the root.

        Returns the index of the path, the token and the acceptance probability, (m,) each.
        """
        indices: list[int] = []
        kinds: list[int] = []
        predictions = []
        for i, path in enumerate(paths):
            if prediction := self._table.find(context_of(self._sequence.tokens, path)):
                indices += [i] * len(prediction.tokens)
                kinds += [prediction.kind] * len(prediction.tokens)
                predictions.append(prediction)
                self._predictions[path] = prediction
        tokens = np.frombuffer(b"".join(part.tokens for part in predictions), np.int64)
        probs = np.frombuffer(b"".join(part.probs for part in predictions), np.float32)
        ratios = self._ratios[kinds, np.searchsorted(Calibration.EDGES, probs)]
        chances = np.minimum(probs.astype(np.float64) * ratios, 1.0)
        rows = np.array(indices, dtype=np.int64)
        for i, path in enumerate(paths):
            for token, p in self._copied.get(path, ()):
                is_equal = (rows == i) & (tokens == token)
                if is_equal.any():
                    np.maximum(chances, p, out=chances, where=is_equal)
                else:
                    rows, tokens = np.append(rows, i), np.append(tokens, token)
                    chances = np.append(chances, p)
        return rows, tokens, chances

    def is_allowed(self, path: Context) -> bool:
        """Return whether the sequence's grammar allows a path."""
        return self._sequence.n_allowed(path) == len(path)

    def learn(self, after: list[int]) -> None:
        """Compare the candidates along the accepted path with the actual tokens."""
        if self._match is not None:
            self._rates.observe(self._match, after)
        for n, token in enumerate(after):
            if prediction := self._predictions.get(tuple(after[:n])):
                hit = prediction.tokens.index(token) if token in prediction.tokens else None
                self._calibrations[prediction.kind].observe(np.array(prediction.probs), hit)


class TextGrowth:
    """Best-first growth of given nodes by the text's candidates, many nodes at a time.

    chances    (m,) of the given nodes, then of the candidates
    parents    (m,) indices of the parents, -1 for the given nodes
    tokens     (m,) -1 for the given nodes
    depths     (m,)
    is_opened  (m,) whether a node is allowed and has its candidates
    """

    def __init__(
        self,
        text: TextCandidates,
        n_levels: int,
        chances: np.ndarray,
        depths: np.ndarray,
        path_of: Callable[[int], Context],
    ) -> None:
        self.chances = chances
        self.depths = depths
        self.parents = self.tokens = np.full(len(chances), -1)
        self.is_opened = self.parents >= 0
        self._text = text
        self._n_levels = n_levels
        self._path_of = path_of
        self._paths: dict[int, Context] = {}

    def grow(self, n: int, others: np.ndarray, n_most: int = _MOST_KEYS) -> None:
        """Open nodes until the `n` most probable of all nodes, or `n_most` nodes, are open.

        others  (k,) chances of further nodes, which are open
        """
        while n_most > len(self._paths):
            known = np.concatenate((others, self.chances))
            least = np.partition(known, -n)[-n] if len(known) > n else 0.0
            closed = np.flatnonzero(~self.is_opened & (self.chances >= max(least, _LEAST)))
            if not len(closed):
                return
            best = closed[np.argsort(-self.chances[closed], kind="stable")]
            self._open(best[: n_most - len(self._paths)])

    def _open(self, nodes: np.ndarray) -> None:
        """Add the candidates below nodes; the chance of a forbidden node becomes 0."""
        paths = [self._path(node) for node in nodes.tolist()]
        is_allowed = np.array([self._text.is_allowed(path) for path in paths])
        self.chances[nodes[~is_allowed]] = 0.0
        self.is_opened[nodes] = is_allowed
        is_last = self.depths[nodes] + 1 >= self._n_levels
        inner = np.flatnonzero(is_allowed & ~is_last)
        if not len(inner):
            return
        rows, tokens, chances = self._text.below([paths[i] for i in inner.tolist()])
        parents = nodes[inner][rows]
        self.parents = np.append(self.parents, parents)
        self.tokens = np.append(self.tokens, tokens)
        self.depths = np.append(self.depths, self.depths[parents] + 1)
        self.chances = np.append(self.chances, self.chances[parents] * chances)
        self.is_opened = np.append(self.is_opened, np.zeros(len(rows), dtype=bool))

    def _path(self, node: int) -> Context:
        above = int(self.parents[node])
        path = (*self._paths[above], int(self.tokens[node])) if above >= 0 else self._path_of(node)
        self._paths[node] = path
        return path
