"""Drafters with a draft model: static trees shaped by the cost model, and dynamic trees."""

import time
import warnings
from collections import abc
from dataclasses import replace

import numpy as np
from torch import Tensor

from offload_rt.cost.tree_size import N_RANKS
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder, RoundCost
from offload_rt.speculate.ngrams import NgramMatch, find_matches
from offload_rt.speculate.pair_stats import Estimates
from offload_rt.speculate.predictions import N_PREDICTED
from offload_rt.speculate.protocols import DraftParts
from offload_rt.speculate.static_builder import StaticTree, StaticTreeBuilder
from offload_rt.speculate.text_drafter import Proposal, TextDrafter
from offload_rt.speculate.tree_state import TreeState
from offload_rt.tree.search import TreeTable, search
from offload_rt.tree.topology import DraftTree, Topology, Verdict

# A copied continuation is appended if its acceptance rate reaches `_NGRAM_RATE`, up to
# `_NGRAM_LENGTH` tokens whose rows pay.
_NGRAM_RATE = 0.5
_NGRAM_LENGTH = 8
# Where drafting does not pay, every 16th text length is drafted nevertheless.
_SAMPLED = 16
# Most missing tokens of a draft that the estimate of its rounds includes.
_FEW_MISSING = 16


class TreeDrafter(TextDrafter):
    """Propose trees with a draft model.

    is_dynamic  (at temperature 0, above): grow trees by confidence instead of a selected shape;
                candidates of the text compete with the draft for their nodes
    """

    _static: type[StaticTreeBuilder] = StaticTreeBuilder
    _n_ranks = N_RANKS
    _n_at_once = 1  # levels of a draft pass

    def __init__(self, parts: DraftParts, is_dynamic: tuple[bool, bool]) -> None:
        model = parts.self_model or parts.draft_model
        assert model is not None, "a tree drafter declares a model"
        super().__init__(parts, recycles=any(is_dynamic))
        self._model = model
        self._child_sampling = parts.child_sampling
        self._coupled_up_to = parts.coupled_up_to
        self._shape = parts.shape
        self._learner = parts.learner
        self._count_predicted()
        self._is_dynamic = is_dynamic
        # Tables, each with the number of observations that triggers a new search.
        self._tables: dict[str, tuple[TreeTable, int]] = {}
        # Of the latest proposal: seconds in which drafts started, most missing tokens of a draft.
        self._start_s, self._n_missing = 0.0, 0

    @property
    def may_pause(self) -> bool:
        """Whether no learner needs every pass."""
        return super().may_pause and self._learner is None

    def begin(self, sequence: Sequence, cache: int, n_nodes: int) -> None:
        self._model.begin(sequence, cache, n_nodes)

    def propose(self, sequences: abc.Sequence[Sequence], n_nodes: int) -> list[DraftTree]:
        self._start_s, self._n_missing = 0.0, 0
        return super().propose(sequences, n_nodes)

    def _draft(self, n_sequences: int) -> None:
        started = time.perf_counter()
        n_grown = self._grow([proposal.builder for proposal in self._proposals.values()])
        if self._n_missing <= _FEW_MISSING:  # a prompt is computed once
            rounds_s = self._start_s + time.perf_counter() - started
            self._cost.drafted(n_grown, rounds_s, n_sequences)
        for sequence, proposal in [*self._proposals.items()]:
            if error := proposal.builder.state.error:
                del self._proposals[sequence]
                # Python's warning filter shows it once.
                warnings.warn(f"drafting skipped: {error}", RuntimeWarning, stacklevel=3)

    def learn(
        self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None
    ) -> None:
        """Record acceptance; pass predictions on the accepted path to the learner."""
        if self._learner is not None and predicted is not None:
            nodes = [0, *verdict.path]
            self._learner.add(sequence, TopTokens(*(part[nodes] for part in predicted)))
            self._count_predicted()
        super().learn(sequence, tree, verdict, predicted)

    def _count_predicted(self) -> None:
        n_recycled = N_PREDICTED if self._recycles else 0
        self.n_predicted = max(n_recycled, self._learner.n_predicted if self._learner else 0)

    def observe(self, sequence: Sequence, first: int, states: abc.Sequence[Tensor]) -> None:
        self._model.observe(sequence, first, states)

    def leave(self, sequence: Sequence) -> None:
        """Train on the remaining text of a finished sequence."""
        if self._learner is not None:
            self._learner.end(sequence)

    def transfer(self, old: Sequence, new: Sequence, n: int) -> int:
        return self._model.transfer(old, new, n)

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._model.end(sequence)

    def save(self) -> None:
        super().save()
        if self._learner is not None:
            self._learner.save()

    def estimates_at(self, temperature: float) -> Estimates:
        prefix = "coupled-" if self._is_coupled(temperature) else ""
        return self.pair_stats.at(f"{prefix}{self._kind(temperature)}", temperature)

    def _kind(self, temperature: float) -> str:
        is_sampled = temperature > 0 and not self._is_coupled(temperature)
        if self._is_dynamic[is_sampled]:
            return "dynamic"
        return self._child_sampling if is_sampled else "deterministic"

    def _is_coupled(self, temperature: float) -> bool:
        """Return whether the sequence's noise replaces chance: then trees are deterministic."""
        return 0 < temperature <= self._coupled_up_to

    def _grow(self, builders: abc.Sequence[StaticTreeBuilder | DynamicTreeBuilder]) -> int:
        """Complete all trees; return the number of levels, at most a draft pass each."""
        return self._model.grow(builders)

    def _start_tree(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> Proposal | None:
        n_most = min(self.limits.n_levels, sequence.n_left)
        n_levels = min(n_most, self._model.max_levels)
        if n_nodes == 1 or n_levels == 1:
            return None
        can_draft = self._model.can_draft(sequence)
        kind = self._kind(sequence.temperature)
        is_coupled = self._is_coupled(sequence.temperature)
        temperature = 0.0 if is_coupled else sequence.temperature
        n_coupled = is_coupled * (n_levels - 1)
        cost = self._round_cost(sequence, n_nodes, n_sequences)
        if kind == "dynamic":
            proposal = self._text_tree(sequence, (n_nodes, n_most, n_levels), temperature, cost)
            builder = proposal.builder
            assert isinstance(builder, DynamicTreeBuilder), "see _text_tree"
            is_sample = self.limits.fixed_size or len(sequence.tokens) % _SAMPLED == 0
            if can_draft and (is_sample or builder.pays(self._n_at_once)):
                builder.state = self._start(sequence, n_nodes, n_sequences == 1, n_coupled)
            return proposal
        if not can_draft:
            return None
        match, copied = self._copied(sequence, min(n_levels - 1, n_nodes - 2), cost)
        bounds = n_nodes - len(copied), n_levels, n_sequences
        topology, expected = self._choose(sequence, bounds)
        if len(topology) == 1:
            return None
        state = self._start(sequence, n_nodes, n_sequences == 1, n_coupled)
        plan = StaticTree(topology, expected, kind, temperature, copied)
        estimates = self.estimates_at(sequence.temperature)
        return Proposal(self._static(state, plan, estimates.acceptance), estimates, match)

    def _start(self, sequence: Sequence, n_nodes: int, is_alone: bool, n_coupled: int) -> TreeState:
        """Start a tree of the draft model; record the time and the missing tokens."""
        started = time.perf_counter()
        state = self._model.start(sequence, n_nodes, is_alone, n_coupled)
        self._start_s += time.perf_counter() - started
        self._n_missing = max(self._n_missing, state.n_missing)
        return state

    def _choose(self, sequence: Sequence, bounds: tuple[int, int, int]) -> tuple[Topology, float]:
        """Select the topology with the least expected time per token.

        bounds  (maximum nodes, maximum levels, sequences in the pass)
        Returns the topology and its expected tokens per pass.
        """
        n_nodes, n_levels, n_sequences = bounds
        if self._shape is not None:
            is_kept = self._shape.depths[:n_nodes] < n_levels
            return Topology(self._shape.parents[:n_nodes][is_kept]), 1.0
        trees = self._trees(sequence.temperature)
        limits = replace(self.limits, n_nodes=n_nodes, n_levels=n_levels)
        choice = self._cost.best_tree(trees.values, limits, len(sequence.tokens), n_sequences)
        return trees.topology(choice.n_nodes, choice.n_levels), choice.n_tokens

    def _trees(self, temperature: float) -> TreeTable:
        """Return optimal trees for the current acceptance; search again at 4, 8, 16 ... samples."""
        key = f"{temperature:.1f}"
        acceptance = self.estimates_at(temperature).acceptance
        if key not in self._tables or acceptance.n_seen >= self._tables[key][1]:
            # Sampling may exclude a copied token, so at most `vocab_size - 1` children exist.
            n_nodes, n_levels = self.limits.n_nodes, self.limits.n_levels
            n_ranks = min(self._n_ranks, n_nodes, self._model.vocab_size - 1)
            trees = search(acceptance.by_rank()[:n_ranks], n_nodes, n_levels)
            self._tables[key] = trees, max(2 * acceptance.n_seen, 4)
        return self._tables[key][0]

    def _copied(
        self, sequence: Sequence, n_next: int, cost: RoundCost
    ) -> tuple[NgramMatch | None, tuple[int, ...]]:
        """Return the longest match if it is likely, and its tokens whose rows pay."""
        for match in find_matches(sequence, min(_NGRAM_LENGTH, n_next))[:1]:
            rate = self._recycler.rates.rate(match.n_equal)
            if match.tokens and rate >= _NGRAM_RATE:
                chances = rate ** np.arange(len(match.tokens) + 1)
                return match, match.tokens[: cost.best(chances)[0]]
        return None, ()
