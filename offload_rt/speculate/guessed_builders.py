"""Trees of a model that costs much, grown in fewer passes: a smaller draft guesses which rows will be wanted (TriForce)."""

from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from offload_rt.speculate import child_sampling
from offload_rt.speculate.draft_model import DraftState
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.protocols import ROWS_PER_NODE
from offload_rt.speculate.residual import ResidualRule
from offload_rt.speculate.static_builder import StaticTree, StaticTreeBuilder
from offload_rt.tree.choose import Acceptance
from offload_rt.tree.topology import DraftTree, Verdict

_RULE = ResidualRule(bottom_up=True, child_sampling="without_replacement")


class GuessedTreeBuilder(DynamicTreeBuilder):
    """A tree that grows by confidence. A node that was guessed has its row already: the tree is the same in fewer passes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._row_of: dict[tuple[int, int], int] = {}  # by the row of the parent and the token
        self._outs: list[Tensor] = []  # by row

    @property
    def n_grown(self) -> int:
        """Levels that the passes so far have brought."""
        return 1 + int(self._nodes.depths[self._nodes.rows >= 0].max())

    def tip(self, n_most: int) -> tuple[list[int], int]:
        """The path to the most probable of the nodes that are computed next, and how many tokens to guess below it."""
        now, node, path = self._nodes, self._tip(), []
        n = min(
            n_most, self._n_levels - 2 - int(now.depths[node]), ROWS_PER_NODE * self._n_nodes - len(self.state.tokens)
        )
        while node > 0:
            path.append(int(now.tokens[node]))
            node = int(now.parents[node])
        return path[::-1], n

    def guess(self, tree: DraftTree) -> None:
        """Have a chain below the tip computed, too."""
        row = int(self._nodes.rows[self._tip()])
        for token in tree.tokens[1:].tolist():
            (row,) = self._add([row], [token])

    def take(self, chosen: Tensor) -> None:
        """Go on as long as rows of nodes are there."""
        self._outs += chosen
        while len(ready := self._ready()):
            self._expanded = ready
            super().take(torch.stack([self._outs[row] for row in self._nodes.rows[ready].tolist()]))

    def _ready(self) -> np.ndarray:
        """Places of nodes that are computed and have not brought in their children."""
        rows = enumerate(self._nodes.rows.tolist())
        return np.array(
            [place for place, row in rows if 0 <= row < len(self._outs) and row not in self._seen], dtype=np.int64
        )

    def _tip(self) -> int:
        """The most probable node that is not computed; the root where there is none, since other rows are of no use now."""
        return int((self._nodes.rows >= len(self._outs)).argmax())

    def _add(self, parents: list[int], tokens: list[int]) -> Several[int]:
        places = list(zip(parents, tokens, strict=True))
        for parent, token in places:
            if (parent, token) not in self._row_of:
                (self._row_of[parent, token],) = self.state.add([parent], [token])
        return [self._row_of[place] for place in places]


class ResampledChainBuilder(StaticTreeBuilder):
    """A chain drawn from the model's distributions by speculative sampling.

    Tokens drawn by the smaller draft are verified by the model's distributions, and what is rejected is drawn again from the
    residual. So every token has the distribution that is stated for it.
    """

    def __init__(self, state: DraftState, plan: StaticTree, acceptance: Acceptance) -> None:
        super().__init__(state, replace(plan, copied=()), acceptance)
        self._guessed, self._verdict = DraftTree.root_only(state.tokens[0]), Verdict((), 0)
        self._rows = [0]  # of the last token, and of those guessed below it

    @property
    def n_grown(self) -> int:
        """Levels that the passes so far have brought."""
        return self._level

    def tip(self, n_most: int) -> tuple[list[int], int]:
        """The chain so far, and how many tokens to guess below it."""
        return self._tokens[1 : self._level + 1].tolist(), min(n_most, len(self._tokens) - 2 - self._level)

    def guess(self, tree: DraftTree) -> None:
        """Verify this chain next."""
        for token in tree.tokens[1:].tolist():
            self._rows += self.state.add(self._rows[-1:], [token])
        self._guessed = tree

    def choose(self, out: Tensor) -> Tensor:
        """Verify what was guessed; where that is nothing, draw a token."""
        probs = child_sampling.probs_of(child_sampling.fitted(out, self.state.vocab_size), self._plan.temperature)
        self._verdict = _RULE.verify(self._guessed, probs, self.state.sequence)
        self._keep(probs[: len(self._verdict.path) + 1])
        return child_sampling.packed(probs[:, :0], probs[:, :1])

    def take(self, chosen: Tensor) -> None:
        """Take what was accepted and the token after it, which is computed next."""
        child_sampling.unpacked(chosen, 0)
        n, bonus = len(self._verdict.path), self._verdict.bonus
        self._tokens[self._level + 1 : self._level + n + 1] = self._guessed.tokens[1 : n + 1]
        self._level += n + 1
        self._tokens[self._level] = bonus
        if self._level < len(self._tokens) - 1:
            self._rows = [*self.state.add([self._rows[n]], [bonus])]
            self._guessed = DraftTree.root_only(bonus)
