"""The drafters that have a model: trees of a shape chosen for the machine, or grown where the draft is confident."""

import time
import warnings
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.ngrams import Match, MatchRates, append_ngram, find_matches
from offload_rt.speculate.pair_stats import Estimates
from offload_rt.speculate.protocols import Drafter, DraftParts
from offload_rt.speculate.static_builder import StaticTree, StaticTreeBuilder
from offload_rt.tree.choose import N_RANKS, best_prefixes, choose, sizes_up_to
from offload_rt.tree.search import TreeTable, search
from offload_rt.tree.topology import DraftTree, Topology, Verdict

# A copied continuation is appended to a tree where its tokens are at least so likely, up to so many of them.
_NGRAM_RATE, _NGRAM_LENGTH = 0.5, 8


@dataclass
class Proposal:
    """A tree under way, and what is needed to learn from what becomes of it.

    expected  tokens, before the bias of expectations is corrected
    """

    builder: StaticTreeBuilder | DynamicTreeBuilder
    estimates: Estimates
    match: Match | None
    expected: float = 1.0


class TreeDrafter(Drafter):
    """Proposes trees by a draft model.

    is_dynamic  whether trees are grown by confidence, or of a chosen shape: at temperature 0, and above
    """

    _dynamic: type[DynamicTreeBuilder] = DynamicTreeBuilder
    _static: type[StaticTreeBuilder] = StaticTreeBuilder
    _n_ranks = N_RANKS

    def __init__(self, parts: DraftParts, is_dynamic: tuple[bool, bool]) -> None:
        assert parts.model is not None, "it drafts by a model"
        self._model, self._cost, self.limits = parts.model, parts.cost, parts.limits
        self._child_sampling, self._coupled_up_to = parts.child_sampling, parts.coupled_up_to
        self._shape, self.pair_stats, self._learner = parts.shape, parts.pair_stats, parts.learner
        self.n_predicted = parts.learner.n_predicted if parts.learner else 0
        self._is_dynamic = is_dynamic
        self._tables: dict[str, tuple[TreeTable, int]] = {}  # and at how many observations to search anew
        self._rates = MatchRates()
        self._proposals: dict[Sequence, Proposal] = {}

    def begin(self, sequence: Sequence, cache: int, n_nodes: int) -> None:
        """Let the model see the sequence's cache."""
        self._model.begin(sequence, cache, n_nodes)

    def propose(self, sequences: Several[Sequence], n_nodes: int) -> list[DraftTree]:
        """One tree for each sequence, of at most `n_nodes` nodes."""
        started = time.perf_counter()
        begun = {sequence: self._start_tree(sequence, n_nodes, len(sequences)) for sequence in sequences}
        self._proposals = {sequence: one for sequence, one in begun.items() if one is not None}
        n_grown = self._grow([one.builder for one in self._proposals.values()])
        failed = {sequence: error for sequence, one in self._proposals.items() if (error := one.builder.state.error)}
        for sequence, error in failed.items():
            del self._proposals[sequence]
            warnings.warn(f"nothing is drafted where {error}", RuntimeWarning, stacklevel=2)  # once, as Python does
        sizes = self._sizes(sequences, time.perf_counter() - started)
        trees = [self._finish_tree(one, n_nodes, size) for one, size in zip(sequences, sizes, strict=True)]
        self._cost.drafted(n_grown, time.perf_counter() - started, len(sequences))
        return trees

    def learn(self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None) -> None:
        """Keep count of what was accepted, and let the draft learn what the target predicts along that path."""
        if self._learner is not None and predicted is not None:
            nodes = [0, *verdict.path]
            self._learner.add(sequence, TopTokens(predicted.tokens[nodes], predicted.probs[nodes]))
            self.n_predicted = self._learner.n_predicted
        proposal = self._proposals.get(sequence)
        if proposal is None:
            return
        after = [*tree.tokens[list(verdict.path)].tolist(), verdict.bonus]
        proposal.estimates.bias.observe(proposal.expected, len(after))
        if proposal.match is not None:
            self._rates.observe(proposal.match, after)
        proposal.builder.learn([0, *verdict.path], after)

    def observe(self, sequence: Sequence, first: int, states: Several[Tensor]) -> None:
        """Hand the target's hidden states to the head."""
        self._model.observe(sequence, first, states)

    def leave(self, sequence: Sequence) -> None:
        """Let the draft learn from the rest of the text."""
        if self._learner is not None:
            self._learner.end(sequence)

    def follow(self, old: Sequence, new: Sequence, n: int) -> int:
        """Let the model go on."""
        return self._model.follow(old, new, n)

    def end(self, sequence: Sequence) -> None:
        """Release the draft's cache of a sequence."""
        self._proposals.pop(sequence, None)
        self._model.end(sequence)

    def save(self) -> None:
        """Keep what was learned of the pair."""
        self.pair_stats.save()
        if self._learner is not None:
            self._learner.save()

    def estimates_at(self, temperature: float) -> Estimates:
        """What is known of the kind of tree it proposes at a temperature."""
        kind = self._kind(temperature)
        return self.pair_stats.at(f"coupled-{kind}" if self._is_coupled(temperature) else kind, temperature)

    def _kind(self, temperature: float) -> str:
        is_sampled = temperature > 0 and not self._is_coupled(temperature)
        if self._is_dynamic[is_sampled]:
            return "dynamic"
        return self._child_sampling if is_sampled else "deterministic"

    def _is_coupled(self, temperature: float) -> bool:
        """Whether the noise of the sequence decides what is proposed, so that chance is left to nothing as at temperature 0."""
        return 0 < temperature <= self._coupled_up_to

    def _grow(self, builders: Several[StaticTreeBuilder | DynamicTreeBuilder]) -> int:
        """Let trees grow to their end; returns their levels, for each of which a pass was made."""
        return self._model.grow(builders)

    def _start_tree(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> Proposal | None:
        """None where there is nothing to draft."""
        n_levels, n_rows = min(self.limits.n_levels, sequence.n_left, self._model.max_levels), n_nodes
        if n_nodes == 1 or n_levels == 1 or not self._model.can_draft(sequence):
            return None
        temperature = sequence.temperature
        kind, estimates, n_coupled = self._kind(temperature), self.estimates_at(temperature), 0
        if self._is_coupled(temperature):
            n_coupled, temperature = n_levels - 1, 0.0
        match = self._likely_match(sequence, min(n_levels - 1, n_nodes - 2))
        copied = match.tokens if match else ()
        n_nodes -= len(copied)
        if kind == "dynamic":
            state = self._model.start(sequence, n_rows, n_sequences == 1, n_coupled)
            pass_s = self._cost.seconds(np.array([n_sequences]), len(sequence.tokens), n_sequences=n_sequences)
            least_gain = self._cost.level(n_sequences) / float(pass_s[0])
            size = (n_nodes, n_levels)
            return Proposal(self._dynamic(state, size, temperature, estimates, copied, least_gain), estimates, match)
        topology, expected = self._choose(sequence, (n_nodes, n_levels, n_sequences))
        if len(topology) == 1:
            return None
        state = self._model.start(sequence, n_rows, n_sequences == 1, n_coupled)
        plan = StaticTree(topology, expected, kind, temperature, copied)
        return Proposal(self._static(state, plan, estimates.acceptance), estimates, match)

    def _finish_tree(self, sequence: Sequence, n_nodes: int, size: int) -> DraftTree:
        proposal = self._proposals.get(sequence)
        if proposal is None:
            return DraftTree.root_only(sequence.tokens[-1])
        tree = proposal.builder.tree(size)
        proposal.expected = tree.expected
        tree = append_ngram(tree, proposal.builder.copied, n_nodes)
        # One token for each level is the most that can come of it.
        expected = min(proposal.estimates.bias.corrected(tree.expected), tree.topology.n_levels)
        return replace(tree, expected=expected)

    def _sizes(self, sequences: Several[Sequence], draft_s: float) -> list[int]:
        """How many of the best nodes below each root to verify, of trees that were drafted in `draft_s`."""
        builders = [one.builder if (one := self._proposals.get(sequence)) else None for sequence in sequences]
        chances = [one.chances if one else np.empty(0) for one in builders]
        if self.limits.fixed_size:
            return [len(one) for one in chances]
        n_fixed = sum(one.n_fixed for one in builders if one)
        n, context = len(sequences), max(len(sequence.tokens) for sequence in sequences)
        return best_prefixes(chances, lambda n_rows: self._cost.seconds(n_fixed + n_rows, context, draft_s, n))

    def _choose(self, sequence: Sequence, most: tuple[int, int, int]) -> tuple[Topology, float]:
        """The shape with the least time for a token, and the tokens expected of it.

        most  nodes and levels it may have, and for how many sequences there is one in the pass
        """
        n_nodes, n_levels, n_sequences = most
        if self._shape is not None:
            parents, depths = self._shape.parents[:n_nodes], self._shape.depths[:n_nodes]
            return Topology(parents[depths < n_levels]), 1.0
        trees = self._trees(sequence.temperature)
        sizes = np.array([n_nodes]) if self.limits.fixed_size else sizes_up_to(n_nodes)
        draft_s = self._cost.level(n_sequences) * np.arange(n_levels)  # the last level needs no pass of the draft
        seconds = self._cost.seconds(n_sequences * sizes[:, None], len(sequence.tokens), draft_s, n_sequences)
        least_levels = n_levels if self.limits.fixed_depth else 1 + self.limits.fixed_size
        n_nodes, n_levels, _ = choose(trees.values[:, : n_levels + 1], sizes, seconds, least_levels)
        return trees.topology(n_nodes, n_levels), float(trees.values[n_nodes, n_levels])

    def _trees(self, temperature: float) -> TreeTable:
        """The best trees for what is known of acceptance, searched anew after 4, 8, 16 ... observations."""
        key, acceptance = f"{temperature:.1f}", self.estimates_at(temperature).acceptance
        if key not in self._tables or acceptance.n_seen >= self._tables[key][1]:
            # One token may be excluded from sampling, and no child can be drawn where no other is left.
            n_ranks = min(self._n_ranks, self.limits.n_nodes, self._model.vocab_size - 1)
            trees = search(acceptance.by_rank()[:n_ranks], self.limits.n_nodes, self.limits.n_levels)
            self._tables[key] = trees, max(2 * acceptance.n_seen, 4)
        return self._tables[key][0]

    def _likely_match(self, sequence: Sequence, n_next: int) -> Match | None:
        """The longest match, where its continuation is likely enough to be copied."""
        match = next(iter(find_matches(sequence.tokens, min(_NGRAM_LENGTH, n_next))), None)
        return match if match and match.tokens and self._rates.rate(match.n_equal) >= _NGRAM_RATE else None
