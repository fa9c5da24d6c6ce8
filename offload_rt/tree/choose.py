"""Which tree is worth its time on this machine: what is known of acceptance, weighed against what passes cost."""

from dataclasses import dataclass

import numpy as np

# An estimate starts from the prior, which weighs as much as so many observations, and forgets old ones at this rate.
_PRIOR_WEIGHT = 4.0
_MEMORY = 0.998
# More of anything than the observations that are remembered, each of a tree of a thousand nodes, can add up to.
_MOST_COUNTED = 1e9
# The tokens that expectations of whole trees are trusted for, and how fast what came of them is forgotten. Texts differ by as
# much as a factor of two, so the newest passes tell more of the next one than all before (`bench/predictions.py`).
_BIAS_WEIGHT, _BIAS_MEMORY = 10.0, 0.97
# The smallest tree within this factor of the best one is taken: what a larger one gains is less than what is known of its
# cost, and the link waits for it.
_NEARLY = 1.01
# The prior by rank: a fair draft, falling off as ranks do in language.
_FIRST, _SECOND, _DECAY = 0.6, 0.12, 1.2
# Ranks that are told apart; children beyond them are never worth a node.
N_RANKS = 32


@dataclass(frozen=True)
class Choice:
    """A size and depth, and what they promise.

    tokens   expected of one pass
    seconds  of drafting and verifying it
    """

    n_nodes: int
    n_levels: int
    tokens: float
    seconds: float


def choose(expected: np.ndarray, sizes: np.ndarray, seconds: np.ndarray, least_levels: int = 1) -> Choice:
    """The size and depth with the least time for a token (Chen et al. 2024), or the smallest tree that is nearly as good.

    expected  (n + 1, levels + 1): expected tokens of the best tree of so many nodes and levels, the root's included
    sizes     (m,) the sizes to choose from
    seconds   (m, levels) of drafting and verifying a tree of each size and number of levels
    least_levels  of the tree
    """
    per_token = seconds / expected[sizes, 1:]
    per_token[:, : least_levels - 1] = np.inf
    size = _first_good(per_token.min(1))
    level = int(per_token[size].argmin())
    n = int(sizes[size])
    return Choice(n, level + 1, float(expected[n, level + 1]), float(seconds[size, level]))


def best_prefix(chances: np.ndarray, pass_s: np.ndarray) -> int:
    """How many of some nodes are worth taking: the number with the least time for a token, or fewer that are nearly as good.

    chances  (m,) descending: with which each node is accepted
    pass_s   (m + 1,) seconds of a pass with the root and the first 0, 1, ... m nodes
    """
    tokens = np.concatenate(([1.0], 1.0 + np.cumsum(chances)))
    return _first_good(pass_s / tokens)


def _first_good(per_token: np.ndarray) -> int:
    """The first of some sizes, ascending, that is within `_NEARLY` of the best."""
    return int((per_token <= _NEARLY * per_token.min()).argmax())


def sizes_up_to(n_nodes: int) -> np.ndarray:
    """Tree sizes worth comparing: all up to 16, then in steps of an eighth or so."""
    sizes = [*range(1, min(n_nodes, 16) + 1)]
    while sizes[-1] < n_nodes:
        sizes.append(min(sizes[-1] + max(sizes[-1] // 8, 1), n_nodes))
    return np.array(sizes)


class Acceptance:
    """How often the k-th child is taken when its parent was: a prior at first, then a running estimate."""

    def __init__(self) -> None:
        self.taken, self.tried = np.zeros(N_RANKS), np.zeros(N_RANKS)
        self.n_seen = 0

    @classmethod
    def of(cls, taken: list[float], tried: list[float]) -> "Acceptance":
        """From what `counts` gave. Raises ValueError for anything else."""
        found = cls()
        found.taken, found.tried = _checked(taken, found.taken), _checked(tried, found.tried)
        return found

    def counts(self) -> tuple[list[float], list[float]]:
        """All it knows, in numbers."""
        return self.taken.tolist(), self.tried.tolist()

    def observe(self, n_children: int, rank: int | None) -> None:
        """At a node that was reached with so many children, the one of this rank was taken, or none."""
        self.taken *= _MEMORY
        self.tried *= _MEMORY
        self.tried[:n_children] += 1
        if rank is not None and rank < N_RANKS:
            self.taken[rank] += 1
        self.n_seen += 1

    def by_rank(self) -> np.ndarray:
        """(N_RANKS,) descending, summing to less than 1.

        A rank that was hardly tried follows the last one that was, in the prior's proportions.
        """
        prior, scale = _prior(), 1.0
        estimate = np.empty(N_RANKS)
        for k in range(N_RANKS):
            expected = scale * prior[k]
            estimate[k] = (self.taken[k] + _PRIOR_WEIGHT * expected) / (self.tried[k] + _PRIOR_WEIGHT)
            scale = estimate[k] / prior[k]
        estimate = np.minimum.accumulate(estimate)
        return estimate / max(1.0, estimate.sum() / 0.995)


class Calibration:
    """What the draft's probabilities are worth: how often tokens of about a probability were the target's choice."""

    _EDGES = np.exp(-np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.4, 1.8, 2.3, 3.0, 4.0, 5.0, 6.5]))[::-1]

    def __init__(self) -> None:
        n = len(self._EDGES) + 1
        self.hits, self.mass = np.zeros(n), np.zeros(n)

    @classmethod
    def of(cls, hits: list[float], mass: list[float]) -> "Calibration":
        """From what `counts` gave. Raises ValueError for anything else."""
        found = cls()
        found.hits, found.mass = _checked(hits, found.hits), _checked(mass, found.mass)
        return found

    def counts(self) -> tuple[list[float], list[float]]:
        """All it knows, in numbers."""
        return self.hits.tolist(), self.mass.tolist()

    def observe(self, probabilities: np.ndarray, hit: int | None) -> None:
        """The draft's probabilities of a node's candidates, of which `hit` was the target's choice, or none."""
        bins = np.searchsorted(self._EDGES, probabilities)
        self.hits *= _MEMORY
        self.mass *= _MEMORY
        np.add.at(self.mass, bins, probabilities)
        if hit is not None:
            self.hits[bins[hit]] += 1

    def chances(self, probabilities: np.ndarray) -> np.ndarray:
        """The chance of being the target's choice, of the same shape."""
        ratio = (self.hits + _PRIOR_WEIGHT / 4) / (self.mass + _PRIOR_WEIGHT / 4)
        return np.minimum(probabilities * ratio[np.searchsorted(self._EDGES, probabilities)], 1.0)


class ExpectedTokensBias:
    """What expectations of trees were worth: tokens beyond the first, which is sure, that came of them, of those expected.

    weight  tokens that an expectation is trusted for before anything has come of one
    memory  factor by which what came of one counts less after the next
    """

    def __init__(self, weight: float = _BIAS_WEIGHT, memory: float = _BIAS_MEMORY) -> None:
        self._weight, self._memory = weight, memory
        self.got = self.expected = 0.0

    @classmethod
    def of(cls, got: list[float], expected: list[float]) -> "ExpectedTokensBias":
        """From what `counts` gave. Raises ValueError for anything else."""
        found = cls()
        (found.got,), (found.expected,) = _checked(got, np.zeros(1)), _checked(expected, np.zeros(1))
        return found

    def counts(self) -> tuple[list[float], list[float]]:
        """All it knows, in numbers."""
        return [float(self.got)], [float(self.expected)]

    def observe(self, expected: float, got: int) -> None:
        """A tree of which so many tokens were expected gave so many."""
        self.got = self._memory * self.got + got - 1
        self.expected = self._memory * self.expected + expected - 1

    def corrected(self, expected: float) -> float:
        """What is to be expected of a tree of which so many tokens seem to be."""
        return 1 + (expected - 1) * (self.got + self._weight) / (self.expected + self._weight)


def _checked(numbers: list[float], like: np.ndarray) -> np.ndarray:
    found = np.array(numbers, dtype=np.float64)
    if found.shape != like.shape or not ((found >= 0) & (found < _MOST_COUNTED)).all():
        raise ValueError("not the counts of this version")
    return found


def _prior() -> np.ndarray:
    ranks = np.arange(1, N_RANKS)
    return np.concatenate(([_FIRST], _SECOND * ranks**-_DECAY))
