"""Human-readable summary of a tree's shape."""

from itertools import groupby
from textwrap import shorten

import numpy as np

from offload_rt.tree.topology import Topology

_WIDTH = 96


def describe(topology: Topology) -> str:
    """Summarize a tree: size, levels, and the number of children of each node per level.

    Families are sorted by parent and separated by `|`; `.` is a leaf. Long lines are cut.
    """
    n = len(topology)
    n_levels = topology.n_levels
    if topology.is_chain:
        return "1 node" if n == 1 else f"chain of {n} nodes"
    n_children = np.array([len(children) for children in topology.children])
    lines = [
        f"{n} nodes on {n_levels} levels, up to {n_children.max()} children a node",
        "level nodes  children of each",
    ]
    for level in range(n_levels):
        nodes = np.flatnonzero(topology.depths == level)
        lines.append(f"{level:5} {len(nodes):5}  {_families(topology, nodes, n_children)}")
    return "\n".join(lines)


def _families(topology: Topology, nodes: np.ndarray, n_children: np.ndarray) -> str:
    if not n_children[nodes].any():
        return "leaves"
    parents = topology.parents
    families = groupby(
        sorted(nodes, key=lambda node: parents[node]), key=lambda node: parents[node]
    )
    line = " | ".join(
        " ".join(str(n_children[node] or ".") for node in nodes) for _, nodes in families
    )
    return shorten(line, _WIDTH, placeholder=" ...")
