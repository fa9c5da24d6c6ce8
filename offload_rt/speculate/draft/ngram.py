"""Prompt lookup (Saxena 2023): copy continuations from earlier text. Needs no draft model."""

from collections import abc

import numpy as np
import torch

from offload_rt.cost.tree_size import best_prefix
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.ngrams import (
    MatchRates,
    NgramMatch,
    copied_paths,
    find_matches,
    path_tree,
)
from offload_rt.speculate.protocols import Drafter, DrafterType, DraftParts
from offload_rt.tree.topology import DraftTree, Topology, Verdict

_SIZES = (32, 16, 8, 4, 1)


class PromptLookup(Drafter):
    """Propose the continuations of the longest matches, sized by expected time per token."""

    def __init__(self, parts: DraftParts) -> None:
        self.limits = parts.limits
        self._cost = parts.cost
        self._rates = MatchRates()
        self._best: dict[Sequence, NgramMatch] = {}

    def propose(self, sequences: abc.Sequence[Sequence], n_nodes: int) -> list[DraftTree]:
        self._best.clear()
        return [self._tree(sequence, n_nodes, len(sequences)) for sequence in sequences]

    def learn(
        self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None
    ) -> None:
        """Update the acceptance rate of copied tokens."""
        if match := self._best.get(sequence):
            self._rates.observe(match, [*tree.tokens[list(verdict.path)].tolist(), verdict.bonus])

    def end(self, sequence: Sequence) -> None:
        self._best.pop(sequence, None)

    def _tree(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> DraftTree:
        n_levels = min(self.limits.n_levels, sequence.n_left)
        matches = find_matches(sequence, n_levels - 1) if n_nodes > 1 else []
        if matches:
            self._best[sequence] = matches[0]
        paths = copied_paths(matches, self._rates)
        chances = np.array([*paths.values()])
        order = np.argsort(-chances, kind="stable")[: n_nodes - 1]
        if not self.limits.fixed_size:
            rows = n_sequences * np.arange(1, len(order) + 2)
            order = order[
                : best_prefix(chances[order], self._cost.seconds(rows, len(sequence.tokens)))
            ]
        parents, tokens = path_tree(sequence.tokens[-1], [[*paths][i] for i in order])
        return DraftTree(
            Topology(np.array(parents)),
            torch.tensor(tokens),
            expected=1.0 + float(chances[order].sum()),
        )


DRAFTER = DrafterType(
    PromptLookup,
    gives_draft_probs=False,
    best_rule="match",
    default_sizes=_SIZES,
)
