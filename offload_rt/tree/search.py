"""The tree of drafted tokens from which the verifier is expected to accept most (Sequoia, Chen et al. 2024)."""

from dataclasses import dataclass

import numpy as np

from offload_rt.tree.topology import Topology


@dataclass(frozen=True, eq=False)
class TreeTable:
    """The best trees for every number of nodes and of levels; levels count the root's.

    chances  (m,) float64: probability that the verifier takes a node of the largest tree, the root first, in level order
    parents  (m,) int64: of these nodes, depths  (m,) int64
    values   (n_nodes + 1, max_levels + 1) float64: expected tokens of the best tree of at most so many; row and
             column 0 are 0
    """

    chances: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    values: np.ndarray

    def topology(self, n: int, levels: int) -> Topology:
        """The best tree of at most n nodes, in level order; fewer where more do not fit or would add nothing.

        Siblings are adjacent and in the order of their ranks, families in the order of their parents.
        """
        chances = np.where(self.depths < levels, self.chances, 0.0)
        nodes = _largest(chances, n)
        nodes = nodes[chances[nodes] > 0]
        return Topology(np.searchsorted(nodes, self.parents[nodes]) - (self.parents[nodes] < 0))


def search(acceptance: np.ndarray, n_nodes: int, max_levels: int) -> TreeTable:
    """The best trees of up to so many nodes and levels, the root's level counted.

    acceptance  (ranks,) float64, descending: probability that the verifier takes the child of a rank, given that its
                parent was taken

    A node is taken with the product of the acceptances on its path, which is at most its parent's and its elder
    sibling's. So the n most probable nodes are a tree, and no tree of n nodes has more expected tokens; Sequoia's
    dynamic programme, which also serves acceptances in another order, finds the same values.
    """
    assert (np.diff(acceptance) <= 0).all(), "acceptance is descending"
    chances, parents, first = [np.ones(1)], [np.array([-1])], 0
    for _ in range(1, max_levels):
        of_children = np.outer(chances[-1], acceptance).ravel()
        kept = _largest(of_children, n_nodes)
        parents.append(first + kept // len(acceptance))
        first += len(chances[-1])
        chances.append(of_children[kept])
    values = np.zeros((max_levels + 1, n_nodes + 1))
    best = np.zeros(0)
    for level, of_level in enumerate(chances, 1):
        best = -np.sort(-np.concatenate((best, of_level)))[:n_nodes]
        values[level, 1 : len(best) + 1] = np.cumsum(best)
        values[level, len(best) + 1 :] = values[level, len(best)]
    depths = np.repeat(np.arange(max_levels), [len(of_level) for of_level in chances])
    return TreeTable(np.concatenate(chances), np.concatenate(parents), depths, values.T)


def expected_tokens(topology: Topology, acceptance: np.ndarray) -> float:
    """Tokens a pass over this tree is expected to give; children past the last rank are never taken.

    acceptance  (ranks,) float64: of the child of each rank
    """
    acceptance = np.pad(acceptance, (0, max(int(topology.ranks.max()) + 1 - len(acceptance), 0)))
    taken = np.ones(len(topology))
    for node in range(1, len(topology)):
        taken[node] = taken[topology.parents[node]] * acceptance[topology.ranks[node]]
    return float(taken.sum())


def _largest(chances: np.ndarray, n: int) -> np.ndarray:
    """(up to n,) the nodes of the largest chances, ascending; of equal ones the first."""
    return np.sort(np.argsort(-chances, kind="stable")[:n])
