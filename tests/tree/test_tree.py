"""Trees: their shape against the plain definition, and the search against all trees there are."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import random_tree

from offload_rt.cli.format import describe_tree
from offload_rt.tree.search import expected_tokens, search
from offload_rt.tree.topology import GrowingTree, Topology

pytestmark = pytest.mark.numeric

trees = st.builds(random_tree, st.integers(1, 24), st.integers(0, 2**31))
chains = st.builds(Topology.chain, st.integers(1, 24))


def visible(topology, start, stop, n_before=0):
    """(stop - start, n_before + stop) bool: the rows that nodes [start, stop) attend to."""
    mask = topology.mask(start, stop, n_before).dense()
    return torch.ones(stop - start, n_before + stop, dtype=torch.bool) if mask is None else mask


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
        seen = visible(growing, start, stop, 3)
        assert seen[:, :3].all() and torch.equal(seen[:, 3:], visible(tree, start, stop))
        assert growing.depths.tolist() == tree.depths[:stop].tolist()
        start = stop


MOST = 8


@cache
def tree_batches(n):
    """All ordered trees of n nodes; a tree is the tuple of its root's subtrees."""
    if n == 0:
        return [()]
    return [
        (first, *rest)
        for m in range(1, n + 1)
        for first in tree_batches(m - 1)
        for rest in tree_batches(n - m)
    ]


def n_levels(tree):
    return 1 + max(map(n_levels, tree), default=0)


def widest(tree):
    return max(len(tree), max(map(widest, tree), default=0))


def expectation(tree, acceptance):
    return 1 + sum(acceptance[k] * expectation(child, acceptance) for k, child in enumerate(tree))


def best_of_all(acceptance, n_nodes, levels):
    """Expected tokens of the best of all trees of at most n nodes, for every n from 0."""
    bests = [0.0]
    for n in range(n_nodes):
        fits = (each for each in tree_batches(n) if n_levels(each) <= levels)
        trees = (tree for tree in fits if widest(tree) <= len(acceptance))
        bests.append(max([expectation(tree, acceptance) for tree in trees] + bests[-1:]))
    return bests


def nested(topology, node=0):
    return tuple(nested(topology, child) for child in topology.children[node])


def acceptances():
    """Random descending (ranks,) with ties, zeros and ones."""

    def build(ranks, seed):
        random = np.random.default_rng(seed)
        values = random.uniform(size=ranks) * random.choice([0.1, 1.0])
        values = np.where(random.uniform(size=ranks) < 0.25, random.choice([0.0, 0.5, 1.0]), values)
        return -np.sort(-values)

    return st.builds(build, st.integers(1, 9), st.integers(0, 2**31))


@settings(max_examples=40)
@given(acceptances(), st.integers(1, MOST), st.integers(1, MOST))
def test_search_finds_the_best_tree_of_every_size_and_depth(acceptance, n_nodes, max_levels):
    table = search(acceptance, n_nodes, max_levels)
    assert table.values.shape == (n_nodes + 1, max_levels + 1)
    for levels in {1, (max_levels + 1) // 2, max_levels}:
        best = best_of_all(acceptance, n_nodes, levels)
        assert table.values[:, levels] == pytest.approx(best, rel=1e-12)
        for n in range(1, n_nodes + 1):
            topology = table.topology(n, levels)
            tree = nested(topology)
            assert len(topology) <= n and n_levels(tree) <= levels
            assert widest(tree) <= len(acceptance)
            # Families are together and in the order of their parents.
            assert (np.diff(topology.parents) >= 0).all() and (np.diff(topology.depths) >= 0).all()
            expected = pytest.approx(expectation(tree, acceptance), rel=1e-12)
            assert table.values[n, levels] == expected == expected_tokens(topology, acceptance)


def test_trees_have_no_useless_or_impossible_nodes():
    assert len(search(np.zeros(4), 9, 5).topology(9, 5)) == 1
    assert search(np.array([0.5, 0.0, 0.0]), 4, 3).topology(4, 3).parents.tolist() == [-1, 0, 1]
    assert len(search(np.array([0.6, 0.3]), 50, 4).topology(50, 4)) == 15


def test_description_names_nodes_levels_and_children():
    assert describe_tree(Topology.chain(1)) == "1 node"
    assert describe_tree(Topology.chain(5)) == "chain of 5 nodes"
    lines = describe_tree(Topology(np.array([-1, 0, 0, 0, 1, 1, 3, 4]))).splitlines()
    assert lines[0] == "8 nodes on 4 levels, up to 3 children a node"
    rows = ["0 1 3", "1 3 2 . 1", "2 3 1 . | .", "3 1 leaves"]
    assert [line.split() for line in lines[2:]] == [row.split() for row in rows]
