"""Prompt lookup: what followed the last tokens when they stood in the sequence before."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from offload_rt.tree.topology import DraftTree, Topology

# Longest run of last tokens that is compared, and how many earlier places are looked at.
_LONGEST = 8
_PLACES = 4
# Chance that a copied token is right, by the length of the match, until it was observed; and the weight of that.
_PRIOR = np.array([0.0, 0.2, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85])
_PRIOR_WEIGHT = 8.0


@dataclass(frozen=True)
class Match:
    """An earlier place where the sequence stood as it stands now.

    n_equal  last tokens that are the same there
    tokens   what followed
    """

    n_equal: int
    tokens: tuple[int, ...]


def find_matches(tokens: list[int], n_next: int) -> list[Match]:
    """Earlier places with the same last tokens, the longest match first and of equal ones the latest."""
    text = np.array(tokens)
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
    best = np.lexsort((-ends, -lengths))[:_PLACES]
    return [Match(int(lengths[i]), tuple(text[ends[i] + 1 : ends[i] + 1 + n_next].tolist())) for i in best]


class MatchRates:
    """How often a copied token is right, by the length of the match it comes from."""

    def __init__(self) -> None:
        self._right = _PRIOR_WEIGHT * _PRIOR
        self._tried = np.full(len(_PRIOR), _PRIOR_WEIGHT)

    def rate(self, n_equal: int) -> float:
        """The chance of a token to be right when those before it were."""
        return float(self._right[n_equal] / self._tried[n_equal])

    def observe(self, match: Match, next_tokens: list[int]) -> None:
        """What came after a match."""
        pairs = list(zip(match.tokens, next_tokens, strict=False))
        n_right = next((i for i, (copied, token) in enumerate(pairs) if copied != token), len(pairs))
        self._right[match.n_equal] += n_right
        self._tried[match.n_equal] += min(n_right + 1, len(pairs))


def copied_paths(matches: list[Match], rates: MatchRates) -> dict[tuple[int, ...], float]:
    """The paths that some matches propose below the root, a path before those that go on from it, and their chances."""
    chances: dict[tuple[int, ...], float] = {}
    left = 1.0
    for match in matches:
        rate = rates.rate(match.n_equal)
        above = 1.0
        for n in range(1, len(match.tokens) + 1):
            # Never more than the node above it has, which a match before this one may have brought.
            above = chances.setdefault(match.tokens[:n], min(left * rate**n, above))
        left *= 1.0 - rate
    return chances


def path_tree(root: int, paths: Iterable[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """Parents and tokens of the tree of some paths, each of which goes on from one before it by a token."""
    at: dict[tuple[int, ...], int] = {(): 0}
    parents, tokens = [-1], [root]
    for path in paths:
        at[path] = len(parents)
        parents.append(at[path[:-1]])
        tokens.append(path[-1])
    return parents, tokens


def append_ngram(tree: DraftTree, tokens: tuple[int, ...], n_nodes: int) -> DraftTree:
    """Add a copied continuation below the root as deterministic nodes, where it is not there yet and `n_nodes` allow.

    It follows deterministic nodes only: beside sampled children, the caller has excluded its first token from sampling.
    """
    parents, all_tokens = tree.topology.parents.tolist(), tree.tokens.tolist()
    n_before, node = len(parents), 0
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
    n_new, sampled = len(parents) - n_before, tree.sampled
    if n_new == 0:
        return tree
    if sampled is not None:
        is_sampled = np.pad(sampled.is_sampled, (0, n_new))
        row_of = np.pad(sampled.row_of, (0, n_new), constant_values=-1)
        sampled = replace(sampled, is_sampled=is_sampled, row_of=row_of)
    return replace(tree, topology=Topology(np.array(parents)), tokens=torch.tensor(all_tokens), sampled=sampled)
