"""Drafters without a draft model: best-first trees of the text's candidates, see `recycler`."""

import time
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from offload_rt.cost.tree_size import TRUST, best_prefixes
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder, RoundCost
from offload_rt.speculate.ngrams import NgramMatch, append_ngram
from offload_rt.speculate.pair_stats import Estimates
from offload_rt.speculate.predictions import N_PREDICTED
from offload_rt.speculate.protocols import Drafter, DraftParts
from offload_rt.speculate.recycler import Recycler, TextCandidates
from offload_rt.speculate.static_builder import StaticTreeBuilder
from offload_rt.speculate.tree_state import TreeState
from offload_rt.tree.topology import DraftTree, Verdict

# Uses of an estimate of costs, and growth of the context after which it is repeated.
_COST_USES = 8
_GROWTH = 1.1


@dataclass
class Proposal:
    """A tree under construction, with the state needed to learn from its verification.

    expected  expected tokens before bias correction
    """

    builder: StaticTreeBuilder | DynamicTreeBuilder
    estimates: Estimates
    match: NgramMatch | None = None
    expected: float = 1.0


class TextDrafter(Drafter):
    """Propose trees of the text's candidates, whose table all sequences share.

    recycles  store the target's predictions as candidates, in addition to copies
    """

    _dynamic: type[DynamicTreeBuilder] = DynamicTreeBuilder

    def __init__(self, parts: DraftParts, recycles: bool = True) -> None:
        self.limits = parts.limits
        self.reads_prompt = self._recycles = recycles
        self.n_predicted = N_PREDICTED if recycles else 0
        self.pair_stats = parts.pair_stats
        self._cost = parts.cost
        self._recycler = Recycler(parts.pair_stats, parts.predictions)
        # Costs by nodes of a tree and number of trees, with the context and the remaining uses.
        self._costs: dict[tuple[int, int], tuple[RoundCost, int, int]] = {}
        self._proposals: dict[Sequence, Proposal] = {}

    def propose(self, sequences: abc.Sequence[Sequence], n_nodes: int) -> list[DraftTree]:
        started = time.perf_counter()
        n = len(sequences)
        self._proposals = {
            sequence: proposal
            for sequence in sequences
            if (proposal := self._start_tree(sequence, n_nodes, n)) is not None
        }
        self._draft(n)
        sizes = self._sizes(sequences, time.perf_counter() - started)
        return [*map(self._finish_tree, sequences, [n_nodes] * n, sizes)]

    def read(self, sequence: Sequence, predicted: TopTokens) -> None:
        self._recycler.read(sequence, predicted)

    def learn(
        self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None
    ) -> None:
        """Store the target's predictions at the nodes, and the fate of the candidates."""
        if self._recycles and predicted is not None:
            self._recycler.learn(sequence, tree, verdict.path, predicted)
        drafted = self.estimates_at(sequence.temperature).drafted
        drafted.observe(len(tree.topology), 1 + len(verdict.path))
        proposal = self._proposals.get(sequence)
        if proposal is None:
            return
        after = [*tree.tokens[list(verdict.path)].tolist(), verdict.bonus]
        proposal.estimates.bias.observe(proposal.expected, len(after))
        if proposal.match is not None:
            self._recycler.rates.observe(proposal.match, after)
        proposal.builder.learn([0, *verdict.path], after)

    def skip(self, sequence: Sequence) -> None:
        self.estimates_at(sequence.temperature).drafted.observe(1, 1)

    def end(self, sequence: Sequence) -> None:
        """Forget the tree of a sequence. The table is kept: other texts share its n-grams."""
        self._proposals.pop(sequence, None)

    def save(self) -> None:
        self.pair_stats.save()

    def estimates_at(self, temperature: float) -> Estimates:
        """Return the estimates for the kind of tree proposed at a temperature."""
        return self.pair_stats.at("recycled", temperature)

    def _start_tree(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> Proposal | None:
        n_levels = min(self.limits.n_levels, sequence.n_left)
        cost = self._round_cost(sequence, n_nodes, n_sequences)
        return self._text_tree(sequence, (n_nodes, n_levels, 1), 0.0, cost)

    def _text_tree(
        self, sequence: Sequence, size: tuple[int, int, int], temperature: float, cost: RoundCost
    ) -> Proposal:
        """Grow a tree of the text's candidates, which need no draft rows."""
        state = TreeState(0, 1, sequence, torch.device("cpu"))
        state.computed()
        estimates = self.estimates_at(sequence.temperature)
        text = TextCandidates(self._recycler, sequence, size[1])
        builder = self._dynamic_type(sequence)(state, size, temperature, estimates, text, cost)
        return Proposal(builder, estimates)

    def _dynamic_type(self, sequence: Sequence) -> Callable[..., DynamicTreeBuilder]:
        return self._dynamic

    def _round_cost(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> RoundCost:
        """Return recent costs of a dynamic tree; nodes of a fixed number are free."""
        context = len(sequence.tokens)
        level_s = self._cost.level(n_sequences)
        cost, longest, n_left = self._costs.get((n_nodes, n_sequences), (None, 0, 0))
        if cost is None or cost.level_s != level_s or context > longest or n_left == 0:
            sizes = np.ones(n_nodes) if self.limits.fixed_size else np.arange(1, n_nodes + 1)
            pass_s = self._cost.seconds(n_sequences * sizes, context, 0.0, n_sequences)
            cost = RoundCost(level_s, pass_s)
            longest, n_left = int(_GROWTH * context), _COST_USES
        self._costs[n_nodes, n_sequences] = cost, longest, n_left - 1
        return cost

    def _draft(self, n_sequences: int) -> None:
        """Add the candidates of a draft model to the proposals."""

    def _finish_tree(self, sequence: Sequence, n_nodes: int, size: int) -> DraftTree:
        proposal = self._proposals.get(sequence)
        if proposal is None or size + proposal.builder.n_fixed == 0:
            return DraftTree.root_only(sequence.tokens[-1])
        tree = proposal.builder.tree(size)
        proposal.expected = tree.expected
        tree = append_ngram(tree, proposal.builder.copied, n_nodes)
        # A pass yields at most a token per level.
        expected = min(proposal.estimates.bias.corrected(tree.expected), tree.topology.n_levels)
        return replace(tree, expected=expected)

    def _sizes(self, sequences: abc.Sequence[Sequence], draft_s: float) -> list[int]:
        """Select the number of nodes per sequence to verify, by expected time per token.

        draft_s  seconds spent on drafting these trees
        """
        proposals = [self._proposals.get(sequence) for sequence in sequences]
        chances = [each.builder.chances if each else np.empty(0) for each in proposals]
        largest = [*map(len, chances)]
        if self.limits.fixed_size or not any(largest):
            return largest
        n_fixed = sum(proposal.builder.n_fixed for proposal in self._proposals.values())
        n = len(sequences)
        context = max(len(sequence.tokens) for sequence in sequences)

        def seconds(n_rows: np.ndarray) -> np.ndarray:
            return self._cost.seconds(n_fixed + n_rows, context, draft_s, n)

        if not any(best_prefixes([TRUST * candidates for candidates in chances], seconds)):
            return [0] * n
        return best_prefixes(chances, seconds)
