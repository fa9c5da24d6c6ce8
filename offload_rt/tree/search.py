"""Search for the tree with the most expected tokens (Sequoia, Chen et al. 2024)."""

from dataclasses import dataclass

import numpy as np

from offload_rt.tree.topology import Topology


@dataclass(frozen=True, eq=False)
class TreeTable:
    """Optimal trees for every number of nodes and levels, including the root.

    chances  (m,) float64 acceptance probabilities of the largest tree's nodes, in level order
    parents  (m,) int64
    depths   (m,) int64
    values   (n_nodes + 1, max_levels + 1) float64: expected tokens of the best tree within both
             bounds; row and column 0 are 0
    """

    chances: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    values: np.ndarray

    def topology(self, n: int, levels: int) -> Topology:
        """Return the best tree of at most n nodes in level order.

        Nodes with acceptance probability 0 are omitted. Siblings are adjacent and sorted by rank,
        families by parent.
        """
        chances = np.where(self.depths < levels, self.chances, 0.0)
        nodes = _largest(chances, n)
        return Topology(self.parents).subtree(nodes[chances[nodes] > 0])


def search(acceptance: np.ndarray, n_nodes: int, max_levels: int) -> TreeTable:
    """Find the optimal trees of up to `n_nodes` nodes and `max_levels` levels, including the root.

    acceptance  (ranks,) float64, descending: acceptance probability of a child by sibling rank,
                given its parent was accepted

    A node's acceptance probability is the product along its path. It never exceeds the probability
    of its parent or of an earlier sibling. Therefore the n most probable nodes form a tree with the
    maximum of expected tokens. Sequoia's dynamic program, which also supports unsorted acceptances,
    yields equal values.
    """
    assert (np.diff(acceptance) <= 0).all(), "acceptance is descending"
    chances = [np.ones(1)]
    parents = [np.array([-1])]
    first = 0
    for _ in range(1, max_levels):
        child_chances = np.outer(chances[-1], acceptance).ravel()
        best = _largest(child_chances, n_nodes)
        parents.append(first + best // len(acceptance))
        first += len(chances[-1])
        chances.append(child_chances[best])
    values = np.zeros((max_levels + 1, n_nodes + 1))
    ranked = np.zeros(0)
    for level, level_chances in enumerate(chances, 1):
        ranked = -np.sort(-np.concatenate((ranked, level_chances)))[:n_nodes]
        values[level, 1 : len(ranked) + 1] = np.cumsum(ranked)
        values[level, len(ranked) + 1 :] = values[level, len(ranked)]
    depths = np.repeat(np.arange(max_levels), [len(level_chances) for level_chances in chances])
    return TreeTable(np.concatenate(chances), np.concatenate(parents), depths, values.T)


def expected_tokens(topology: Topology, acceptance: np.ndarray) -> float:
    """Return the expected tokens of a pass over this tree.

    acceptance  (ranks,) float64 by sibling rank; 0 for further ranks
    """
    acceptance = np.pad(acceptance, (0, max(int(topology.ranks.max()) + 1 - len(acceptance), 0)))
    acceptances = np.ones(len(topology))
    for node in range(1, len(topology)):
        acceptances[node] = acceptances[topology.parents[node]] * acceptance[topology.ranks[node]]
    return float(acceptances.sum())


def _largest(chances: np.ndarray, n: int) -> np.ndarray:
    """Return the indices (up to n,) of the largest values, ascending; the first among equals."""
    return np.sort(np.argsort(-chances, kind="stable")[:n])
