"""Random drafted trees of any size, with the distributions that their tokens are drawn from."""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.static_builder import StaticTreeBuilder
from offload_rt.speculate.tree_state import captured, select_tokens
from offload_rt.tree.topology import DraftTree, SampledNodes, Topology
from support.tiny import random_tree


def child_probs(tree: DraftTree, node: int) -> Iterator[tuple[int, Tensor]]:
    """Each child with its distribution given the siblings before it, in verification order."""
    sampled = tree.sampled
    children = tree.topology.children[node]
    is_sampled = [child for child in children if sampled.is_sampled[child]]
    given = [child for child in children if child not in is_sampled]
    free = torch.ones(sampled.draft_probs.shape[1], dtype=torch.float64)
    free[tree.tokens[given]] = 0
    for child in is_sampled:
        probs = sampled.draft_probs[sampled.row_of[node]].double() * free
        probs = probs if probs.sum() > 0 else free.clone()
        yield child, probs / probs.sum()
        if not sampled.independent:
            free[tree.tokens[child]] = 0
    for child in given:
        yield child, None


def grow(
    topology: Topology,
    is_sampled: np.ndarray,
    draft_probs: Tensor,
    seed: int,
    independent: bool = False,
) -> DraftTree:
    """Draw a tree from these distributions (n, vocabulary), as a drafter would."""
    rng = np.random.default_rng(seed)
    tokens = torch.zeros(len(topology), dtype=torch.int64)
    n = len(topology)
    sampled = SampledNodes(is_sampled, draft_probs, np.arange(n), independent)
    for node in range(n):
        given = [child for child in topology.children[node] if not is_sampled[child]]
        tokens[given] = draft_probs[node].argsort(descending=True, stable=True)[: len(given)]
        for child, probs in child_probs(DraftTree(topology, tokens, sampled), node):
            # the distributions are read one by one, so each sees the tokens drawn before it
            if probs is not None:
                tokens[child] = int(rng.choice(len(probs), p=probs.numpy()))
    return DraftTree(topology, tokens, sampled)


def grow_with(
    builder: StaticTreeBuilder | DynamicTreeBuilder,
    probs_after: Callable[[tuple[int, ...]], Tensor],
    guess: Callable[[], None] = lambda: None,
) -> None:
    """Grow a tree as a draft model does, by distributions (vocabulary,) after the paths of rows.

    guess  may add rows to the next pass
    """
    state = builder.state
    while len(state.tokens) > state.n_done:
        guess()
        paths = Topology(state._tree.parents[: len(state.tokens)]).paths(state.tokens)
        logits = torch.stack([probs_after(path).log().float() for path in paths[state.new_rows]])
        reduce = captured(builder)
        selected = select_tokens(builder, reduce(logits) if reduce else logits)
        state.computed()
        builder.extend(selected)


@cache
def random_case(
    seed: int, dtype: torch.dtype, vocabulary: int = 12
) -> tuple[DraftTree, Tensor, Tensor]:
    """A tree of 1 to 40 nodes, the target's distributions, and a number for each node."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 41))
    # Deterministic, sampled, mixed, independently sampled.
    is_sampled = rng.random(n) < (0, 1, 0.5, 1)[seed % 4]
    is_sampled[0] = False
    is_possible = rng.random((n, vocabulary)) < rng.choice([0.2, 0.8], (n, 1))
    draft = rng.random((n, vocabulary)) ** 3 * is_possible
    draft[:, 0] += draft.sum(-1) == 0
    draft /= draft.sum(-1, keepdims=True)
    noise = rng.dirichlet(np.full(vocabulary, 0.5), n)
    target = torch.from_numpy(0.6 * draft + 0.4 * noise).to(dtype)
    shape = random_tree(n, seed, reach=7)
    tree = grow(shape, is_sampled, torch.from_numpy(draft).to(dtype), seed, seed % 4 == 3)
    return tree, target, torch.from_numpy(rng.random(n))
