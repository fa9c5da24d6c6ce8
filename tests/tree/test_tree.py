"""Trees: their derived shape against the plain definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import random_tree

from offload_rt.tree.topology import GrowingTree, Topology

pytestmark = pytest.mark.numeric

trees = st.builds(random_tree, st.integers(1, 24), st.integers(0, 2**31))
chains = st.builds(Topology.chain, st.integers(1, 24))


def visible(topology, start, stop):
    """(stop - start, stop) bool: which of nodes [0, stop) the nodes [start, stop) attend to."""
    mask = topology.mask(start, stop, 0).dense()
    return torch.ones(stop - start, stop, dtype=torch.bool) if mask is None else mask


def ancestors(topology, node):
    """The node and all above it."""
    nodes = set()
    while node >= 0:
        nodes.add(node)
        node = int(topology.parents[node])
    return nodes


@given(trees | chains, st.data())
def test_row_sees_itself_and_its_ancestors(topology, data):
    start = data.draw(st.integers(0, len(topology) - 1))
    stop = data.draw(st.integers(start + 1, len(topology)))
    seen = visible(topology, start, stop)
    assert seen.dtype == torch.bool and seen.shape == (stop - start, stop)
    for row in range(start, stop):
        assert set(seen[row - start].nonzero().ravel().tolist()) == ancestors(topology, row)


@given(trees | chains)
def test_depths_and_children(topology):
    n = len(topology)
    assert [len(ancestors(topology, node)) - 1 for node in range(n)] == topology.depths.tolist()
    for node, children in enumerate(topology.children):
        assert children == tuple(np.flatnonzero(topology.parents == node))
    assert topology.is_chain == (max(map(len, topology.children)) <= 1)


def test_long_prompt_above_a_tree_needs_no_square_mask():
    n = 1_000_000  # squared: a terabyte
    seen = visible(Topology(np.array([-1, 0, 0, 1])).after_chain(n), n + 1, n + 4)
    assert seen[:, : n + 1].all()
    assert torch.equal(seen[:, n + 1 :], torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]]).bool())


@given(trees | chains, st.data())
def test_growing_tree_sees_like_the_whole_tree(topology, data):
    """Levels or parts of levels at a time, also after another tree in the same memory."""
    order = np.argsort(topology.depths, kind="stable")
    place = np.argsort(order)
    tree = Topology(np.array([-1, *place[topology.parents[order[1:]]]]))
    growing = GrowingTree(len(tree) + 9)
    growing.add(np.zeros(len(tree) + 8))
    growing.clear()
    start = 0
    while start < len(tree):
        later = (node for node in range(start + 1, len(tree)) if tree.parents[node] >= start)
        most = next(later, len(tree))
        stop = data.draw(st.integers(start + 1, most))
        assert growing.add(tree.parents[max(start, 1) : stop]) == range(max(start, 1), stop)
        mask = growing.mask(start, stop, 3)
        seen = mask.dense()
        seen = torch.ones(stop - start, 3 + stop).bool() if seen is None else seen
        assert seen[:, :3].all() and torch.equal(seen[:, 3:], visible(tree, start, stop))
        assert growing.depths.tolist() == tree.depths[:stop].tolist()
        start = stop
