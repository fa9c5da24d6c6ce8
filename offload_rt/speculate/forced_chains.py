"""Chains of forced tokens: continuations below a tree's leaves that a grammar decides."""

from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from offload_rt.cost.estimator import CostEstimator
from offload_rt.executor.sequence import Sequence
from offload_rt.tree.topology import DraftTree

# Rows are free if the pass takes at most this factor longer.
_FREE = 1.02


def append_forced(
    trees: Items[DraftTree], sequences: Items[Sequence], n_nodes: int, cost: CostEstimator | None
) -> list[DraftTree]:
    """Append forced chains to the trees of a pass, as far as their rows are free.

    n_nodes  maximum nodes of each tree
    cost     None: all rows are free
    """
    if all(sequence.grammar is None for sequence in sequences):
        return list(trees)
    n_rows = sum(len(tree.topology) for tree in trees)
    n_free = n_nodes * len(trees) - n_rows
    if cost is not None:
        context = max(len(sequence.tokens) for sequence in sequences)
        sizes = n_rows + np.arange(n_free + 1)
        seconds = cost.seconds(sizes, context, n_sequences=len(trees))
        n_free = int((seconds <= _FREE * seconds[0]).sum()) - 1
    extended = []
    for tree, sequence in zip(trees, sequences, strict=True):
        n = len(tree.topology)
        extended.append(_with_chains(tree, sequence, min(n_nodes, n + n_free)))
        n_free -= extended[-1].n_forced
    return extended


def _with_chains(tree: DraftTree, sequence: Sequence, n_nodes: int) -> DraftTree:
    grammar = sequence.grammar
    has_lone_children = tree.sampled is None or not tree.sampled.independent
    if grammar is None or tree.n_unverified or not has_lone_children:
        return tree
    parents = tree.topology.parents.tolist()
    tokens = tree.tokens.tolist()
    for leaf, path in enumerate(tree.paths()):
        if tree.topology.children[leaf]:
            continue
        # The deepest node leaves a token to the bonus.
        n_left = min(n_nodes - len(parents), sequence.n_left - 1 - len(path))
        if n_left <= 0:
            continue
        node = leaf
        for token in grammar.forced_after(path)[:n_left]:
            parents.append(node)
            tokens.append(token)
            node = len(parents) - 1
    n_forced = len(parents) - len(tree.topology)
    return replace(tree.extended(parents, tokens), n_forced=n_forced)
