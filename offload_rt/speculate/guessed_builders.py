"""TriForce's middle trees: a smaller draft guesses rows to save passes of an expensive model."""

from collections import abc
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from offload_rt.cost.tree_size import Acceptance
from offload_rt.ops import reference
from offload_rt.speculate import child_sampling
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.residual import ResidualRule
from offload_rt.speculate.rows import ROWS_PER_NODE
from offload_rt.speculate.static_builder import StaticTree, StaticTreeBuilder
from offload_rt.speculate.tree_state import DraftState
from offload_rt.tree.topology import DraftTree, Verdict

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

    def tip(self, n_max: int) -> tuple[list[int], int]:
        """Return the path to the most probable pending node, and the number of tokens to guess."""
        nodes = self._nodes
        node = self._tip()
        n_levels_left = self._n_levels - 2 - int(nodes.depths[node])
        n_rows_left = ROWS_PER_NODE * self._n_nodes - len(self.state.tokens)
        return [*self._path(node)], min(n_max, n_levels_left, n_rows_left)

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
            super().extend(
                torch.stack([self._outs[row] for row in self._nodes.rows[ready].tolist()])
            )

    def _ready(self) -> np.ndarray:
        """Return the nodes with a computed row whose children are not candidates yet."""
        rows = enumerate(self._nodes.rows.tolist())
        return np.array(
            [place for place, row in rows if 0 <= row < len(self._outs) and row not in self._seen],
            dtype=np.int64,
        )

    def _tip(self) -> int:
        """Return the most probable node without a computed row, or the root if there is none."""
        return int((self._nodes.rows >= len(self._outs)).argmax())

    def _add(self, parents: list[int], tokens: list[int]) -> abc.Sequence[int]:
        places = list(zip(parents, tokens, strict=True))
        for parent, token in places:
            if (parent, token) not in self._row_of:
                (self._row_of[parent, token],) = self.state.add([parent], [token])
        return [self._row_of[place] for place in places]


class ResampledChainBuilder(StaticTreeBuilder):
    """Chain drawn from the model's distributions by speculative sampling.

    Tokens of the smaller draft are verified against the model's distributions. Replacements for
    rejected tokens are drawn from the residual, so each token has exactly the stated
    distribution.
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

    def tip(self, n_max: int) -> tuple[list[int], int]:
        """Return the chain so far, and the number of tokens to guess below it."""
        n_left = len(self._tokens) - 2 - self._level
        return self._tokens[1 : self._level + 1].tolist(), min(n_max, n_left)

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
