"""Prompt lookup (Saxena 2023): continuations copied from earlier in the sequence. Needs no draft model."""

from collections.abc import Sequence as Several

import numpy as np
import torch

from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.ngrams import Match, MatchRates, find_matches
from offload_rt.speculate.protocols import Drafter, DrafterType, DraftParts
from offload_rt.tree.choose import best_prefix
from offload_rt.tree.topology import DraftTree, Topology, Verdict

_SIZES = (32, 16, 8, 4, 1)


class PromptLookup(Drafter):
    """A tree of what followed the longest matches, as large as it pays."""

    def __init__(self, parts: DraftParts) -> None:
        self.limits, self._cost = parts.limits, parts.cost
        self._rates = MatchRates()
        self._best: dict[Sequence, Match] = {}

    def propose(self, sequences: Several[Sequence], n_nodes: int) -> list[DraftTree]:
        """One tree for each sequence."""
        self._best.clear()
        return [self._tree(sequence, n_nodes, len(sequences)) for sequence in sequences]

    def learn(self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None) -> None:
        """Keep count of how often a copied token was right."""
        if match := self._best.get(sequence):
            self._rates.observe(match, [*tree.tokens[list(verdict.path)].tolist(), verdict.bonus])

    def end(self, sequence: Sequence) -> None:
        """Forget its match."""
        self._best.pop(sequence, None)

    def _tree(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> DraftTree:
        n_levels = min(self.limits.n_levels, sequence.n_left)
        matches = find_matches(sequence.tokens, n_levels - 1) if n_nodes > 1 else []
        if matches:
            self._best[sequence] = matches[0]
        nodes = self._nodes(matches)
        chances = np.array([chance for _, chance in nodes.values()])
        order = np.argsort(-chances, kind="stable")[: n_nodes - 1]
        rows = n_sequences * np.arange(1, len(order) + 2)
        order = order[: best_prefix(chances[order], self._cost.seconds(rows, len(sequence.tokens)))]
        return _tree_of(sequence.tokens[-1], list(nodes), order, 1.0 + float(chances[order].sum()))

    def _nodes(self, matches: list[Match]) -> dict[tuple[int, ...], tuple[int, float]]:
        """The paths of the matches, parents first: path of tokens -> (its place, its chance)."""
        nodes: dict[tuple[int, ...], tuple[int, float]] = {}
        left = 1.0
        for match in matches:
            rate = self._rates.rate(match.n_equal)
            above = 1.0
            for n in range(1, len(match.tokens) + 1):
                # Never more than the node above it has, which a match before this one may have brought.
                place = (len(nodes), min(left * rate**n, above))
                above = nodes.setdefault(match.tokens[:n], place)[1]
            left *= 1.0 - rate
        return nodes


def _tree_of(root: int, paths: list[tuple[int, ...]], chosen: np.ndarray, expected: float) -> DraftTree:
    """The tree of the chosen paths, in which every path's beginning was chosen before it."""
    at: dict[tuple[int, ...], int] = {(): 0}
    parents, tokens = [-1], [root]
    for i in chosen:
        at[paths[i]] = len(parents)
        parents.append(at[paths[i][:-1]])
        tokens.append(paths[i][-1])
    return DraftTree(Topology(np.array(parents)), torch.tensor(tokens), expected=expected)


DRAFTER = DrafterType(PromptLookup, needs_model=False, gives_draft_probs=False, best_rule="match", default_sizes=_SIZES)
