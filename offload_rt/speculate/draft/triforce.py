"""TriForce (Sun et al. 2024): a small windowed draft model drafts for the self-drafting target.

The middle level is the target with a retrieval cache; it drafts for the target with its full cache.
The published code draws a replacement for a rejected middle token from the draft's distribution.
Here the replacement is drawn from the residual, so that each token has the distribution that
verification assumes.
"""

import time
from collections import abc

from offload_rt.cost.tree_size import Acceptance
from offload_rt.executor.sequence import Sequence
from offload_rt.kv.sparse import RetrievalCache
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.guessed_builders import GuessedTreeBuilder, ResampledChainBuilder
from offload_rt.speculate.protocols import (
    SELF_SIZES,
    DrafterType,
    DraftParts,
    DraftResources,
)
from offload_rt.speculate.static_builder import StaticTree, StaticTreeBuilder
from offload_rt.speculate.text_drafter import Proposal
from offload_rt.speculate.tree_drafter import TreeDrafter
from offload_rt.tree.topology import Topology

# Tokens that the small draft guesses per middle pass, and its context length.
_N_GUESSES = 2
_CONTEXT = 256
# Guesses are skipped while they cost more than the passes they save. Every `_TRIAL`-th tree uses
# the alternative for comparison. `_NEWEST` weighs the newest tree in the seconds per level.
_TRIAL = 8
_NEWEST = 0.25


class TriForce(TreeDrafter):
    """Grow dynamic trees at temperature 0 or with coupled noise; otherwise draw chains."""

    _dynamic = GuessedTreeBuilder
    _static = ResampledChainBuilder
    _n_ranks = 1

    def __init__(self, parts: DraftParts) -> None:
        super().__init__(parts, is_dynamic=(True, False))
        assert parts.draft_model is not None, "TriForce declares two draft models"
        self._small = parts.draft_model
        self._n_trees = 0
        self._level_s = [0.0, 0.0]  # without and with guesses

    def end(self, sequence: Sequence) -> None:
        """Release the draft caches of a sequence."""
        self._small.end(sequence)
        super().end(sequence)

    def _start_tree(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> Proposal | None:
        """Return None also if even a chain costs more time than it saves."""
        n_levels = min(self.limits.n_levels, sequence.n_left)
        is_chosen = self.limits.fixed_size or n_levels < 2 or n_nodes < 2
        if not is_chosen and len(self._choose(sequence, (n_nodes, n_levels, n_sequences))[0]) == 1:
            return None
        return super()._start_tree(sequence, n_nodes, n_sequences)

    def _grow(self, builders: abc.Sequence[StaticTreeBuilder | DynamicTreeBuilder]) -> int:
        guessing = [
            builder
            for builder in builders
            if isinstance(builder, GuessedTreeBuilder | ResampledChainBuilder)
        ]
        if not guessing:
            return 0
        self._n_trees += 1
        guesses = (self._level_s[True] <= self._level_s[False]) != (self._n_trees % _TRIAL == 0)
        started = time.perf_counter()
        self._model.grow(guessing, self._guess if guesses else None)
        n_levels = max(builder.n_grown for builder in guessing)  # at least the number of passes
        level_s = (time.perf_counter() - started) / n_levels
        self._level_s[guesses] += _NEWEST * (level_s - self._level_s[guesses])
        return n_levels

    def _guess(self, growing: abc.Sequence[GuessedTreeBuilder | ResampledChainBuilder]) -> None:
        """Add the small draft's guesses to the next pass.

        The first pass is excluded: it computes the tokens missing from the cache.
        """
        begun = []
        for builder in growing:
            path, n = builder.tip(_N_GUESSES)
            if n < 1 or builder.state.lacking:
                continue
            sequence = builder.state.sequence
            is_coupled = builder.state.noise is not None
            is_chain = isinstance(builder, ResampledChainBuilder)
            kind = "without_replacement" if is_chain else "deterministic"
            state = self._small.start(
                sequence, 1 + _N_GUESSES, len(growing) == 1, n * is_coupled, path
            )
            plan = StaticTree(Topology.chain(1 + n), 1.0, kind, sequence.temperature)
            begun.append((builder, StaticTreeBuilder(state, plan, Acceptance())))
        self._small.grow([small_builder for _, small_builder in begun])
        for builder, small_builder in begun:
            if small_builder.state.error is None:
                builder.guess(small_builder.tree(small_builder.n_fixed))


DRAFTER = DrafterType(
    TriForce,
    gives_draft_probs=True,
    best_rule="coupled",
    default_sizes=SELF_SIZES,
    resources=DraftResources(
        needs_model=True, draft_context=_CONTEXT, view=RetrievalCache, view_rows=4096
    ),
)
