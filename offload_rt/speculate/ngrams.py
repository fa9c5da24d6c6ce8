"""Prompt lookup: continuations of earlier occurrences of the last tokens."""

from dataclasses import dataclass

import numpy as np

from offload_rt.executor.sequence import Sequence
from offload_rt.tree.topology import DraftTree

# Maximum match length in tokens, and number of earlier occurrences to keep.
_LONGEST = 8
_PLACES = 4
# Prior acceptance of a copied token, indexed by match length, and its weight in observations.
_PRIOR = np.array([0.0, 0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85])
_PRIOR_WEIGHT = 8.0


@dataclass(frozen=True)
class NgramMatch:
    """An earlier occurrence of the last tokens.

    n_equal  length of the match in tokens
    tokens   tokens after the match
    """

    n_equal: int
    tokens: tuple[int, ...]


def find_matches(sequence: Sequence, n_next: int) -> list[NgramMatch]:
    """Find the longest earlier occurrences of the last tokens; the latest first among equals.

    Continuations end before tokens outside the grammar.
    """
    text = np.array(sequence.tokens)
    n = len(text)
    ends = np.flatnonzero(text[:-1] == text[-1])
    lengths = np.ones(len(ends), dtype=np.int64)
    going = np.ones(len(ends), dtype=bool)
    for k in range(1, min(_LONGEST, n)):
        going &= ends >= k
        going[going] = text[ends[going] - k] == text[n - 1 - k]
        if not going.any():
            break
        lengths += going
    matches = []
    for i in np.lexsort((-ends, -lengths))[:_PLACES]:
        tokens = tuple(text[ends[i] + 1 : ends[i] + 1 + n_next].tolist())
        matches.append(NgramMatch(int(lengths[i]), tokens[: sequence.n_allowed(tokens)]))
    return matches


class MatchRates:
    """Acceptance rates of copied tokens, by match length."""

    def __init__(self) -> None:
        self._right = _PRIOR_WEIGHT * _PRIOR
        self._tried = np.full(len(_PRIOR), _PRIOR_WEIGHT)

    def rate(self, n_equal: int) -> float:
        """Return the acceptance probability of a copied token after accepted copied tokens."""
        return float(self._right[n_equal] / self._tried[n_equal])

    def observe(self, match: NgramMatch, next_tokens: list[int]) -> None:
        """Record the actual tokens after a match."""
        pairs = list(zip(match.tokens, next_tokens, strict=False))
        wrong = (i for i, (copied, token) in enumerate(pairs) if copied != token)
        n_right = next(wrong, len(pairs))
        self._right[match.n_equal] += n_right
        self._tried[match.n_equal] += min(n_right + 1, len(pairs))


def copied_paths(matches: list[NgramMatch], rates: MatchRates) -> dict[tuple[int, ...], float]:
    """Return the proposed paths below the root, prefixes first, with their probabilities."""
    chances: dict[tuple[int, ...], float] = {}
    left = 1.0
    for match in matches:
        rate = rates.rate(match.n_equal)
        above = 1.0
        for n in range(1, len(match.tokens) + 1):
            # A child is at most as probable as its parent, which an earlier match may have added.
            above = chances.setdefault(match.tokens[:n], min(left * rate**n, above))
        left *= 1.0 - rate
    return chances


def append_ngram(tree: DraftTree, tokens: tuple[int, ...], n_nodes: int) -> DraftTree:
    """Append a copied continuation below the root as deterministic nodes, up to `n_nodes`.

    Existing equal nodes are reused in trees without sampled nodes. Beside sampled children, the
    caller must have excluded the first copied token from sampling.
    """
    parents = tree.topology.parents.tolist()
    all_tokens = tree.tokens.tolist()
    n_before = len(parents)
    node = 0
    for token in tokens:
        below = tree.topology.children[node] if node < n_before and tree.sampled is None else ()
        child = next((child for child in below if all_tokens[child] == token), None)
        if child is None:
            if len(parents) >= n_nodes:
                break
            child = len(parents)
            parents.append(node)
            all_tokens.append(token)
        node = child
    return tree.extended(parents, all_tokens)
