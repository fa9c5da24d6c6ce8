"""TriForce (Sun et al. 2024): a small windowed draft model drafts for the self-drafting target.

The middle level is the target with a retrieval cache; it drafts for the target with its full cache.
The published code draws a replacement for a rejected middle token from the draft's distribution.
Here the replacement is drawn from the residual, so that each token has the distribution that
verification assumes.
"""

import time
from collections import abc
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from offload_rt.cost.tree_size import Acceptance
from offload_rt.executor.sequence import Sequence
from offload_rt.kv.sparse import RetrievalCache
from offload_rt.ops import reference
from offload_rt.speculate import child_sampling
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.protocols import SELF_SIZES, DrafterType, DraftParts, DraftResources
from offload_rt.speculate.residual import ResidualRule
from offload_rt.speculate.rows import ROWS_PER_NODE
from offload_rt.speculate.static_builder import StaticTree, StaticTreeBuilder
from offload_rt.speculate.text_drafter import Proposal
from offload_rt.speculate.tree_drafter import TreeDrafter
from offload_rt.speculate.tree_state import DraftState, Path
from offload_rt.tree.topology import DraftTree, Topology, Verdict

_RULE = ResidualRule(bottom_up=True, child_sampling="without_replacement")


class GuessedTreeBuilder(DynamicTreeBuilder):
    """Dynamic tree that reuses the rows of guessed nodes: the same tree in fewer passes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._row_of: dict[tuple[int, int], int] = {}  # (row of the parent, token) -> row
        self._outs: list[Tensor] = []  # output of each row

    @property
    def n_grown(self) -> int:
        """Levels computed so far."""
        return 1 + int(self._nodes.depths[self._nodes.rows >= 0].max())

    def tip(self, n_max: int) -> tuple[Path, int]:
        """Return the path to the most probable pending node, and the number of tokens to guess."""
        nodes = self._nodes
        node = self._tip()
        n_levels_left = self._n_levels - 2 - int(nodes.depths[node])
        n_rows_left = ROWS_PER_NODE * self._n_nodes - len(self.state.tokens)
        return self._path(node), min(n_max, n_levels_left, n_rows_left)

    def guess(self, tree: DraftTree) -> None:
        """Add a chain of guessed tokens below the tip to the next pass."""
        row = int(self._nodes.rows[self._tip()])
        for token in tree.tokens[1:].tolist():
            (row,) = self._add([row], [token])

    def extend(self, selected: Tensor) -> None:
        """Grow the tree as far as computed rows allow."""
        self._outs += selected
        while len(ready := self._ready()):
            self._expanded = ready
            rows = self._nodes.rows[ready].tolist()
            super().extend(torch.stack([self._outs[row] for row in rows]))

    def _ready(self) -> np.ndarray:
        rows = self._nodes.rows
        is_new = ~np.isin(rows, [*self._seen])
        return np.flatnonzero((rows >= 0) & (rows < len(self._outs)) & is_new)

    def _tip(self) -> int:
        """Return the most probable node without a computed row, or the root if there is none."""
        return int((self._nodes.rows >= len(self._outs)).argmax())

    def _add(self, parents: list[int], tokens: list[int]) -> abc.Sequence[int]:
        places = list(zip(parents, tokens, strict=True))
        for place in places:
            if place not in self._row_of:
                (self._row_of[place],) = self.state.add(place[:1], place[1:])
        return [self._row_of[place] for place in places]


class ResampledChainBuilder(StaticTreeBuilder):
    """Chain drawn from the model's distributions by speculative sampling.

    Tokens of the smaller draft are verified against the model's distributions. Replacements for
    rejected tokens are drawn from the residual, so each token has the stated distribution.
    """

    def __init__(self, state: DraftState, plan: StaticTree, acceptance: Acceptance) -> None:
        super().__init__(state, replace(plan, copied=()), acceptance)
        self._guessed = DraftTree.root_only(state.tokens[0])
        self._verdict = Verdict((), 0)
        self._rows = [0]  # rows of the last token and of the guesses below it

    @property
    def n_grown(self) -> int:
        """Levels computed so far."""
        return self._level

    def tip(self, n_max: int) -> tuple[Path, int]:
        """Return the chain so far, and the number of tokens to guess below it."""
        n_left = len(self._tokens) - 2 - self._level
        return tuple(self._tokens[1 : self._level + 1].tolist()), min(n_max, n_left)

    def guess(self, tree: DraftTree) -> None:
        """Set the chain to verify next."""
        for token in tree.tokens[1:].tolist():
            self._rows += self.state.add(self._rows[-1:], [token])
        self._guessed = tree

    def select(self, out: Tensor) -> Tensor:
        """Verify the guesses; without a guess, draw a token."""
        logits = child_sampling.fitted(out, self.state.vocab_size)
        probs = reference.probs_of(logits, self._plan.temperature)
        self._verdict = _RULE.verify(self._guessed, probs, self.state.sequence)
        self._keep(probs[: len(self._verdict.path) + 1])
        return child_sampling.packed(probs[:, :0], probs[:, :1])

    def extend(self, selected: Tensor) -> None:
        """Append the accepted tokens and the bonus token; the bonus row is computed next."""
        child_sampling.unpacked(selected, 0)
        n = len(self._verdict.path)
        bonus = self._verdict.bonus
        self._tokens[self._level + 1 : self._level + n + 1] = self._guessed.tokens[1 : n + 1]
        self._level += n + 1
        self._tokens[self._level] = bonus
        if self._level < len(self._tokens) - 1:
            self._rows = [*self.state.add([self._rows[n]], [bonus])]
            self._guessed = DraftTree.root_only(bonus)


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
        types = GuessedTreeBuilder | ResampledChainBuilder
        guessing = [builder for builder in builders if isinstance(builder, types)]
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
            n_coupled = 0 if builder.state.noise is None else n
            is_chain = isinstance(builder, ResampledChainBuilder)
            kind = "without_replacement" if is_chain else "deterministic"
            is_alone = len(growing) == 1
            state = self._small.start(sequence, 1 + _N_GUESSES, is_alone, n_coupled, path)
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
