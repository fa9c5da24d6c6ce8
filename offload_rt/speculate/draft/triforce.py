"""A small draft with a window drafts for the target with a retrieval cache, which drafts for the target with all of its cache.

Sun et al. 2024. What the middle one rejects the published code draws again from the draft's distribution; here it is drawn from
the residual, so that a token has the distribution that verification is told.
"""

import time
from collections.abc import Sequence as Several

from offload_rt.executor.sequence import Sequence
from offload_rt.kv.chosen import RetrievalCache
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.guessed_builders import GuessedTreeBuilder, ResampledChainBuilder
from offload_rt.speculate.protocols import SELF_SIZES, DrafterType, DraftParts
from offload_rt.speculate.static_builder import StaticTree, StaticTreeBuilder
from offload_rt.speculate.tree_drafter import Proposal, TreeDrafter
from offload_rt.tree.choose import Acceptance
from offload_rt.tree.topology import Topology

# Tokens that the small draft guesses for a pass of the middle one, and that it sees of the text.
_N_GUESSES, _CONTEXT = 2, 256
# Trees are grown without guesses where these cost more than the passes that they save; one of so many is grown the other way,
# to compare. And the weight of the newest tree in what a level takes.
_TRIAL, _NEWEST = 8, 0.25


class TriForce(TreeDrafter):
    """Grows trees by the middle one's confidence where no chance decides or its noise is known; else it draws chains."""

    _dynamic, _static = GuessedTreeBuilder, ResampledChainBuilder
    _n_ranks = 1

    def __init__(self, parts: DraftParts) -> None:
        super().__init__(parts, is_dynamic=(True, False))
        assert parts.small is not None, "it has two models"
        self._small, self._n_trees = parts.small, 0
        self._level_s = [0.0, 0.0]  # without guesses, and with them

    def end(self, sequence: Sequence) -> None:
        """Release both caches of a sequence."""
        self._small.end(sequence)
        super().end(sequence)

    def _start_tree(self, sequence: Sequence, n_nodes: int, n_sequences: int) -> Proposal | None:
        """None also where not even a chain pays."""
        n_levels = min(self.limits.n_levels, sequence.n_left)
        is_chosen = self.limits.fixed_size or n_levels < 2 or n_nodes < 2
        if not is_chosen and len(self._choose(sequence, (n_nodes, n_levels, n_sequences))[0]) == 1:
            return None
        return super()._start_tree(sequence, n_nodes, n_sequences)

    def _grow(self, builders: Several[StaticTreeBuilder | DynamicTreeBuilder]) -> int:
        mine = [one for one in builders if isinstance(one, GuessedTreeBuilder | ResampledChainBuilder)]
        if not mine:
            return 0
        self._n_trees += 1
        guesses = (self._level_s[True] <= self._level_s[False]) != (self._n_trees % _TRIAL == 0)
        started = time.perf_counter()
        self._model.grow(mine, self._guess if guesses else None)
        n_levels = max(one.n_grown for one in mine)  # in fewer passes
        self._level_s[guesses] += _NEWEST * ((time.perf_counter() - started) / n_levels - self._level_s[guesses])
        return n_levels

    def _guess(self, growing: Several[GuessedTreeBuilder | ResampledChainBuilder]) -> None:
        """Add to the next pass what the small draft guesses of each tree; not to the first, which computes what is lacking."""
        begun = []
        for builder in growing:
            path, n = builder.tip(_N_GUESSES)
            if n < 1 or builder.state.lacking:
                continue
            sequence, is_coupled = builder.state.sequence, builder.state.noise is not None
            kind = "without_replacement" if isinstance(builder, ResampledChainBuilder) else "deterministic"
            state = self._small.start(sequence, 1 + _N_GUESSES, len(growing) == 1, n * is_coupled, path)
            plan = StaticTree(Topology.chain(1 + n), 1.0, kind, sequence.temperature)
            begun.append((builder, StaticTreeBuilder(state, plan, Acceptance())))
        self._small.grow([small for _, small in begun])
        for builder, small in begun:
            if small.state.error is None:
                builder.guess(small.tree(small.n_fixed))


DRAFTER = DrafterType(
    TriForce, needs_model=True, gives_draft_probs=True, best_rule="coupled", default_sizes=SELF_SIZES,
    view=RetrievalCache, view_rows=4096, draft_context=_CONTEXT,
)  # fmt: skip
