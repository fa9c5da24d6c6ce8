"""Tree size selection: expected tokens per tree against pass times, and acceptance statistics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

# An estimate starts from the prior with the weight of `_PRIOR_WEIGHT` observations. Each
# observation multiplies the weight of earlier observations by `_MEMORY`.
_PRIOR_WEIGHT = 4.0
_MEMORY = 0.998
# Weight of the predicted tokens of trees, in tokens, and memory of the observed ratio. Texts differ
# by up to a factor of two, so the newest passes predict the next pass better than the mean
# (`bench/speculate/predictions.py`).
_BIAS_WEIGHT = 10.0
_BIAS_MEMORY = 0.97
# Select the smallest tree within this factor of the best: the estimates are not more precise.
_NEARLY = 1.01
# Trees are drafted only if they pay with acceptance probabilities multiplied by this factor: where
# drafting seems to gain little, its acceptance is overestimated more often than not.
TRUST = 0.5
# Prior acceptance by rank: a fair draft, falling with rank as in natural language.
_FIRST = 0.6
_SECOND = 0.12
_DECAY = 1.2
# Distinguished sibling ranks; a node has no children of higher rank.
N_RANKS = 32


@dataclass(frozen=True)
class DraftLimits:
    """Upper bounds of tree sizes.

    n_nodes      nodes of all trees in a pass, including roots and unverified rows
    n_levels     levels of a single tree, including the root
    fixed_size   use `n_nodes` wherever memory allows, regardless of the expected time
    fixed_depth  likewise for `n_levels`
    """

    n_nodes: int
    n_levels: int
    fixed_size: bool = False
    fixed_depth: bool = False


@dataclass(frozen=True)
class TreeChoice:
    """Selected tree size, expected tokens per pass with the bonus token, seconds per token."""

    n_nodes: int
    n_levels: int
    n_tokens: float
    token_s: float


def select_tree(
    expected: np.ndarray, limits: DraftLimits, step_s: Callable[[np.ndarray], np.ndarray]
) -> TreeChoice:
    """Select the tree size with the least expected time per token (Chen et al. 2024).

    expected  (>= n_nodes + 1, >= n_levels + 1) expected tokens of the best tree of at most so many
              nodes and levels, including the root; see `tree.search.search`
    step_s    seconds of drafting and verifying trees: sizes (m,) -> (m, n_levels) or (m, 1)
    Returns the smallest size within 1 % of the best, with its best number of levels.
    """
    sizes = np.array([limits.n_nodes]) if limits.fixed_size else sizes_up_to(limits.n_nodes)
    per_token = step_s(sizes) / expected[sizes, 1 : limits.n_levels + 1]
    if limits.fixed_depth:
        per_token[:, :-1] = np.inf
    per_token[sizes > 1, 0] = np.inf  # the first level holds only the root
    row = _first_good(per_token.min(1))
    n_nodes, n_levels = int(sizes[row]), int(per_token[row].argmin()) + 1
    n_tokens = float(expected[n_nodes, n_levels])
    return TreeChoice(n_nodes, n_levels, n_tokens, float(per_token[row].min()))


def best_prefix(chances: np.ndarray, pass_s: np.ndarray, n_trees: int = 1) -> int:
    """Select how many nodes to verify: the smallest number within 1 % of the least time per token.

    chances  (m,) acceptance probability per node, descending
    pass_s   (m + 1,) seconds of a pass with the roots and the first 0, 1, ... m nodes
    n_trees  number of trees; each produces a bonus token
    """
    return _first_good(pass_s / np.concatenate(([n_trees], n_trees + np.cumsum(chances))))


def best_prefixes(
    chances: Sequence[np.ndarray], pass_s: Callable[[np.ndarray], np.ndarray]
) -> list[int]:
    """Select how many nodes of each tree to verify in a shared pass, as in `best_prefix`.

    chances  acceptance probabilities per tree, each descending
    pass_s   seconds of passes: row counts (m,), including roots -> (m,)
    """
    pooled = np.concatenate(chances)
    owners = np.repeat(np.arange(len(chances)), [len(nodes) for nodes in chances])
    order = np.argsort(-pooled, kind="stable")
    n = best_prefix(pooled[order], pass_s(len(chances) + np.arange(len(pooled) + 1)), len(chances))
    n_selected: list[int] = np.bincount(owners[order[:n]], minlength=len(chances)).tolist()
    return n_selected


def _first_good(per_token: np.ndarray) -> int:
    """Return the first index within `_NEARLY` of the minimum; sizes ascend."""
    return int((per_token <= _NEARLY * per_token.min()).argmax())


def sizes_up_to(n_nodes: int) -> np.ndarray:
    """Return tree sizes to compare: all up to 16, then in steps of about an eighth."""
    sizes = [*range(1, min(n_nodes, 16) + 1)]
    while sizes[-1] < n_nodes:
        sizes.append(min(sizes[-1] + max(sizes[-1] // 8, 1), n_nodes))
    return np.array(sizes)


class _Ratios:
    """Exponentially averaged ratios of `hits` to `tries`, each (N,)."""

    N: ClassVar[int]

    def __init__(self) -> None:
        self.hits = np.zeros(self.N)
        self.tries = np.zeros(self.N)

    @classmethod
    def restore(cls, hits: list[float], tries: list[float]) -> Self:
        """Restore saved `counts`."""
        ratios = cls()
        ratios.hits, ratios.tries = np.array((hits, tries))
        return ratios

    def counts(self) -> tuple[list[float], list[float]]:
        """Return hits and tries for saving."""
        return self.hits.tolist(), self.tries.tolist()

    def _fade(self, memory: float = _MEMORY) -> None:
        self.hits *= memory
        self.tries *= memory


class Acceptance(_Ratios):
    """Acceptance rate of an accepted node's k-th child; `first` is the prior of its first child."""

    N = N_RANKS
    n_seen = 0
    first = _FIRST

    def observe(self, n_children: int, rank: int | None) -> None:
        """Record an accepted node and the rank of its accepted child, or None."""
        self._fade()
        self.tries[:n_children] += 1
        if rank is not None and rank < N_RANKS:
            self.hits[rank] += 1
        self.n_seen += 1

    def by_rank(self) -> np.ndarray:
        """Return acceptance by rank (N_RANKS,), descending, with a sum below 1.

        A rank with few observations follows the preceding rank in the prior's proportion.
        """
        second = _SECOND * (1 - self.first) / (1 - _FIRST)
        prior = np.append(self.first, second * np.arange(1, N_RANKS) ** -_DECAY)
        scale = 1.0
        estimate = np.empty(N_RANKS)
        for k in range(N_RANKS):
            hits = self.hits[k] + _PRIOR_WEIGHT * scale * prior[k]
            estimate[k] = hits / (self.tries[k] + _PRIOR_WEIGHT)
            scale = estimate[k] / prior[k]
        estimate = np.minimum.accumulate(estimate)
        scaled: np.ndarray = estimate / max(1.0, estimate.sum() / 0.995)
        return scaled


class Calibration(_Ratios):
    """Choices of the target (`hits`) per bin of draft probability, which `tries` sums."""

    EDGES = np.exp(
        -np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.4, 1.8, 2.3, 3.0, 4.0, 5.0, 6.5])
    )[::-1]
    N = len(EDGES) + 1

    def observe(self, probabilities: np.ndarray, hit: int | None) -> None:
        """Record a node's candidates (n,), and the index of the target's choice or None."""
        bins = np.searchsorted(self.EDGES, probabilities)
        self._fade()
        np.add.at(self.tries, bins, probabilities)
        if hit is not None:
            self.hits[bins[hit]] += 1

    def chances(self, probabilities: np.ndarray) -> np.ndarray:
        """Return the probability of being the target's choice, in the shape of `probabilities`."""
        factors = self.ratios()[np.searchsorted(self.EDGES, probabilities)]
        return np.asarray(np.minimum(probabilities * factors, 1.0))

    def ratios(self, prior: float = 1.0) -> np.ndarray:
        """Return the target choices per draft probability of each bin (N,); `prior` if empty."""
        weight = _PRIOR_WEIGHT / 4
        return np.asarray((self.hits + prior * weight) / (self.tries + weight))


class DraftedPasses(_Ratios):
    """Passes with a draft of all decoding passes, and the nodes and tokens of these passes."""

    N = 3

    def observe(self, n_nodes: int, n_tokens: int) -> None:
        """Record a pass with a tree of `n_nodes` nodes, which yielded `n_tokens` tokens."""
        has_draft = n_nodes > 1
        self._fade()
        self.hits += has_draft * np.array([1, n_nodes, n_tokens])
        self.tries += np.array([1, has_draft, has_draft])

    @property
    def means(self) -> tuple[float, float, float]:
        """Share of passes with a draft, their mean nodes and tokens; 1 without observations."""
        share, n_nodes, n_tokens = ((self.hits + 1) / (self.tries + 1)).tolist()
        return share, n_nodes, n_tokens


class ExpectedTokensBias(_Ratios):
    """Ratio of accepted to predicted draft tokens, exponentially averaged.

    weight  weight of the prediction, in tokens
    memory  factor applied to older passes after each new pass
    """

    N = 1

    def __init__(self, weight: float = _BIAS_WEIGHT, memory: float = _BIAS_MEMORY) -> None:
        super().__init__()
        self._weight = weight
        self._memory = memory

    def observe(self, expected: float, n_tokens: int) -> None:
        """Record expected and actual tokens of a pass; the bonus token is certain."""
        self._fade(self._memory)
        self.hits += n_tokens - 1
        self.tries += expected - 1

    def corrected(self, expected: float) -> float:
        """Correct the expected tokens of a tree."""
        ratio = (self.hits[0] + self._weight) / (self.tries[0] + self._weight)
        return 1 + (expected - 1) * float(ratio)


class ExpertsBias(_Ratios):
    """Ratio of actual to predicted streamed experts, indexed by the logarithm of the row count.

    The cost model assumes equally likely experts. Routers prefer some experts, related rows share
    experts, and the cache keeps the most used experts.
    """

    N = 10  # passes of 1, 2, 4, ... rows, each to the nearest

    def observe(self, n_rows: int, ratio: float) -> None:
        """Record the ratio of actual to predicted experts of a pass."""
        self._fade()
        at = min(round(np.log2(n_rows)), self.N - 1)
        self.hits[at] += ratio
        self.tries[at] += 1

    def at(self, n_rows: np.ndarray) -> np.ndarray:
        """Return the correction factor per row count.

        The weight of observations falls with distance; the prediction counts as one observation.
        """
        near = 4.0 ** -np.abs(np.subtract.outer(np.log2(np.maximum(n_rows, 1)), np.arange(self.N)))
        return np.asarray((near @ self.hits + 1) / (near @ self.tries + 1))
