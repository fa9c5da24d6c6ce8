"""Trees that grow where the draft is confident: the nodes with the highest cumulative probability, whatever their place."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offload_rt.speculate import child_sampling
from offload_rt.speculate.draft_model import ROWS_PER_NODE, DraftState
from offload_rt.tree.choose import Calibration
from offload_rt.tree.topology import DraftTree, Topology

# Candidates that one node may bring in.
_N_CHILDREN = 32
# A round computes what waits among this part of the places in the tree; the next part only when nothing waits there.
_SHARES = (1 / 8, 1 / 4, 1 / 2, 1)


@dataclass(frozen=True)
class Candidates:
    """Nodes below the root, the most probable first; a parent stands before its children.

    chances        (m,) with which each is accepted, as far as the draft knows
    probabilities  (m,) by the draft, given the parent
    parents        (m,) places of their parents, -1 for the root
    tokens         (m,)
    depths         (m,) 1 for a child of the root
    rows           (m,) of the draft's cache, -1 where none was computed
    """

    chances: np.ndarray
    probabilities: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray
    depths: np.ndarray
    rows: np.ndarray

    @classmethod
    def none(cls) -> "Candidates":
        """No candidate yet."""
        ints = np.zeros(0, dtype=np.int64)
        return cls(np.zeros(0), np.zeros(0), ints, ints, ints, ints)

    def joined(self, more: "Candidates", n: int) -> "Candidates":
        """The n most probable of both; `more` names its parents by their places here."""
        both = [np.concatenate(pair) for pair in zip(vars(self).values(), vars(more).values(), strict=True)]
        chances, probabilities, parents, tokens, depths, rows = both
        # A child is never more probable than its parent, and stands behind it where they are equal.
        order = np.argsort(-chances, kind="stable")[:n]
        new_place = np.full(len(chances) + 1, -1)
        new_place[order] = np.arange(len(order))
        return Candidates(
            chances[order],
            probabilities[order],
            new_place[parents[order]],
            tokens[order],
            depths[order],
            rows[order],
        )


class DynamicTreeBuilder:
    """A tree that grows in rounds until no candidate can enter it, or until a round costs more than it brings.

    n_nodes      of the tree at most, root included
    temperature  at which the draft's probabilities are taken
    worth        tokens that a round must promise, for each that the tree promises already
    """

    def __init__(
        self, state: DraftState, n_nodes: int, n_levels: int, temperature: float, calibration: Calibration, worth: float
    ) -> None:
        self.state, self._n_nodes, self._n_levels = state, n_nodes, n_levels
        self.temperature, self._calibration, self._worth = temperature, calibration, worth
        self._most_rows = ROWS_PER_NODE * n_nodes
        self._candidates = Candidates.none()
        self._expanded = np.array([-1])  # places whose logits come next; the root's is -1
        self.seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # row -> its candidates' tokens and probabilities

    def take(self, logits: Tensor) -> None:
        """Let the children of the nodes computed last compete; those that enter are computed next."""
        probs = child_sampling.probs_of(logits, self.temperature or 1.0)
        best = probs.topk(min(_N_CHILDREN, self._n_nodes - 1, probs.shape[-1]), dim=-1)
        probabilities, tokens = best.values.double().cpu().numpy(), best.indices.cpu().numpy()
        now = self._candidates
        places = self._expanded
        rows = np.where(places < 0, 0, now.rows[places] if len(now.rows) else 0)
        self.seen.update((int(row), pair) for row, *pair in zip(rows, tokens, probabilities, strict=True))
        above = np.where(places < 0, 1.0, now.chances[places] if len(now.rows) else 1.0)
        depths = np.where(places < 0, 1, now.depths[places] + 1 if len(now.rows) else 1)
        k = tokens.shape[1]
        chances = above[:, None] * self._calibration.chances(probabilities)
        more = Candidates(
            chances.ravel(),
            probabilities.ravel(),
            places.repeat(k),
            tokens.ravel(),
            depths.repeat(k),
            np.full(tokens.size, -1),
        )
        self._candidates = now.joined(more, self._n_nodes - 1)
        self._expand()

    def _expand(self) -> None:
        """Add the rows of the candidates to be computed next, the best first: behind them others may drop out uncomputed."""
        now = self._candidates
        waiting = np.flatnonzero((now.rows < 0) & (now.depths < self._n_levels - 1))
        if now.chances[waiting].sum() < self._worth * (1.0 + now.chances.sum()):
            return
        ahead = (waiting[waiting < share * self._n_nodes] for share in _SHARES)
        places = next((some for some in ahead if len(some)), waiting)
        places = places[: self._most_rows - len(self.state.tokens)]
        parents = now.parents[places]
        parent_rows = np.where(parents < 0, 0, now.rows[parents])
        now.rows[places] = self.state.add(parent_rows.tolist(), now.tokens[places].tolist())
        self._expanded = places

    def tree(self, size: Callable[[np.ndarray], int]) -> DraftTree:
        """The root and its best candidates.

        size  how many of nodes of these chances (m,), descending, are worth taking
        """
        now = self._candidates
        n = size(now.chances)
        parents = np.concatenate(([-1], now.parents[:n] + 1))
        tokens = np.concatenate((self.state.tokens[:1], now.tokens[:n]))
        expected = 1.0 + float(now.chances[:n].sum())
        return DraftTree(Topology(parents), torch.from_numpy(tokens), expected=expected)

    def rows_of(self, nodes: list[int]) -> list[int]:
        """The draft's rows of nodes of the tree, -1 where it computed none."""
        return [0 if node == 0 else int(self._candidates.rows[node - 1]) for node in nodes]
