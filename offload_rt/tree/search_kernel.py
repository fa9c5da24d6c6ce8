"""The kernel of the search for the best tree; in a file of its own, so that only a search loads numba."""

import numpy as np

from offload_rt.system.numba_cache import compiled


def branched(below: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Best expected tokens of a root with b children, of the first b ranks, for every b and every number of nodes.

    below  (n_nodes + 1,) float64: the same of the subtree of a child, by its number of nodes
    row    (ranks,) float64: acceptance of the root's children
    Returns (b, n_nodes + 1) float64: with exactly b children and at most n nodes, 0 where n <= b; without the ranks for
    which there are no nodes.
    """
    row = row[: max(len(below) - 2, 0)]
    values = np.empty((len(row) + 1, len(below)))
    _branch(np.ascontiguousarray(below), row, values)
    return values


@compiled()
def _branch(below, row, values):  # type: ignore[no-untyped-def]  # numba infers the types
    """The recurrence of Sequoia (Chen et al. 2024) for one d: T[n, b] = max over m of T[n - m, b - 1] + P[b] * below[m]."""
    n_nodes = len(below) - 1
    values[:] = 0.0
    values[0, 1:] = 1.0
    for b in range(1, len(row) + 1):
        for m in range(1, n_nodes - b + 1):
            gain = row[b - 1] * below[m]
            fewer = values[b - 1, b : n_nodes - m + 1]
            best = values[b, b + m :]
            # n inside m: no sum is reordered and every n is its own, so the loop vectorises without fastmath.
            for i in range(len(fewer)):
                value = fewer[i] + gain
                best[i] = value if value > best[i] else best[i]
