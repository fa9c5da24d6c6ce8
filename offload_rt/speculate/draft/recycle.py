"""Token recycling: trees of earlier target predictions. Needs no draft model.

Token Recycling (Luo et al. 2024, arXiv 2408.08696) with three changes. Predictions are stored with
their probabilities under the last tokens before them, of several lengths. Trees grow best-first by
the product of acceptance probabilities, calibrated by the length. Prompt lookup adds its
continuations.
"""

import time
from collections import abc

import numpy as np
import torch

from offload_rt.cost.tree_size import ExpectedTokensBias, best_prefix, best_prefixes
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.protocols import Drafter, DrafterType, DraftParts
from offload_rt.speculate.recycler import (
    N_FIRST,
    N_PREDICTED,
    Recycler,
    TextCandidates,
    TextGrowth,
)
from offload_rt.tree.topology import DraftTree, Topology, Verdict

_SIZES = (512, 256, 128, 64, 32, 16, 8, 4, 1)


class PredictedTree:
    """Best-first tree: the root and the most probable nodes, in descending order.

    expected  expected tokens before bias correction
    """

    def __init__(self, text: TextCandidates, root_token: int, n_levels: int) -> None:
        self.text = text
        self.expected = 1.0
        root = np.array([0])
        self._growth = TextGrowth(text, n_levels, np.ones(1), root, lambda _: ())
        self._root = root_token

    def grow(self, n_nodes: int) -> None:
        """Select up to `n_nodes` nodes."""
        growth = self._growth
        growth.grow(n_nodes, np.ones(0))
        opened = np.flatnonzero(growth.is_opened)
        # A child never exceeds its parent; stable sorting keeps it behind its parent.
        nodes = opened[np.argsort(-growth.chances[opened], kind="stable")][:n_nodes]
        places = np.full(len(growth.chances) + 1, -1)
        places[nodes] = np.arange(len(nodes))
        self.parents = places[growth.parents[nodes]]
        self.tokens = growth.tokens[nodes]
        self.tokens[0] = self._root
        self.chances = growth.chances[nodes]


class Recycling(Drafter):
    """Propose best-first trees from a prediction table shared by all sequences."""

    n_predicted = N_PREDICTED
    reads_prompt = True

    def __init__(self, parts: DraftParts) -> None:
        self.limits = parts.limits
        self._cost = parts.cost
        self._stats = parts.pair_stats
        self._recycler = Recycler(parts.pair_stats)
        self._proposals: dict[Sequence, PredictedTree] = {}

    def propose(self, sequences: abc.Sequence[Sequence], n_nodes: int) -> list[DraftTree]:
        """Propose a tree per sequence; select the most probable nodes across all sequences."""
        started = time.perf_counter()
        proposals = [self._grown(sequence, n_nodes, len(sequences)) for sequence in sequences]
        chances = [proposal.chances[1:] for proposal in proposals]
        sizes = [len(candidates) for candidates in chances]
        if not self.limits.fixed_size:
            context = max(len(sequence.tokens) for sequence in sequences)
            draft_s = time.perf_counter() - started
            sizes = best_prefixes(
                chances, lambda n_rows: self._cost.seconds(n_rows, context, draft_s)
            )
        sized = zip(sequences, proposals, sizes, strict=True)
        return [self._finish(sequence, proposal, n_below) for sequence, proposal, n_below in sized]

    def read(self, sequence: Sequence, predicted: TopTokens) -> None:
        """Store the target's predictions at the prompt's last tokens."""
        self._recycler.read(sequence, predicted)

    def learn(
        self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None
    ) -> None:
        """Store the target's predictions at every node, and the fate of the candidates."""
        proposal = self._proposals[sequence]
        after = [*tree.tokens[list(verdict.path)].tolist(), verdict.bonus]
        proposal.text.learn(after)
        self._bias(sequence).observe(proposal.expected, len(after))
        if predicted is not None:
            self._recycler.learn(sequence, tree, verdict.path, predicted)

    def end(self, sequence: Sequence) -> None:
        """Forget the tree of a sequence. The table is kept: other texts share its n-grams."""
        self._proposals.pop(sequence, None)

    def _bias(self, sequence: Sequence) -> ExpectedTokensBias:
        return self._stats.at("recycled", sequence.temperature).bias

    def _grown(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> PredictedTree:
        """Grow a tree while the time per token decreases, assuming equal trees per sequence."""
        n_levels = min(self.limits.n_levels, sequence.n_left)
        started = time.perf_counter()
        text = self._recycler.candidates(sequence, n_levels if n_nodes > 1 else 1)
        tree = PredictedTree(text, sequence.tokens[-1], n_levels)
        size = n_nodes if self.limits.fixed_size else min(N_FIRST, n_nodes)
        while True:
            tree.grow(size)
            n = len(tree.parents)
            if n < size or size == n_nodes:
                break
            rows = n_sequences * np.arange(1, n + 1)
            draft_s = time.perf_counter() - started
            pass_s = self._cost.seconds(rows, len(sequence.tokens), draft_s)
            if 1 + best_prefix(tree.chances[1:], pass_s) <= size // 2:
                break
            size = min(2 * size, n_nodes)
        return tree

    def _finish(self, sequence: Sequence, tree: PredictedTree, n_below: int) -> DraftTree:
        """Cut a tree to the root and its `n_below` best nodes."""
        n = 1 + n_below
        topology = Topology(tree.parents[:n])
        tree.expected = float(tree.chances[:n].sum())
        self._proposals[sequence] = tree
        # A pass yields at most a token per level.
        expected = min(self._bias(sequence).corrected(tree.expected), topology.n_levels)
        return DraftTree(topology, torch.from_numpy(tree.tokens[:n]), expected=expected)


DRAFTER = DrafterType(Recycling, gives_draft_probs=False, best_rule="match", default_sizes=_SIZES)
