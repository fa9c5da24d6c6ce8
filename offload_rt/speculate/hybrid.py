"""Grown trees with drawn children: where the target wants none of the probable tokens, a drawn one may still be right.

A skeleton of given nodes grows as in `_dynamic`. Then every computed node of it may get one child drawn from what its given
children leave of the draft's law, with a subtree below. Its size is fixed before its token is drawn, and by the skeleton alone,
which no draw has touched; so whether a node exists never depends on a draw.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offload_rt.speculate import child_sampling
from offload_rt.speculate.draft_model import Growth
from offload_rt.speculate.dynamic_builder import Candidates, DynamicSapling
from offload_rt.tree.choose import Calibration
from offload_rt.tree.search import TreeTable
from offload_rt.tree.topology import DraftTree, Draws, Topology

# Most nodes below one drawn token, itself counted.
_MOST_BELOW = 32


@dataclass(frozen=True)
class Drawing:
    """What drawn children are made by.

    trees      the best subtrees for the acceptance of nodes below drawn ones
    worth_of   what the mass left to a drawn child is worth as a chance of acceptance
    size       how many of nodes of these chances (m,), descending, are worth taking
    """

    trees: TreeTable
    worth_of: Calibration
    size: Callable[[np.ndarray], int]


class HybridSapling(DynamicSapling):
    """A grown tree whose computed nodes may each have one drawn child with a subtree; see the file."""

    def __init__(
        self,
        growth: Growth,
        n_nodes: int,
        n_levels: int,
        temperature: float,
        calibration: Calibration,
        worth: float,
        drawing: Drawing,
    ) -> None:
        super().__init__(growth, n_nodes, n_levels, temperature, calibration, worth)
        self._most_rows = n_nodes  # as many again are left for the subtrees
        self._drawing = drawing
        self._laws: list[Tensor] = []
        self._built: _Built | None = None

    def take(self, logits: Tensor) -> None:
        """Grow the skeleton, and when it is done the subtrees of drawn children, level by level."""
        law = child_sampling.law_of(logits, self.temperature)
        self._laws.append(law)
        if self._built is not None:
            self._built.grow(law, self.growth)
            return
        self._compete(law)
        if len(self.growth.tokens) == self.growth.n_done:
            self._built = self._build()
            self._built.draw(torch.cat(self._laws), self.growth)

    def tree(self, size: Callable[[np.ndarray], int]) -> DraftTree:
        """The whole tree; its size was settled when its drawn children were."""
        built = self._built
        draws = Draws(built.drawn, torch.cat(self._laws), built.rows) if built.drawn.any() else None
        return DraftTree(built.topology, torch.from_numpy(built.tokens), draws, built.expected)

    @property
    def n_given(self) -> int:
        """Nodes of the skeleton, the root included."""
        return self._built.n_given

    def rows_of(self, nodes: list[int]) -> list[int]:
        """The draft's rows of nodes of the tree, -1 where it computed none."""
        return self._built.rows[nodes].tolist()

    def left_at(self, node: int) -> float:
        """The mass of the draft's law that a node of the skeleton leaves to its drawn child."""
        return float(self._built.left[node])

    def _build(self) -> "_Built":
        """Weigh given nodes against nodes below drawn children, by what each adds to the expected tokens."""
        now, drawing = self._candidates, self._drawing
        rows = np.concatenate(([0], now.rows))
        levels_below = self._n_levels - 1 - np.concatenate(([0], now.depths))
        chances = np.concatenate(([1.0], now.chances))
        left = _mass_left(now, len(now.chances))
        may_draw = (rows >= 0) & (levels_below > 0)
        first = np.where(may_draw, chances * drawing.worth_of.chances(left), 0.0)
        values = drawing.trees.values
        most = min(_MOST_BELOW, len(values) - 1)
        # What each further node below a drawn token adds; never more than the one before it.
        reach = np.clip(levels_below, 0, values.shape[1] - 1)
        added = np.minimum.accumulate(np.diff(values[: most + 1, reach], axis=0))
        gains = np.concatenate((now.chances, (first * added).T.ravel()))
        order = np.argsort(-gains, kind="stable")[: self._n_nodes - 1]
        order = order[: drawing.size(gains[order])]
        n_kept = int((order < len(now.chances)).sum())
        n_below = np.bincount((order[order >= len(now.chances)] - len(now.chances)) // most, minlength=len(rows))
        expected = 1.0 + float(gains[order].sum())
        shapes = [
            (node, drawing.trees.topology(int(n), min(int(levels_below[node]), values.shape[1] - 1)))
            for node, n in enumerate(n_below)
            if n > 0
        ]
        tokens = np.concatenate((self.growth.tokens[:1], now.tokens[:n_kept]))
        parents = np.concatenate(([-1], now.parents[:n_kept] + 1))
        return _Built(parents, tokens, rows[: n_kept + 1], shapes, _mass_left(now, n_kept), expected)


class _Built:
    """A finished shape: the skeleton, then the subtrees of the drawn children, whose tokens are still to be found."""

    def __init__(
        self,
        parents: np.ndarray,
        tokens: np.ndarray,
        rows: np.ndarray,
        shapes: list[tuple[int, Topology]],
        left: np.ndarray,
        expected: float,
    ) -> None:
        self.n_given, self.left, self.expected = len(parents), left, expected
        at = self.n_given
        below, roots = [], []
        for node, shape in shapes:
            below.append(np.concatenate(([node], shape.parents[1:] + at)))
            roots.append(at)
            at += len(shape)
        self.topology = Topology(np.concatenate((parents, *below)))
        self._roots = np.array(roots, dtype=np.int64)
        self.tokens = np.concatenate((tokens, np.zeros(at - self.n_given, dtype=np.int64)))
        self.rows = np.concatenate((rows, np.full(at - self.n_given, -1)))
        n_children = np.bincount(self.topology.parents[1:], minlength=at)
        is_drawn = self.topology.ranks == np.minimum(n_children[self.topology.parents] - 1, 1)
        self.drawn = np.where(np.arange(at) < self.n_given, False, is_drawn)
        self.drawn[self._roots] = True
        self._wave = self._roots

    def draw(self, laws: Tensor, growth: Growth) -> None:
        """Draw the children of the skeleton, each from its parent's law without the parent's given children."""
        if not len(self._roots):
            return
        above = self.topology.parents[self._roots]
        law = laws[self.rows[above]]
        given = [
            (i, int(self.tokens[child]))
            for i, node in enumerate(above)
            for child in self.topology.children[node]
            if child < self.n_given
        ]
        struck = torch.zeros_like(law, dtype=torch.bool)
        rows, tokens = torch.tensor(given, dtype=torch.int64).reshape(-1, 2).T.to(law.device)
        struck[rows, tokens] = True
        drawn = child_sampling.without_replacement(law, 1, growth.generator, struck)
        self.tokens[self._roots] = drawn[:, 0].cpu().numpy()
        self._compute(self._roots, growth)

    def grow(self, law: Tensor, growth: Growth) -> None:
        """Give the children of the nodes computed last their tokens."""
        children = [self.topology.children[node] for node in self._wave]
        counts = torch.tensor([len(siblings) for siblings in children])
        found = child_sampling.hybrid(law, counts, growth.generator).cpu().numpy()
        for siblings, tokens in zip(children, found, strict=True):
            self.tokens[list(siblings)] = tokens[: len(siblings)]
        self._compute(np.array([child for siblings in children for child in siblings]), growth)

    def _compute(self, nodes: np.ndarray, growth: Growth) -> None:
        """Ask for the logits of those of these nodes that have children."""
        inner = np.array([node for node in nodes if self.topology.children[node]], dtype=np.int64)
        self._wave = inner
        rows = growth.add(self.rows[self.topology.parents[inner]].tolist(), self.tokens[inner].tolist())
        self.rows[inner] = rows


def _mass_left(candidates: Candidates, n_kept: int) -> np.ndarray:
    """(n + 1,) what the first `n_kept` candidates leave of their parents' laws; the root's is first."""
    left = np.ones(n_kept + 1)
    np.subtract.at(left, candidates.parents[:n_kept] + 1, candidates.probabilities[:n_kept])
    return left.clip(0.0, 1.0)
