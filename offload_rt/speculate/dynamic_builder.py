"""Dynamic trees: grow the nodes with the highest cumulative draft probability."""

from collections import abc
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from offload_rt.cost.tree_size import TRUST
from offload_rt.executor.cuda_graphs import Reduce
from offload_rt.speculate import child_sampling
from offload_rt.speculate.pair_stats import Estimates
from offload_rt.speculate.recycler import TextCandidates, TextGrowth
from offload_rt.speculate.rows import ROWS_PER_NODE
from offload_rt.speculate.tree_state import TreeState
from offload_rt.tree.topology import DraftTree, Topology, path_up

# Maximum candidates per expanded node.
_N_CHILDREN = 32
# Initial sizes of a growing tree, least and most. A tree doubles while more than half of its nodes
# are worth a row. The initial size is below this cost, in plain passes.
_FIRST_SIZES = (4, 16)
_FIRST_COST = 1.5
# Maximum nodes whose text candidates are considered before the first round and after each.
# The draft replaces unlikely candidates.
_MOST_OPENED = (1024, 32)
# A round expands the pending nodes in the first non-empty share of the tree, best nodes first.
_SHARES = (1 / 8, 1 / 4, 1 / 2, 1)
# Nodes of a level whose acceptance is forecast.
_N_FORECAST = 64
# Drafting may cost this factor by the forecast, which is not more precise: drafted trees teach the
# statistics. A round of a streamed model costs less.
_FREE = 1.01


@dataclass(frozen=True)
class RoundCost:
    """Costs that decide whether a round of drafting pays.

    level_s  seconds of a round
    pass_s   (n_nodes,) seconds of a pass whose trees have 1, 2, ... nodes each
    """

    level_s: float
    pass_s: np.ndarray

    @cached_property
    def n_first(self) -> int:
        """Initial nodes of a growing tree."""
        least, most = _FIRST_SIZES
        n_cheap = np.searchsorted(self.pass_s[:most], _FIRST_COST * self.pass_s[0])
        return max(int(n_cheap), least)

    @cached_property
    def least_child(self) -> float:
        """Least chance of the best child of a root whose tree may pay: its nodes have no more."""
        later = self.pass_s[1:] / self.pass_s[0] - 1
        return float((later / np.arange(1, len(self.pass_s))).min(initial=np.inf)) / TRUST

    def best(self, chances: np.ndarray, n_rounds: int = 0) -> tuple[int, float]:
        """Return the last node and the tokens per second of the best prefix of a tree.

        chances   (m,) of the nodes, descending, the root first
        n_rounds  rounds of drafting
        """
        chances = chances[: len(self.pass_s)]
        rates = chances.cumsum() / (self.pass_s[: len(chances)] + n_rounds * self.level_s)
        last = int(rates.argmax())
        return last, float(rates[last])

    def pays_at_root(
        self, chances: np.ndarray, missed: np.ndarray, acceptance: np.ndarray, n_levels: int
    ) -> bool:
        """Return whether rounds of `n_levels` levels pay, by the acceptance of children.

        chances  (m,) of the nodes without drafting, descending, the root first
        missed   (levels,) chance that these nodes miss the token of each level below the root

        The draft's candidates are as likely to be correct where the nodes miss a token.
        """
        least = self.best(chances)[1] / _FREE
        drafted = np.ones(1)
        rates = [0.0]
        for depth, chance in enumerate(missed, 1):
            drafted = _descending(np.outer(drafted, acceptance))[:_N_FORECAST]
            chances = np.append(chances, chance * drafted)
            if depth % n_levels == 0 or depth == len(missed):
                rates.append(self.best(_descending(chances), -(-depth // n_levels))[1])
                if rates[-1] >= least or rates[-1] < rates[-2]:
                    break
        return rates[-1] >= least

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


def _descending(chances: np.ndarray) -> np.ndarray:
    return -np.sort(-chances, axis=None)


@dataclass(frozen=True)
class _Nodes:
    """Nodes by descending probability, the root first; a parent precedes its children.

    chances  (m,) calibrated acceptance probability of each node
    parents  (m,) indices of the parents, -1 for the root
    tokens   (m,)
    depths   (m,) 0 for the root
    rows     (m,) rows in the draft's cache, -1 if not computed
    is_open  (m,) whether the text's candidates below the node were added
    """

    chances: np.ndarray
    parents: np.ndarray
    tokens: np.ndarray
    depths: np.ndarray
    rows: np.ndarray
    is_open: np.ndarray

    @classmethod
    def below(
        cls, chances: np.ndarray, parents: np.ndarray, tokens: np.ndarray, depths: np.ndarray
    ) -> "_Nodes":
        """Return new nodes, neither computed nor open."""
        rows = np.full(len(parents), -1)
        return cls(chances, parents, tokens, depths, rows, rows >= 0)

    def raise_to(self, places: np.ndarray, least: np.ndarray) -> None:
        """Raise chances to at least `least`, and scale the chances of the descendants."""
        ratios = np.ones(len(self.chances))
        ratios[places] = np.maximum(least / self.chances[places], 1.0)
        if not (ratios > 1).any():
            return
        above = np.maximum(self.parents, 0)  # the root has a ratio of 1
        while above.any():  # products over paths of 2, 4, ... nodes
            ratios *= ratios[above]
            above = above[above]
        np.multiply(self.chances, ratios, out=self.chances)
        # Rounding must not put a child above its parent.
        above = np.maximum(self.parents, 0)
        while above.any():
            np.minimum(self.chances, self.chances[above], out=self.chances)
            above = above[above]

    def merged(self, new: "_Nodes", n: int) -> "_Nodes":
        """Return the n most probable nodes; parents of `new` index into both sets, `self` first."""
        columns = [*map(np.concatenate, zip(vars(self).values(), vars(new).values(), strict=True))]
        # A child never exceeds its parent's probability; stable sorting keeps it behind its parent.
        order = np.argsort(-columns[0], kind="stable")[:n]
        chances, parents, *others = (part[order] for part in columns)
        place = np.full(len(columns[0]) + 1, -1)
        place[order] = np.arange(len(order))
        return _Nodes(chances, place[parents], *others)

    def first(self, n: int) -> "_Nodes":
        """Return the n most probable nodes."""
        return _Nodes(*(part[:n] for part in vars(self).values()))


@dataclass(eq=False)
class DynamicTreeBuilder:
    """Grow a tree in rounds until no candidate enters it or a round costs more than it gains.

    size         maximum nodes, levels, and levels by the draft, each including the root
    temperature  temperature of the draft's probabilities
    text         candidates that need no drafting
    cost         decides which nodes are expanded
    """

    state: TreeState
    size: tuple[int, int, int]
    temperature: float
    estimates: Estimates
    text: TextCandidates
    cost: RoundCost
    n_fixed: ClassVar[int] = 0
    copied: ClassVar[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        self._n_nodes, self._n_levels, self._n_drafted = self.size
        self._room = min(self.cost.n_first, self._n_nodes)
        root = np.array([0])
        tokens = np.array(self.state.tokens)
        self._nodes = _Nodes(np.ones(1), root - 1, tokens, root, root.copy(), root > 0)
        self._expanded = root  # nodes of the next logits
        self._n_rounds = 0
        # Tokens and probabilities of the candidates below each row.
        self._seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        # The text's candidates below the root, and their chances.
        self._first = np.empty(0, dtype=np.int64), np.empty(0)
        self._add_text()

    @property
    def reduce(self) -> Reduce:
        """Reduction of logits to the candidates below each node and their probabilities."""
        k = min(_N_CHILDREN, self._n_nodes - 1)
        return child_sampling.MostProbable(k, self.state.vocab_size, self.temperature or 1.0)

    def select(self, out: Tensor) -> Tensor:
        """Return all candidates."""
        return out

    def extend(self, selected: Tensor) -> None:
        """Merge the children of the latest nodes; if a round pays, children that enter are next."""
        k = selected.shape[1] // 2
        tokens, values = child_sampling.unpacked(selected, k)
        self._n_rounds += 1
        nodes = self._nodes
        parents = self._expanded
        nodes.is_open[parents] = True
        probabilities = values.astype(np.float64)
        rows = nodes.rows[parents].tolist()
        self._seen.update(zip(rows, zip(tokens, probabilities, strict=True), strict=True))
        calibration = self._estimates_of(rows[0]).calibration
        is_possible = probabilities > 0  # a grammar excludes tokens
        above = np.broadcast_to(parents[:, None], tokens.shape)[is_possible]
        chances = nodes.chances[above] * calibration.chances(probabilities)[is_possible]
        tokens = tokens[is_possible]
        # Equal tokens of the text keep the higher chance.
        n = self.state.vocab_size
        keys = above * n + tokens, nodes.parents * n + nodes.tokens
        _, new, old = np.intersect1d(*keys, assume_unique=True, return_indices=True)
        nodes.raise_to(old, chances[new])
        above, chances, tokens = (np.delete(part, new) for part in (above, chances, tokens))
        children = _Nodes.below(chances, above, tokens, nodes.depths[above] + 1)
        self._nodes = nodes.merged(children, self._n_nodes)
        while self._grows(self._nodes.chances):
            pass
        self._nodes = self._nodes.first(self._room)
        self._add_text()
        self._expand()

    def _add_text(self) -> None:
        """Add the text's candidates below closed nodes, as far as they enter the tree."""
        if not self._n_rounds:
            _, tokens, chances = self.text.below([()])
            self._first = tokens, chances
            if chances.max(initial=0.0) < self.cost.least_child:
                return
        nodes = self._nodes
        closed = np.flatnonzero(~nodes.is_open)
        others = nodes.chances[nodes.is_open]
        given = nodes.chances[closed], nodes.depths[closed]
        growth = TextGrowth(self.text, self._n_levels, *given, lambda i: self._path(closed[i]))
        n_most = _MOST_OPENED[min(self._n_rounds, 1)]
        growth.grow(self._room, others, n_most)
        while self._grows(np.concatenate((others, growth.chances[growth.is_opened]))):
            growth.grow(self._room, others, n_most)
        nodes.is_open[closed] = growth.is_opened[: len(closed)]
        added = len(closed) + np.flatnonzero(growth.is_opened[len(closed) :])
        if len(added):
            places = np.full(len(growth.chances), -1)
            places[: len(closed)] = closed
            places[added] = len(nodes.chances) + np.arange(len(added))
            parents, tokens = places[growth.parents[added]], growth.tokens[added]
            new = _Nodes.below(growth.chances[added], parents, tokens, growth.depths[added])
            new.is_open[:] = True
            self._nodes = nodes.merged(new, self._room)

    def _grows(self, chances: np.ndarray) -> bool:
        """Double the tree's size if more than half of its nodes, by `chances`, are worth a row."""
        best = _descending(chances)[: self._room]
        if self._room == self._n_nodes or self.cost.best(best, self._n_rounds)[0] < self._room // 2:
            return False
        self._room = min(2 * self._room, self._n_nodes)
        return True

    def _path(self, node: int) -> tuple[int, ...]:
        return tuple(self._nodes.tokens[path_up(self._nodes.parents, node)].tolist())

    def _expand(self) -> None:
        """Add rows of the nodes to compute next, best first.

        Lower-ranked pending nodes may drop out without being computed.
        """
        nodes = self._nodes
        is_next = (nodes.rows < 0) & (nodes.rows[nodes.parents] >= 0)
        waiting = np.flatnonzero(is_next & (nodes.depths < self._n_drafted - 1))
        n_left = ROWS_PER_NODE * self._n_nodes - len(self.state.tokens)
        places = self._expanded = self._next_round(waiting)[:n_left]
        above = nodes.rows[nodes.parents[places]]
        nodes.rows[places] = self._add(above.tolist(), nodes.tokens[places].tolist())

    def _next_round(self, waiting: np.ndarray) -> np.ndarray:
        """Return the nodes to compute next, or none if a round costs more than it gains."""
        nodes = self._nodes
        below = np.bincount(nodes.parents[1:], nodes.chances[1:], len(nodes.chances))
        # Drafting adds at most a node's chance less those of its children.
        gains = np.maximum(nodes.chances - below, 0.0)[waiting]
        least = self.cost.least_worth(nodes.chances, gains, self._n_rounds)
        return self._best(waiting[gains >= least])

    def _best(self, waiting: np.ndarray) -> np.ndarray:
        parts = (waiting[waiting <= share * self._n_nodes] for share in _SHARES)
        return next((part for part in parts if len(part)), waiting)

    def _estimates_of(self, row: int) -> Estimates:
        return self.estimates

    def pays(self, n_levels: int) -> bool:
        """Return whether rounds of `n_levels` levels pay, by the acceptance of children."""
        nodes = self._nodes
        found = np.bincount(nodes.depths, nodes.chances, self._n_drafted)[1 : self._n_drafted]
        acceptance = self.estimates.acceptance.by_rank()
        missed = np.maximum(1 - found, 0.0)
        return self.cost.pays_at_root(nodes.chances, missed, acceptance, n_levels)

    @property
    def chances(self) -> np.ndarray:
        """(m,) candidate probabilities, descending."""
        return self._nodes.chances[1:]

    def _add(self, parents: list[int], tokens: list[int]) -> abc.Sequence[int]:
        return self.state.add(parents, tokens)

    def tree(self, size: int) -> DraftTree:
        """Return the root and its `size` best candidates; `learn` considers no others."""
        best = self._nodes = self._nodes.first(1 + size)
        tokens = torch.from_numpy(best.tokens.copy())
        return DraftTree(Topology(best.parents), tokens, expected=float(best.chances.sum()))

    def learn(self, path: list[int], after: list[int]) -> None:
        """Compare the candidates along the accepted path, root first, with the actual tokens."""
        self.text.learn(after)
        if self._n_drafted == 1:  # the acceptance of the text alone
            tokens, chances = self._first
            ranked = tokens[np.argsort(-chances)].tolist()
            rank = ranked.index(after[0]) if after[0] in ranked else None
            self.estimates.acceptance.observe(len(ranked), rank)
        rows = self._nodes.rows[[node for node in path if node < len(self._nodes.rows)]]
        for row, token in zip(rows.tolist(), after, strict=False):
            if row in self._seen:
                tokens, probabilities = self._seen[row]
                hit = next(iter(np.flatnonzero(tokens == token).tolist()), None)
                estimates = self._estimates_of(row)
                estimates.calibration.observe(probabilities, hit)
                estimates.acceptance.observe(len(tokens), hit)
