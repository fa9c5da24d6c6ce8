"""Tree size selection against exhaustive comparison, and learned correction of predictions."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_rt.cost.tree_size import (
    DraftLimits,
    ExpectedTokensBias,
    best_prefix,
    best_prefixes,
    select_tree,
    sizes_up_to,
)


def test_expected_tokens_are_corrected_by_accepted_tokens():
    bias = ExpectedTokensBias()
    assert bias.corrected(5.0) == 5.0
    for _ in range(2000):
        bias.observe(5.0, 3)
    assert bias.corrected(5.0) == pytest.approx(3.0, abs=0.2)
    assert bias.corrected(1.0) == 1.0
    # The newest text dominates.
    bias.observe(5.0, 5)
    assert bias.corrected(5.0) < 3.4
    for _ in range(60):
        bias.observe(5.0, 5)
    assert bias.corrected(5.0) > 4.5


@given(st.integers(0, 10**6))
def test_best_prefix_is_the_smallest_nearly_optimal_prefix(seed):
    random = np.random.default_rng(seed)
    chances = np.sort(random.random(30))[::-1] * random.random()
    seconds = 1.0 + np.maximum(np.arange(31) - random.integers(31), 0) * random.random() / 10
    per_token = seconds / (1.0 + np.concatenate(([0.0], np.cumsum(chances))))
    n = best_prefix(chances, seconds)
    assert per_token[n] <= 1.01 * per_token.min()
    assert (per_token[:n] > 1.01 * per_token.min()).all()


@given(st.integers(0, 10**6))
def test_best_prefixes_minimize_time_per_token_of_all_trees(seed):
    random = np.random.default_rng(seed)
    chances = [
        np.sort(random.random(random.integers(7)) * scale)[::-1] for scale in (1.0, 0.6, 0.2)
    ]
    seconds = 1.0 + np.maximum(np.arange(22) - random.integers(22), 0) * random.random() / 10

    def per_token(sizes: tuple[int, ...]) -> float:
        tokens = sum(1.0 + tree[:n].sum() for tree, n in zip(chances, sizes, strict=True))
        return float(seconds[3 + sum(sizes)] / tokens)

    selected = best_prefixes(chances, lambda n_rows: seconds[n_rows])
    combinations = itertools.product(*(range(len(tree) + 1) for tree in chances))
    assert per_token(tuple(selected)) <= 1.01 * min(map(per_token, combinations)) * (1 + 1e-12)


@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans())
def test_selected_tree_is_the_smallest_nearly_optimal_tree(seed, fixed_size, fixed_depth, one_time):
    random = np.random.default_rng(seed)
    expected = 1.0 + np.sort(random.random((26, 7)) * 5, axis=0)
    limits = DraftLimits(20, 5, fixed_size, fixed_depth)
    seconds = 1.0 + np.sort(random.random((21, 1 if one_time else 5)), axis=0)
    choice = select_tree(expected, limits, lambda sizes: seconds[sizes])
    cost = {
        (int(n), level): seconds[n, 0 if one_time else level - 1] / expected[n, level]
        for n in ([20] if fixed_size else sizes_up_to(20))
        for level in range(1, 6)
        if (n == 1 or level > 1) and (level == 5 or not fixed_depth)
    }
    good = [n for (n, _), value in cost.items() if value <= 1.01 * min(cost.values())]
    assert choice.n_nodes == min(good)
    best = min(value for (n, _), value in cost.items() if n == choice.n_nodes)
    assert choice.token_s == cost[choice.n_nodes, choice.n_levels] == best
    assert choice.n_tokens == expected[choice.n_nodes, choice.n_levels]
