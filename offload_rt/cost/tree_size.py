"""Which tree takes least time for a token on this machine: what is known of acceptance, weighed
against what passes cost.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import numpy as np

# An estimate starts from the prior, which weighs as much as so many observations, and forgets old
# ones at this rate.
_PRIOR_WEIGHT = 4.0
_MEMORY = 0.998
# More of anything than the observations that are remembered, each of a tree of a thousand nodes,
# can add up to.
_MOST_COUNTED = 1e9
# Tokens that the expectations of trees are trusted for, and how fast old ratios are forgotten.
# Texts differ by as much as a factor of two, so the newest passes tell more of the next one than
# all before (`bench/speculate/predictions.py`).
_BIAS_WEIGHT = 10.0
_BIAS_MEMORY = 0.97
# The smallest tree within this factor of the best one is taken: a larger one gains less than its
# cost is known to.
_NEARLY = 1.01
# The prior by rank: a fair draft, falling off as ranks do in language.
_FIRST = 0.6
_SECOND = 0.12
_DECAY = 1.2
# Ranks that are told apart; a tree has no children beyond them.
N_RANKS = 32


def choose(
    expected: np.ndarray, sizes: np.ndarray, seconds: np.ndarray, least_levels: int = 1
) -> tuple[int, int, float]:
    """Number of nodes, number of levels and seconds for a token of the fastest tree, or the
    smallest nearly as fast.

    expected  (n + 1, levels + 1): expected tokens of the best tree of so many nodes and levels, the
              root's included
    sizes     (m,) the sizes to choose from
    seconds   (m, levels) of drafting and verifying a tree of each size and number of levels
    least_levels  of the tree
    Source: Chen et al. 2024.
    """
    per_token = seconds / expected[sizes, 1:]
    per_token[:, : least_levels - 1] = np.inf
    per_token[sizes > 1, 0] = np.inf  # the root is alone on its level
    size = _first_good(per_token.min(1))
    level = int(per_token[size].argmin())
    return int(sizes[size]), level + 1, float(per_token[size, level])


def best_prefix(chances: np.ndarray, pass_s: np.ndarray, n_trees: int = 1) -> int:
    """How many of some nodes to verify: the number with the least time for a token, or fewer that
    are nearly as good.

    chances  (m,) descending: probability that each node is accepted
    pass_s   (m + 1,) seconds of a pass with the roots and the first 0, 1, ... m nodes
    n_trees  that the nodes are of; each gives one token in any case
    """
    return _first_good(pass_s / np.concatenate(([n_trees], n_trees + np.cumsum(chances))))


def best_prefixes(
    chances: Sequence[np.ndarray], pass_s: Callable[[np.ndarray], np.ndarray]
) -> list[int]:
    """How many nodes of each of some trees to verify together, so that a token of any of them takes
    the least time.

    chances  of each tree, as in `best_prefix`
    pass_s   seconds of passes of some numbers of rows (m,), roots included
    """
    pooled = np.concatenate(chances)
    owners = np.repeat(np.arange(len(chances)), [len(one) for one in chances])
    order = np.argsort(-pooled, kind="stable")
    n = best_prefix(pooled[order], pass_s(len(chances) + np.arange(len(pooled) + 1)), len(chances))
    taken: list[int] = np.bincount(owners[order[:n]], minlength=len(chances)).tolist()
    return taken


def _first_good(per_token: np.ndarray) -> int:
    """The first of some sizes, ascending, that is within `_NEARLY` of the best."""
    return int((per_token <= _NEARLY * per_token.min()).argmax())


def sizes_up_to(n_nodes: int) -> np.ndarray:
    """Tree sizes to compare: all up to 16, then in steps of an eighth or so."""
    sizes = [*range(1, min(n_nodes, 16) + 1)]
    while sizes[-1] < n_nodes:
        sizes.append(min(sizes[-1] + max(sizes[-1] // 8, 1), n_nodes))
    return np.array(sizes)


class _Ratios:
    """Ratios of `hits` to `tries`, each (N,), of which old ones fade."""

    N: ClassVar[int]

    def __init__(self) -> None:
        self.hits, self.tries = np.zeros(self.N), np.zeros(self.N)

    @classmethod
    def of(cls, hits: list[float], tries: list[float]) -> Self:
        """From what `counts` gave. Raises ValueError for anything else."""
        found = cls()
        counts = np.array((hits, tries), dtype=np.float64)
        if counts.shape != (2, cls.N) or not ((counts >= 0) & (counts < _MOST_COUNTED)).all():
            raise ValueError("not the counts of this version")
        found.hits, found.tries = counts
        return found

    def counts(self) -> tuple[list[float], list[float]]:
        """All it knows, in numbers."""
        return self.hits.tolist(), self.tries.tolist()

    def _fade(self, memory: float = _MEMORY) -> None:
        self.hits *= memory
        self.tries *= memory


class Acceptance(_Ratios):
    """How often the k-th child is accepted when its parent was: a prior at first, then a running
    estimate.
    """

    N = N_RANKS
    n_seen = 0
    first = _FIRST  # of the prior

    def observe(self, n_children: int, rank: int | None) -> None:
        """At a node that was reached with so many children, the one of this rank was accepted, or
        none.
        """
        self._fade()
        self.tries[:n_children] += 1
        if rank is not None and rank < N_RANKS:
            self.hits[rank] += 1
        self.n_seen += 1

    def by_rank(self) -> np.ndarray:
        """(N_RANKS,) descending, summing to less than 1.

        A rank that was hardly tried follows the last one that was, in the prior's proportions.
        """
        second = _SECOND * (1 - self.first) / (1 - _FIRST)
        prior = np.append(self.first, second * np.arange(1, N_RANKS) ** -_DECAY)
        scale = 1.0
        estimate = np.empty(N_RANKS)
        for k in range(N_RANKS):
            estimate[k] = (self.hits[k] + _PRIOR_WEIGHT * scale * prior[k]) / (
                self.tries[k] + _PRIOR_WEIGHT
            )
            scale = estimate[k] / prior[k]
        estimate = np.minimum.accumulate(estimate)
        scaled: np.ndarray = estimate / max(1.0, estimate.sum() / 0.995)
        return scaled


class Calibration(_Ratios):
    """How often tokens of about a probability by the draft are the target's choice; `tries` sums
    the probabilities.
    """

    _EDGES = np.exp(
        -np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.4, 1.8, 2.3, 3.0, 4.0, 5.0, 6.5])
    )[::-1]
    N = len(_EDGES) + 1

    def observe(self, probabilities: np.ndarray, hit: int | None) -> None:
        """The draft's probabilities of a node's candidates, of which number `hit` was the target's
        choice, or none.
        """
        bins = np.searchsorted(self._EDGES, probabilities)
        self._fade()
        np.add.at(self.tries, bins, probabilities)
        if hit is not None:
            self.hits[bins[hit]] += 1

    def chances(self, probabilities: np.ndarray) -> np.ndarray:
        """The chance of being the target's choice, of the same shape."""
        ratio = (self.hits + _PRIOR_WEIGHT / 4) / (self.tries + _PRIOR_WEIGHT / 4)
        return np.minimum(probabilities * ratio[np.searchsorted(self._EDGES, probabilities)], 1.0)


class ExpectedTokensBias(_Ratios):
    """Ratio of accepted to predicted draft tokens, exponentially averaged.

    weight  tokens that a prediction is trusted for before anything was accepted
    memory  factor by which older passes count less after each new one
    """

    N = 1

    def __init__(self, weight: float = _BIAS_WEIGHT, memory: float = _BIAS_MEMORY) -> None:
        super().__init__()
        self._weight = weight
        self._memory = memory

    def observe(self, expected: float, got: int) -> None:
        """A tree of which so many tokens were expected gave so many; the first, the bonus, is
        sure.
        """
        self._fade(self._memory)
        self.hits += got - 1
        self.tries += expected - 1

    def corrected(self, expected: float) -> float:
        """The tokens to expect of a tree that is predicted to give `expected`."""
        return 1 + (expected - 1) * float(
            (self.hits[0] + self._weight) / (self.tries[0] + self._weight)
        )


class ExpertsBias(_Ratios):
    """Ratio of the experts that passes bring to those of the cost model, which takes each for
    equally likely, by rows.

    Routers prefer some, rows that belong together take the same, and what is kept is what is taken
    most.
    """

    N = 10  # passes of 1, 2, 4, ... rows, each to the nearest

    def observe(self, n_rows: int, ratio: float) -> None:
        """A pass brought so many times what was predicted."""
        self._fade()
        at = min(round(np.log2(n_rows)), self.N - 1)
        self.hits[at] += ratio
        self.tries[at] += 1

    def at(self, n_rows: np.ndarray) -> np.ndarray:
        """For passes of so many rows: by those of about as many, of others and, as if it were one,
        the prediction.
        """
        near = 4.0 ** -np.abs(np.subtract.outer(np.log2(np.maximum(n_rows, 1)), np.arange(self.N)))
        return np.asarray((near @ self.hits + 1) / (near @ self.tries + 1))
