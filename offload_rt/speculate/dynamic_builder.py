"""Dynamic trees: grow the nodes with the highest cumulative draft probability."""

from collections import abc
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from offload_rt.executor.cuda_graphs import Reduce
from offload_rt.speculate import child_sampling
from offload_rt.speculate.pair_stats import Estimates
from offload_rt.speculate.recycler import RecycledCandidates
from offload_rt.speculate.rows import ROWS_PER_NODE
from offload_rt.speculate.tree_state import TreeState
from offload_rt.tree.topology import DraftTree, Topology

# Maximum candidates per expanded node.
_N_CHILDREN = 32
# A round expands the pending nodes in the first non-empty share of the tree, best nodes first.
_SHARES = (1 / 8, 1 / 4, 1 / 2, 1)


@dataclass(frozen=True)
class RoundCost:
    """Costs that decide whether a round of drafting pays.

    level_s  seconds of a round
    pass_s   (n_nodes,) seconds of a pass whose trees have 1, 2, ... nodes each
    """

    level_s: float
    pass_s: np.ndarray

    def best(self, chances: np.ndarray, n_rounds: int = 0) -> tuple[int, float]:
        """Return the last node and the tokens per second of the best prefix of a tree.

        chances   (m,) of the nodes, descending, the root first
        n_rounds  rounds of drafting
        """
        chances = chances[: len(self.pass_s)]
        rates = chances.cumsum() / (self.pass_s[: len(chances)] + n_rounds * self.level_s)
        last = int(rates.argmax())
        return last, float(rates[last])

    def pays_at_root(self, acceptance: np.ndarray, n_levels: int) -> bool:
        """Return whether a first round of `n_levels` pays, by the acceptance of children."""
        levels = [np.ones(1)]
        for _ in range(n_levels):
            levels.append(_descending(np.outer(levels[-1], acceptance))[: len(self.pass_s)])
        return self.best(_descending(np.concatenate(levels)), 1)[1] >= self.best(np.ones(1))[1]

    def least_worth(self, chances: np.ndarray, waiting: np.ndarray, n_rounds: int) -> float:
        """Return the least chance of a waiting node whose child pays; above 1 if no round pays.

        chances   (m,) of the nodes, descending, the root first
        waiting   (n,) chances of the nodes without drafted children
        n_rounds  completed rounds

        A child is as likely as its parent.
        """
        after = _descending(np.append(chances, waiting))
        last, rate = self.best(after, n_rounds + 1)
        return float(after[last]) if rate >= self.best(chances, n_rounds)[1] else np.inf

    def n_worth(self, chances: np.ndarray) -> int:
        """Return how many nodes below the root maximize the tokens per second, without drafting.

        chances  (m,) of the nodes, descending; m < n_nodes
        """
        return self.best(np.append(1.0, chances))[0]


def _descending(chances: np.ndarray) -> np.ndarray:
    """Return all values in descending order."""
    return -np.sort(-chances, axis=None)


@dataclass(frozen=True)
class _Nodes:
    """Nodes by descending probability, the root first; a parent precedes its children.

    chances  (m,) calibrated acceptance probability of each node
    parents  (m,) indices of the parents, -1 for the root
    tokens   (m,)
    depths   (m,) 0 for the root
    rows     (m,) rows in the draft's cache, -1 if not computed
    """

    chances: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray
    depths: np.ndarray
    rows: np.ndarray

    def merged(self, new: "_Nodes", n: int) -> "_Nodes":
        """Return the n most probable nodes of both sets; parents of `new` index into `self`."""
        columns = [
            np.concatenate(pair)
            for pair in zip(vars(self).values(), vars(new).values(), strict=True)
        ]
        # A child never exceeds its parent's probability; stable sorting keeps it behind its parent.
        order = np.argsort(-columns[0], kind="stable")[:n]
        chances, parents, tokens, depths, rows = (part[order] for part in columns)
        place = np.full(len(columns[0]) + 1, -1)
        place[order] = np.arange(len(order))
        return _Nodes(chances, place[parents], tokens, depths, rows)


@dataclass(eq=False)
class DynamicTreeBuilder:
    """Grow a tree in rounds until no candidate enters it or a round costs more than it gains.

    size         (maximum nodes, maximum levels), including the root
    temperature  temperature of the draft's probabilities
    copied       copied continuation to append
    cost         decides which nodes are expanded
    """

    state: TreeState
    size: tuple[int, int]
    temperature: float
    estimates: Estimates
    copied: tuple[int, ...]
    cost: RoundCost
    n_fixed: ClassVar[int] = 0

    def __post_init__(self) -> None:
        # Further candidates: earlier predictions of the target.
        self.recycled: RecycledCandidates | None = None
        self._n_nodes, self._n_levels = self.size
        root = np.array([0])
        self._nodes = _Nodes(np.ones(1), root - 1, np.array(self.state.tokens), root, root.copy())
        self._expanded = root  # nodes of the next logits
        self._n_rounds = 0
        # Tokens and probabilities of the candidates below each row.
        self._seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def reduce(self) -> Reduce:
        """Select the candidates below each node and their probabilities."""
        k = min(_N_CHILDREN, self._n_nodes - 1)
        return child_sampling.MostProbable(k, self.state.vocab_size, self.temperature or 1.0)

    def select(self, out: Tensor) -> Tensor:
        """Return all candidates."""
        return out

    def extend(self, selected: Tensor) -> None:
        """Merge the children of the latest nodes; children that enter are computed next."""
        k = selected.shape[1] // 2
        tokens, values = child_sampling.unpacked(selected, k)
        self._n_rounds += 1
        nodes = self._nodes
        parents = self._expanded
        probabilities = values.astype(np.float64)
        candidates = zip(tokens, probabilities, strict=True)
        self._seen.update(zip(nodes.rows[parents].tolist(), candidates, strict=True))
        calibration = self._estimates_of(int(nodes.rows[parents[0]])).calibration
        is_possible = probabilities > 0  # a grammar excludes tokens
        above = np.broadcast_to(parents[:, None], tokens.shape)[is_possible]
        children = _Nodes(
            chances=nodes.chances[above] * calibration.chances(probabilities)[is_possible],
            parents=above,
            tokens=tokens[is_possible],
            depths=nodes.depths[above] + 1,
            rows=np.full(len(above), -1),
        )
        if self.recycled is not None:
            children = self._with_recycled(children)
        self._nodes = nodes.merged(children, self._n_nodes)
        self._expand()

    def _with_recycled(self, children: _Nodes) -> _Nodes:
        """Add recycled children of the expanded nodes; equal tokens keep the higher chance."""
        assert self.recycled is not None, "candidates exist"
        places = zip(children.parents.tolist(), children.tokens.tolist(), strict=True)
        place_of = {place: i for i, place in enumerate(places)}
        new: list[tuple[float, int, int]] = []
        for parent in self._expanded.tolist():
            above = float(self._nodes.chances[parent])
            row = int(self._nodes.rows[parent])
            for token, p in self.recycled.below(row, self._path(parent)):
                i = place_of.get((parent, token))
                if i is None:
                    new.append((above * p, parent, token))
                else:
                    children.chances[i] = max(children.chances[i], above * p)
        if not new:
            return children
        chances, parents, tokens = zip(*new, strict=True)
        above_nodes = np.array(parents)
        more = _Nodes(
            chances=np.array(chances),
            parents=above_nodes,
            tokens=np.array(tokens),
            depths=self._nodes.depths[above_nodes] + 1,
            rows=np.full(len(new), -1),
        )
        columns = zip(vars(children).values(), vars(more).values(), strict=True)
        return _Nodes(*(np.concatenate(pair) for pair in columns))

    def _path(self, node: int) -> tuple[int, ...]:
        """Return the tokens below the root up to a node."""
        path: list[int] = []
        while node > 0:
            path.append(int(self._nodes.tokens[node]))
            node = int(self._nodes.parents[node])
        return tuple(path[::-1])

    def _expand(self) -> None:
        """Add rows of the nodes to compute next, best first.

        Lower-ranked pending nodes may drop out without being computed.
        """
        nodes = self._nodes
        self._expanded = np.array([], dtype=np.int64)
        waiting = np.flatnonzero((nodes.rows < 0) & (nodes.depths < self._n_levels - 1))
        places = self._next_round(waiting)
        places = places[: ROWS_PER_NODE * self._n_nodes - len(self.state.tokens)]
        nodes.rows[places] = self._add(
            nodes.rows[nodes.parents[places]].tolist(), nodes.tokens[places].tolist()
        )
        self._expanded = places

    def _next_round(self, waiting: np.ndarray) -> np.ndarray:
        """Return the nodes to compute next, or none if a round costs more than it gains."""
        chances = self._nodes.chances
        least = self.cost.least_worth(chances, chances[waiting], self._n_rounds)
        return self._best(waiting[chances[waiting] >= least])

    def _best(self, waiting: np.ndarray) -> np.ndarray:
        """Return the waiting nodes in the first non-empty share of the tree."""
        parts = (waiting[waiting <= share * self._n_nodes] for share in _SHARES)
        return next((part for part in parts if len(part)), waiting)

    def _estimates_of(self, row: int) -> Estimates:
        """Return the estimates for the distribution of a row."""
        return self.estimates

    @property
    def chances(self) -> np.ndarray:
        """(m,) candidate probabilities, descending."""
        return self._nodes.chances[1:]

    def _add(self, parents: list[int], tokens: list[int]) -> abc.Sequence[int]:
        """Return the rows of these nodes."""
        return self.state.add(parents, tokens)

    def tree(self, size: int) -> DraftTree:
        """Return the root and its `size` best candidates."""
        best = self._nodes = _Nodes(*(part[: 1 + size] for part in vars(self._nodes).values()))
        return DraftTree(
            Topology(best.parents),
            torch.from_numpy(best.tokens.copy()),
            expected=float(best.chances.sum()),
        )

    def learn(self, path: list[int], after: list[int]) -> None:
        """Compare the candidates along the accepted path, root first, with the actual tokens."""
        rows = self._nodes.rows[[node for node in path if node < len(self._nodes.rows)]]
        for row, token in zip(rows.tolist(), after, strict=False):
            if self.recycled is not None:
                self.recycled.observe(row, token)
            if row in self._seen:
                tokens, probabilities = self._seen[row]
                hit = next(iter(np.flatnonzero(tokens == token).tolist()), None)
                estimates = self._estimates_of(row)
                estimates.calibration.observe(probabilities, hit)
                estimates.acceptance.observe(len(tokens), hit)
