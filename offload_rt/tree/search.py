"""The tree of drafted tokens from which the verifier is expected to take most (Sequoia, Chen et al. 2024)."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from offload_rt.system.files import read_cached, write_cached
from offload_rt.tree.topology import Topology

_CACHE, _VERSION, _MOST_CACHED = "trees.json", 1, 32


@dataclass(frozen=True, eq=False)
class TreeTable:
    """The best trees for every number of nodes and of levels; levels count the root's.

    acceptance  (rows, ranks) float64, see `search`
    values      (n_nodes + 1, max_levels + 1) float64: expected tokens of the best tree of at most so many; row and
                column 0 are 0. With more than one row of acceptance only the last column is of whole trees
    """

    acceptance: np.ndarray
    values: np.ndarray

    def expected(self, n: int, levels: int) -> float:
        """Tokens a pass over the best tree of at most n nodes on at most so many levels is expected to give."""
        self._check(n, levels)
        return float(self.values[n, levels])

    def topology(self, n: int, levels: int) -> Topology:
        """The best tree of at most n nodes, in level order; fewer where more do not fit or would add nothing.

        Siblings are adjacent and in the order of their ranks, families in the order of their parents.
        """
        from offload_rt.tree.programme import branched

        self._check(n, levels)
        parents, budgets, start = [-1], [n], 0
        for level in range(levels - 1):
            first, start, asked, budgets = start, len(parents), budgets, []
            if not asked:
                break
            below, row = self.values[: max(asked) + 1, levels - level - 1], _row(self.acceptance, level)
            values = branched(below, row)
            for node, budget in enumerate(asked, first):
                shares = _shares(values, below, row, budget)
                parents += [node] * len(shares)
                budgets += shares
        return Topology(np.array(parents, dtype=np.int64))

    def _check(self, n: int, levels: int) -> None:
        n_nodes, max_levels = self.values.shape[0] - 1, self.values.shape[1] - 1
        assert 1 <= n <= n_nodes and 1 <= levels <= max_levels, "past what was searched"
        assert len(self.acceptance) == 1 or levels == max_levels, "acceptance by level: search anew for fewer levels"


def search(acceptance: np.ndarray, n_nodes: int, max_levels: int) -> TreeTable:
    """The best trees of up to so many nodes and levels, the root's level counted.

    acceptance  (ranks,) or (rows, ranks) float64: probability that the verifier takes the child of a rank, given that
                its parent was taken; a row for each level of the parent, the root's first, the last for all further
    """
    from offload_rt.tree.programme import branched

    assert n_nodes >= 1 and max_levels >= 1, "a tree has a root"
    acceptance = _rows(acceptance)
    values = np.zeros((max_levels + 1, n_nodes + 1))
    values[1, 1:] = 1
    for levels in range(2, max_levels + 1):
        row = _row(acceptance, max_levels - levels)
        values[levels] = branched(values[levels - 1], row).max(axis=0)
    return TreeTable(acceptance, values.T)


def best_tree(acceptance: np.ndarray, n_nodes: int, max_levels: int) -> tuple[Topology, float]:
    """The best tree within these limits and its expected tokens, kept between runs; arguments as of `search`."""
    rows = _rows(acceptance)
    key = hashlib.sha256(repr((rows.shape, n_nodes, max_levels)).encode() + rows.tobytes()).hexdigest()
    known = read_cached(_CACHE, _VERSION)
    if (found := _restore(known.get(key), rows, n_nodes, max_levels)) is not None:
        return found
    table = search(rows, n_nodes, max_levels)
    topology, expected = table.topology(n_nodes, max_levels), table.expected(n_nodes, max_levels)
    kept = [item for item in known.items() if item[0] != key][1 - _MOST_CACHED :]
    write_cached(_CACHE, _VERSION, dict(kept) | {key: {"parents": topology.parents.tolist(), "expected": expected}})
    return topology, expected


def expected_tokens(topology: Topology, acceptance: np.ndarray) -> float:
    """Tokens a pass over this tree is expected to give; children past the last rank are never taken.

    acceptance  as of `search`
    """
    rows = _rows(acceptance)
    rows = np.pad(rows, ((0, 0), (0, max(int(topology.ranks.max()) + 1 - rows.shape[1], 0))))
    taken = np.ones(len(topology))
    for node in range(1, len(topology)):
        parent = topology.parents[node]
        taken[node] = taken[parent] * _row(rows, topology.depths[parent])[topology.ranks[node]]
    return float(taken.sum())


def _rows(acceptance: np.ndarray) -> np.ndarray:
    """(rows, ranks) float64, checked."""
    rows = np.atleast_2d(np.ascontiguousarray(acceptance, dtype=np.float64))
    assert rows.ndim == 2 and rows.size > 0, "acceptance is (ranks,) or (rows, ranks)"
    assert ((rows >= 0) & (rows <= 1)).all(), "acceptance is a probability"
    return rows


def _row(rows: np.ndarray, level: int) -> np.ndarray:
    return rows[min(level, len(rows) - 1)]


def _shares(values: np.ndarray, below: np.ndarray, row: np.ndarray, n: int) -> list[int]:
    """How many of n nodes each child's subtree gets; arguments as of `branch`, whose choices are made once more."""
    shares = []
    for b in range(int(values[:, n].argmax()), 0, -1):
        shares.append(1 + int((values[b - 1, n - 1 : b - 1 : -1] + row[b - 1] * below[1 : n - b + 1]).argmax()))
        n -= shares[-1]
    return shares[::-1]


def _restore(entry: Any, rows: np.ndarray, n_nodes: int, max_levels: int) -> tuple[Topology, float] | None:
    """The tree of a cache entry; None if there is none or it is damaged: no tree, too large, or not worth what it says."""
    match entry:
        case {"parents": [-1, *parents], "expected": float(expected)} if len(parents) < n_nodes:
            if not all(type(parent) is int and 0 <= parent <= i for i, parent in enumerate(parents)):
                return None
            topology = Topology(np.array([-1, *parents], dtype=np.int64))
            fits = topology.depths.max() < max_levels and parents == sorted(parents)
            return (topology, expected) if fits and math.isclose(expected_tokens(topology, rows), expected) else None
    return None
