"""Trees that grow where the draft is confident: the nodes with the highest cumulative probability, whatever their place."""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from offload_rt.executor.cuda_graphs import Reduce
from offload_rt.speculate import child_sampling
from offload_rt.speculate.draft_model import TreeState
from offload_rt.speculate.pair_stats import Estimates
from offload_rt.speculate.protocols import ROWS_PER_NODE
from offload_rt.tree.topology import DraftTree, Topology

# Candidates that one node may bring in.
_N_CHILDREN = 32
# A round computes the waiting nodes among this part of the tree; the next part only when none waits there.
_SHARES = (1 / 8, 1 / 4, 1 / 2, 1)


@dataclass(frozen=True)
class _Nodes:
    """The root and other nodes, the most probable first; a parent stands before its children.

    chances  (m,) probability that each is accepted, by the calibrated draft
    parents  (m,) places of their parents, -1 for the root's
    tokens   (m,)
    depths   (m,) 0 for the root
    rows     (m,) of the draft's cache, -1 where none was computed
    """

    chances: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray
    depths: np.ndarray
    rows: np.ndarray

    def joined(self, more: "_Nodes", n: int) -> "_Nodes":
        """The n most probable of both; `more` names its parents by their places here."""
        both = [np.concatenate(pair) for pair in zip(vars(self).values(), vars(more).values(), strict=True)]
        # A child is never more probable than its parent, and stands behind it where they are equal.
        order = np.argsort(-both[0], kind="stable")[:n]
        chances, parents, tokens, depths, rows = (part[order] for part in both)
        place = np.full(len(both[0]) + 1, -1)
        place[order] = np.arange(len(order))
        return _Nodes(chances, place[parents], tokens, depths, rows)


@dataclass(eq=False)
class DynamicTreeBuilder:
    """A tree that grows in rounds until no candidate can enter it, or until a round costs more than it brings.

    size         (number of nodes, of levels) of the tree at most, the root's included
    temperature  at which the draft's probabilities are taken
    copied       tokens that once followed the sequence's last ones, to be appended
    least_gain   tokens that a round must promise, for each that the tree promises already
    """

    state: TreeState
    size: tuple[int, int]
    temperature: float
    estimates: Estimates
    copied: tuple[int, ...]
    least_gain: float
    n_fixed: ClassVar[int] = 0

    def __post_init__(self) -> None:
        root, (self._n_nodes, self._n_levels) = np.array([0]), self.size
        self._nodes = _Nodes(np.ones(1), root - 1, np.array(self.state.tokens), root, root.copy())
        self._expanded = root  # places whose logits come next
        self._seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # row -> its candidates' tokens and probabilities

    @property
    def reduce(self) -> Reduce:
        """The candidates of each node and their probabilities."""
        k = min(_N_CHILDREN, self._n_nodes - 1)
        return child_sampling.MostProbable(k, self.state.vocab_size, self.temperature or 1.0)

    def choose(self, out: Tensor) -> Tensor:
        """They are all taken."""
        return out

    def take(self, chosen: Tensor) -> None:
        """Let the children of the nodes computed last compete; those that enter are computed next."""
        k = chosen.shape[1] // 2
        tokens, values = child_sampling.unpacked(chosen, k)
        now, above, probabilities = self._nodes, self._expanded, values.astype(np.float64)
        self._seen.update(zip(now.rows[above].tolist(), zip(tokens, probabilities, strict=True), strict=True))
        more = _Nodes(
            chances=(now.chances[above, None] * self.estimates.calibration.chances(probabilities)).ravel(),
            parents=above.repeat(k),
            tokens=tokens.ravel(),
            depths=now.depths[above].repeat(k) + 1,
            rows=np.full(tokens.size, -1),
        )
        self._nodes = now.joined(more, self._n_nodes)
        self._expand()

    def _expand(self) -> None:
        """Add the rows of the nodes to be computed next, the best first: behind them others may drop out uncomputed."""
        now, self._expanded = self._nodes, np.array([], dtype=np.int64)
        waiting = np.flatnonzero((now.rows < 0) & (now.depths < self._n_levels - 1))
        if now.chances[waiting].sum() < self.least_gain * now.chances.sum():
            return
        ahead = (waiting[waiting <= share * self._n_nodes] for share in _SHARES)
        places = next((some for some in ahead if len(some)), waiting)
        places = places[: ROWS_PER_NODE * self._n_nodes - len(self.state.tokens)]
        now.rows[places] = self._add(now.rows[now.parents[places]].tolist(), now.tokens[places].tolist())
        self._expanded = places

    @property
    def chances(self) -> np.ndarray:
        """(m,) of the candidates, descending."""
        return self._nodes.chances[1:]

    def _add(self, parents: list[int], tokens: list[int]) -> Several[int]:
        """Rows for these nodes."""
        return self.state.add(parents, tokens)

    def tree(self, size: int) -> DraftTree:
        """The root and so many of its best candidates."""
        best = self._nodes = _Nodes(*(part[: 1 + size] for part in vars(self._nodes).values()))
        return DraftTree(
            Topology(best.parents), torch.from_numpy(best.tokens.copy()), expected=float(best.chances.sum())
        )

    def learn(self, path: list[int], after: list[int]) -> None:
        """Compare the draft's candidates along the accepted path, the root first, with the tokens that came after."""
        rows = self._nodes.rows[[node for node in path if node < len(self._nodes.rows)]]
        for row, token in zip(rows.tolist(), after, strict=False):
            if row in self._seen:
                tokens, probabilities = self._seen[row]
                hit = next(iter(np.flatnonzero(tokens == token).tolist()), None)
                self.estimates.calibration.observe(probabilities, hit)
                self.estimates.acceptance.observe(len(tokens), hit)
