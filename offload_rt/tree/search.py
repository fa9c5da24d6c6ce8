"""The tree of drafted tokens from which the verifier is expected to accept most (Sequoia, Chen et al. 2024)."""

from dataclasses import dataclass

import numpy as np

from offload_rt.tree.topology import Topology


@dataclass(frozen=True, eq=False)
class TreeTable:
    """The best trees for every number of nodes and of levels; levels count the root's.

    acceptance  (ranks,) float64: probability that the child of a rank is accepted, given that its parent was
    values      (n_nodes + 1, max_levels + 1) float64: expected tokens of the best tree of at most so many; row and
                column 0 are 0
    """

    acceptance: np.ndarray
    values: np.ndarray

    def topology(self, n: int, levels: int) -> Topology:
        """The best tree of at most n nodes, in level order; fewer where more do not fit or would add nothing.

        Siblings are adjacent and in the order of their ranks, families in the order of their parents.
        """
        from offload_rt.tree.search_kernel import branched

        assert 1 <= n < self.values.shape[0] and 1 <= levels < self.values.shape[1], "past what was searched"
        parents, budgets, start = [-1], [n], 0
        for level in range(levels - 1):
            first, start, asked, budgets = start, len(parents), budgets, []
            if not asked:
                break
            below = self.values[: max(asked) + 1, levels - level - 1]
            values = branched(below, self.acceptance)
            for node, budget in enumerate(asked, first):
                shares = _shares(values, below, self.acceptance, budget)
                parents += [node] * len(shares)
                budgets += shares
        return Topology(np.array(parents, dtype=np.int64))


def search(acceptance: np.ndarray, n_nodes: int, max_levels: int) -> TreeTable:
    """The best trees of up to so many nodes and levels, the root's level counted; `acceptance` as of `TreeTable`."""
    from offload_rt.tree.search_kernel import branched

    assert n_nodes >= 1 and max_levels >= 1, "a tree has a root"
    assert acceptance.ndim == 1 and len(acceptance) > 0, "acceptance is (ranks,)"
    assert ((acceptance >= 0) & (acceptance <= 1)).all(), "acceptance is a probability"
    values = np.zeros((max_levels + 1, n_nodes + 1))
    values[1, 1:] = 1
    for levels in range(2, max_levels + 1):
        values[levels] = branched(values[levels - 1], acceptance).max(axis=0)
    return TreeTable(acceptance, values.T)


def expected_tokens(topology: Topology, acceptance: np.ndarray) -> float:
    """Tokens a pass over this tree is expected to give; children past the last rank are never accepted."""
    by_rank = np.pad(acceptance, (0, len(topology)))
    accepted = np.ones(len(topology))
    for node in range(1, len(topology)):
        accepted[node] = accepted[topology.parents[node]] * by_rank[topology.ranks[node]]
    return float(accepted.sum())


def _shares(values: np.ndarray, below: np.ndarray, row: np.ndarray, n: int) -> list[int]:
    """How many of n nodes the subtree of each child gets; arguments as of `branched`, whose choices are made once more."""
    shares = []
    for b in range(int(values[:, n].argmax()), 0, -1):
        shares.append(1 + int((values[b - 1, n - 1 : b - 1 : -1] + row[b - 1] * below[1 : n - b + 1]).argmax()))
        n -= shares[-1]
    return shares[::-1]
