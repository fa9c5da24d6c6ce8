"""Predicted decoding speed and published measurements; tree sizes against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_rt.config import EngineConfig
from offload_rt.cost.decoding import PairTimes, predict_decoding, select_topology
from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import ComputeTimes, MachineProfile, PassBytes
from offload_rt.cost.tree_size import (
    DraftLimits,
    ExpectedTokensBias,
    best_prefix,
    best_prefixes,
    select_tree,
    sizes_up_to,
)
from offload_rt.dtypes import DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.models.families import parse_architecture
from offload_rt.planning.acceptance import PRESETS, power_law
from offload_rt.planning.forecast import PlanRequest, predict
from offload_rt.planning.hardware import find_card
from offload_rt.planning.known_models import KNOWN
from offload_rt.planning.machine import Machine
from offload_rt.tree.search import expected_tokens, search
from offload_rt.tree.topology import Topology


def estimator(
    target: ComputeTimes, moved: PassBytes, links: tuple[tuple[str, float], ...] = ()
) -> CostEstimator:
    return CostEstimator(MachineProfile(links, 1.0, 0.01, target), moved)


@pytest.mark.parametrize(("first", "n_nodes"), [(0.3, 1), (0.5, 2), (0.9, 2)])
def test_trees_that_gain_little_are_not_drafted(first, n_nodes):
    """A second row costs a fifth of a pass: it pays with half of an acceptance above 0.4."""
    target = ComputeTimes((1, 2), (0,), ((1.0, 1.2),))
    cost = CostEstimator(MachineProfile((), 1.0, 0.0, target), PassBytes((), 0))
    topology = select_topology(cost, PairTimes(target), np.array([first]), DraftLimits(2, 2), 0)
    assert len(topology) == n_nodes
    fixed = DraftLimits(2, 2, fixed_size=True)
    assert len(select_topology(cost, PairTimes(target), np.array([first]), fixed, 0)) == 2


def test_draft_time_is_a_draft_pass_per_level():
    topology = search(np.array([0.6, 0.2, 0.1]), 24, 6).topology(24, 6)
    target = ComputeTimes((1,), (0,), ((1.0,),))
    n_passes = topology.depths.max()
    for level_s in (0.0, 0.005):
        times = PairTimes(target, ComputeTimes((1,), (0,), ((0.02,),)), level_s)
        assert times.draft_s(topology, 100) == pytest.approx((0.02 + level_s) * n_passes)
        assert times.draft_s(Topology.chain(1), 100) == 0.0
    # Widths of the levels with children: 1, then 2.
    by_width = PairTimes(target, ComputeTimes((1, 2), (0,), ((0.1, 0.3),)))
    parents = np.array([-1, 0, 0, 1, 2])
    assert by_width.draft_s(Topology(parents), 0) == pytest.approx(0.1 + 0.3)
    assert PairTimes(target).draft_s(Topology(parents), 0) == 0.0
    # A drafter of blocks of 16 tokens needs one pass.
    block = ComputeTimes((1, 16, 64), (0,), ((1.0, 2.0, 5.0),))
    at_once = PairTimes(block, block, 0.1, n_at_once=16)
    assert at_once.draft_s(Topology.chain(9), 0) == pytest.approx(2.8)


def test_mean_pass_time_follows_the_growing_context():
    acceptance = np.array([0.6, 0.2, 0.1])
    topology = search(acceptance, 24, 6).topology(24, 6)
    target = ComputeTimes((1, 64), (0, 4096), ((0.1, 1.0), (0.2, 2.0)))
    times = PairTimes(target, ComputeTimes((1,), (0,), ((0.02,),)))
    cost = estimator(target, PassBytes((), 0))
    decoding = predict_decoding(cost, times, topology, acceptance, 100, 1000)
    assert decoding.tokens_per_pass == expected_tokens(topology, acceptance)
    # Without a link, a pass takes compute, drafting and the fixed time.
    n_rows = np.array([len(topology)])
    ends = [float(target.at(n_rows, n)[0]) + times.draft_s(topology, n) + 0.01 for n in (100, 1100)]
    assert decoding.pass_s == pytest.approx(sum(ends) / 2, rel=0.01)
    assert ends[1] > 1.1 * ends[0]
    assert decoding.seconds_per_token == decoding.pass_s / decoding.tokens_per_pass


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_presets_reproduce_published_tokens_per_pass(preset):
    size = preset.n_nodes, preset.n_levels
    tokens = search(power_law(preset.power), *size).values[size]
    assert tokens == pytest.approx(preset.tokens_per_pass, abs=0.005)


# Seconds per token on an L40 in Sequoia (Chen et al. 2024): with a tree, and without.
SEQUOIA = {
    "llama2-70b-chat": (0.66, 5.65), "llama2-70b-chat-0.6": (0.68, 5.65),
    "llama3-70b-instruct": (0.60, 5.7),
}  # fmt: skip


@pytest.mark.parametrize("name", SEQUOIA)
def test_sequoia_without_prefetch_is_predicted_within_a_fifth(name):
    """Sequoia streams all layers, starting after drafting.

    The prediction omits seven copies per layer, a device-wide wait after each, and Python time.
    """
    preset = next(preset for preset in PRESETS if preset.name == name)
    card = Machine.with_card(find_card("l40"), 256 * 10**9, 7.0)
    config = EngineConfig(
        *preset.pair, drafter="static_tree", tree_size=preset.n_nodes,
        tree_depth=preset.n_levels, max_model_len=1024,
    )  # fmt: skip
    target, draft = (
        Sizes.of_spec(parse_architecture(KNOWN[pair]), DType.FLOAT16) for pair in preset.pair
    )
    ours = predict(PlanRequest(config, (target, draft), preset.assumed, 128, 128), card)
    times = card.costs(target, draft, ours.memory_plan.plan)
    moved = PassBytes((("host", sum(target.layer_nbytes)),), 0, ahead=0)
    cost = estimator(times.target, moved, card.links)
    tree, plain = (
        predict_decoding(cost, times, topology, preset.assumed.by_rank, 128, 128).seconds_per_token
        for topology in (ours.topology, Topology.chain(1))
    )
    published, published_plain = SEQUOIA[name]
    assert 0.8 * published < tree < published
    assert plain == pytest.approx(published_plain, rel=0.04)
    assert ours.run.seconds_per_token < tree


def test_draft_level_costs_its_bytes_until_measured():
    profile = MachineProfile((), memory_gbps=500.0)
    cost = CostEstimator(profile, PassBytes((), 10**9), draft_nbytes=13 * 10**9)
    assert cost.level_s == pytest.approx(0.026)
    cost.drafted(4, 4 * 0.05)
    assert 0.026 < cost.level_s < 0.05


def test_first_pass_decides_where_nothing_was_measured():
    """Measured compute times count as a pass."""
    compute = ComputeTimes((1, 2), (0, 1), ((1.0, 1.0), (1.0, 1.0)))
    for times, expected in ((None, 3.0), (compute, 2.0)):
        cost = CostEstimator(MachineProfile((), 1.0, 0.0, times), PassBytes((), 10**9))
        cost.passed(1, 0, 0.0, 3.0, 0.0)
        assert cost.seconds(np.array([1]), 0)[0] == pytest.approx(expected)


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
