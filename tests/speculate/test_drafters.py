"""Contract of drafters: valid trees for every rule, and draws from the stated distributions."""

import itertools
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.languages import grow_with
from support.tiny import (
    COMBINATIONS,
    Steady,
    after_start,
    begin,
    drafter_of,
    open_llm,
    prompt_of,
    sequence_of,
)

from offload_rt import SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.tree_size import TRUST, DraftLimits, best_prefix
from offload_rt.errors import OffloadError, SettingsError
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import top_tokens
from offload_rt.speculate import dynamic_builder
from offload_rt.speculate.draft.block import BlockTreeBuilder
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder, RoundCost
from offload_rt.speculate.pair_stats import Estimates, PairStats
from offload_rt.speculate.recycler import Recycler, TextCandidates
from offload_rt.speculate.select import drafter_type, load_rule, pick_drafter
from offload_rt.speculate.tree_state import TreeState
from offload_rt.system import registry
from offload_rt.tree.topology import Verdict

LIMITS = DraftLimits(n_nodes=17, n_levels=6)
# The fourth goes round in circles, so that there is something to copy.
PROMPTS = [[3], [7, 8, 9], prompt_of(0, 30), [5, 1, 2, 3, 4] * 5]


@pytest.fixture(scope="module")
def llm(pair):
    with open_llm(pair.target, draft_model=str(pair.draft)) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("name", "rule"), COMBINATIONS)
def test_trees_are_valid_after_every_verdict_on_every_node(llm, name, rule, temperature):
    """One tree per sequence, within its limits."""
    for n_nodes in (1, 2, 5, 17):
        sequences = [
            Sequence([*prompt], SamplingParams(n, temperature, seed=n), 200)
            for prompt, n in zip(PROMPTS, (1, 2, 5, 40), strict=True)
        ]
        drafter = drafter_of(llm, name, rule, LIMITS)
        if drafter_type(name).resources.view is not None:
            begin(llm, drafter, sequences, 17)
        for node in range(0, n_nodes, 3):
            before = [list(sequence.tokens) for sequence in sequences]
            trees = drafter.propose(sequences, n_nodes)
            assert [sequence.tokens for sequence in sequences] == before
            if node == 0:
                first = trees
            for tree, sequence in zip(trees, sequences, strict=True):
                topology, tokens = tree.topology, tree.tokens.tolist()
                assert 1.0 <= tree.expected <= len(topology) == len(tokens) <= n_nodes
                assert topology.n_levels <= min(sequence.n_left, LIMITS.n_levels)
                assert tokens[0] == sequence.tokens[-1] and {*tokens} <= {*range(128)}
                assert tree.tokens.dtype == torch.int64
                paths = tree.candidates().paths()
                is_independent = tree.sampled is not None and tree.sampled.independent
                assert len({*paths}) == len(paths) or is_independent, "equal siblings"
                path = topology.path_to(min(node, len(paths) - 1))
                verdict = Verdict(tuple(path), (7 * node + 3) % 128)
                logits = torch.randn(len(topology), 128)
                drafter.learn(sequence, tree, verdict, top_tokens(logits, drafter.n_predicted))
                sequence.extend([*tree.tokens[path].tolist(), verdict.bonus])
            sequences = [sequence for sequence in sequences if sequence.finish_reason is None]
    assert len(first[3].topology) > 1 or name == "none"
    # At temperature 0 and in coupled sampling, whose noise decides every token, nothing is drawn.
    sampled = any(tree.sampled is not None and tree.sampled.is_sampled.any() for tree in first)
    draws = temperature > load_rule(rule).coupled_up_to
    assert sampled == (draws and drafter_type(name).gives_draft_probs)


@pytest.mark.parametrize(("row_s", "n_copied"), [(0.0, 8), (1.0, 2), (3.0, 1), (9.0, 0)])
def test_tokens_are_copied_while_their_rows_pay(llm, row_s, n_copied):
    """Copy k is accepted with 0.85^k; n copies take `1 + row_s * (1 + n)` seconds."""
    drafter = drafter_of(llm, "static_tree", "match", replace(LIMITS, n_levels=12))
    drafter._cost = Steady(pass_s=lambda n_rows: 1.0 + row_s * n_rows)
    sequence = Sequence([*range(9)] * 2, SamplingParams(40, temperature=0.0), 200)
    _, copied = drafter._copied(sequence, 10, drafter._round_cost(sequence, 12, 1))
    assert copied == tuple(range(n_copied))
    if row_s == 0:
        (tree,) = drafter.propose([sequence], 17)
        assert tuple(range(n_copied)) in tree.paths() and len(tree.topology) == 17


@pytest.mark.parametrize(("level_s", "n_drafted"), [(0.0, 40), (1e6, 3)])
def test_levels_that_cost_too_much_are_drafted_seldom(llm, monkeypatch, level_s, n_drafted):
    """At every 16th length of a text, for the statistics."""
    started = []
    after_start(monkeypatch, lambda state, tokens: started.append(len(tokens)))
    drafter = drafter_of(llm, "dynamic_tree", "match", LIMITS, level_s)
    text = prompt_of(0, 56)
    for n in range(16, 56):
        drafter.propose([Sequence(text[:n], SamplingParams(40), 200)], 17)
    assert len(started) == n_drafted
    assert level_s == 0 or started == [16, 32, 48]


def test_prompts_of_a_draft_model_are_not_rounds(pair, monkeypatch):
    """The estimate of a round includes a few missing tokens, as after every pass."""
    rounds = []
    monkeypatch.setattr(CostEstimator, "drafted", lambda _, n, *__: rounds.append(n))
    with open_llm(pair.target, draft_model=pair.draft, tree_size=8) as llm:
        output = llm.generate(prompt_of(0, 40), SamplingParams(max_new_tokens=12))[0]
    assert len(rounds) == output.stats.n_passes - 1 and max(rounds) > 0


def best_rate(chances, cost, n_rounds):
    tokens = np.cumsum(sorted(chances, reverse=True)[: len(cost.pass_s)])
    return max(tokens / (cost.pass_s[: len(tokens)] + n_rounds * cost.level_s))


def test_round_pays_by_the_best_prefix_of_all_nodes():
    """Rows become cheaper or dearer with their number, as in mixtures and dense models."""
    draw = np.random.default_rng(0)
    decisions = set()
    for power, level_s, n_rounds in itertools.product((0.5, 1, 2), draw.random(9) / 5, (0, 1, 3)):
        cost = RoundCost(level_s, 1 + draw.random() * np.arange(12) ** power)
        chances = np.array([1.0, *-np.sort(-draw.random(7))])
        waiting = chances[2:6]
        least = cost.least_worth(chances, waiting, n_rounds)
        both = [*chances, *waiting]
        after = best_rate(both, cost, n_rounds + 1)
        pays = after >= best_rate(chances, cost, n_rounds)
        assert pays == (least <= 1)
        kept = [chance for chance in both if chance >= least]
        assert not pays or best_rate(kept, cost, n_rounds + 1) == pytest.approx(after)
        decisions.add((pays, bool((waiting >= least).any())))
    assert decisions == {(True, True), (False, False)}


def test_drafting_pays_by_the_best_prefix_of_text_and_draft_after_any_round():
    draw = np.random.default_rng(0)
    decisions = set()
    for n_at_once, is_cheap in itertools.product((1, 2, 3), (False, True) * 40):
        level_s = draw.random() * (0.1 if is_cheap else 0.5)
        cost = RoundCost(level_s, 1 + draw.random() / 4 * np.sqrt(np.arange(9)))
        acceptance = -np.sort(-draw.random(draw.integers(1, 4))) / 2
        text = [1.0, *-np.sort(-draw.random(3))]
        missed = np.sort(draw.random(4)) * (draw.random() > 0.5, 1, 1, 1)
        rates = []
        for depth in range(1, 5):
            drafted = [
                float(np.prod(path)) * missed[below - 1]
                for below in range(1, depth + 1)
                for path in itertools.product(acceptance, repeat=below)
            ]
            if depth % n_at_once == 0 or depth == 4:
                rates.append(best_rate([*text, *drafted], cost, -(-depth // n_at_once)))
        # Rounds end with the first that lowers the rate.
        falls = next((i for i in range(1, len(rates)) if rates[i] < rates[i - 1]), len(rates))
        least = best_rate(text, cost, 0) / 1.01
        pays = max(rates[:falls]) >= least
        assert cost.pays_at_root(np.array(text), missed, acceptance, n_at_once) == pays
        decisions.add((pays, rates[0] >= least))
    assert decisions == {(True, True), (True, False), (False, False)}


def random_children(draw, n_most):
    """Probabilities of up to `n_most` tokens out of 0 to 4."""
    tokens = draw.permutation(5)[: draw.integers(0, n_most + 1)].tolist()
    return dict(zip(tokens, draw.dirichlet(np.ones(6))[: len(tokens)].tolist(), strict=True))


def text_below(below):
    """Return candidates of the text after each path, all of them allowed."""

    def columns(paths):
        found = [(i, *item) for i, path in enumerate(paths) for item in below(path).items()]
        rows, tokens, chances = np.array(found).reshape(-1, 3).T
        return rows.astype(int), tokens.astype(int), chances

    return SimpleNamespace(below=columns, is_allowed=lambda path: True)


@pytest.mark.parametrize(("n_nodes", "n_drafted"), [(6, 1), (60, 1), (12, 4), (4000, 4)])
def test_candidates_of_text_and_draft_compete(n_nodes, n_drafted, monkeypatch):
    """Each child has the higher of its two chances. A small tree drafts only some of its nodes."""
    monkeypatch.setattr(dynamic_builder, "_MOST_OPENED", (4000, 4000))
    draw = np.random.default_rng(0)
    # By the text, which saw one token with a probability that was rounded to 0.
    below = defaultdict(lambda: {4: 0.0} | random_children(draw, 2))
    drafted = defaultdict(lambda: torch.from_numpy(draw.dirichlet(np.ones(5))))
    for seed in range(20):
        root = (seed,)
        text = text_below(lambda path, root=root: below[root + path])
        cost = RoundCost(0.0, np.ones(n_nodes))
        size = n_nodes, 6, n_drafted
        builder = DynamicTreeBuilder(new_state(n_nodes), size, 0.5, Unchanged(), text, cost)
        if n_drafted > 1:  # the temperature restores the probabilities
            grow_with(builder, lambda path, root=root: drafted[root + path].sqrt())
        tree = builder.tree(n_nodes)
        paths = [(), *map(tuple, tree.topology.paths(tree.tokens.tolist())[1:])]
        assert len(set(paths)) == len(paths) <= n_nodes
        assert sorted(builder._nodes.chances, reverse=True) == builder._nodes.chances.tolist()
        wanted = {(): 1.0}
        order = [()]
        for path in order:
            both = [below[root + path]] if len(path) < 5 else []
            if len(path) < n_drafted - 1:
                both.append(dict(enumerate(drafted[root + path].tolist())))
            for token in set().union(*both):
                p = max(children.get(token, 0.0) for children in both)
                if wanted[path] * p > 1e-8:
                    wanted[*path, token] = wanted[path] * p
                    order.append((*path, token))
        chances = zip(paths, builder._nodes.chances, strict=True)
        found = {path: p for path, p in chances if p > 1e-8}
        best = dict(sorted(wanted.items(), key=lambda item: -item[1])[:n_nodes])
        assert found == pytest.approx(best, rel=1e-5) or (n_nodes, n_drafted) == (12, 4)


@pytest.mark.parametrize("row_s, n_most, n_nodes", [(1.0, 1, 1), (0.05, 22, 10), (0.0, 342, 128)])
def test_text_is_read_as_far_as_rows_may_pay(row_s, n_most, n_nodes, monkeypatch):
    """Reading the text for all nodes would last longer than a pass of a small model."""
    read = []

    def below(path):
        read.append(path)
        return dict.fromkeys(range(4), 0.2)

    text = text_below(below)
    cost = RoundCost(1.0, 1 + row_s * np.arange(128))
    builder = DynamicTreeBuilder(new_state(128), (128, 9, 1), 0.0, Unchanged(), text, cost)
    assert len(read) <= n_most
    assert len(builder.tree(127).topology) == n_nodes
    monkeypatch.setattr(dynamic_builder, "_MOST_OPENED", (5, 0))
    read.clear()
    DynamicTreeBuilder(new_state(128), (128, 9, 1), 0.0, Unchanged(), text, cost)
    assert len(read) == min(1 + 5, n_most)


@pytest.mark.parametrize("rising", [1.0, 2.0, 0.5])
def test_best_candidate_decides_whether_a_tree_may_pay(rising):
    """Trees of roots that are rejected early have no row worth its time."""
    draw = np.random.default_rng(0)
    decisions = set()
    for _ in range(200):
        below = defaultdict(lambda: random_children(draw, 4))
        text = text_below(lambda path, below=below: below[path])
        cost = RoundCost(1.0, 1 + draw.random() / 3 * np.arange(24) ** rising)
        sizes = []
        for least in (cost.least_child, -1.0):
            vars(cost)["least_child"] = least
            builder = DynamicTreeBuilder(new_state(24), (24, 6, 1), 0.0, Unchanged(), text, cost)
            chances = TRUST * builder.chances
            sizes.append(best_prefix(chances, cost.pass_s[: 1 + len(chances)]))
        decisions.add(sizes[0] > 0)
        assert sizes[0] == sizes[1]
    assert decisions == {True, False}


def new_state(n_nodes):
    return TreeState(5, 2 * n_nodes, sequence_of(0), torch.device("cpu"))


class Unchanged(Estimates):
    """Estimates that take a draft's probabilities as they are."""

    calibration = SimpleNamespace(chances=lambda probabilities: probabilities)


@pytest.mark.parametrize(("plain", "room", "doubled", "share", "sizes"), [
    (0, 32, 64, 0.05, (32, 64)), (0, 32, 128, 0.03, (64, 128)), (0, 512, 4096, 0.03, (2048, 4096)),
    (200_000, 512, 1024, 0.03, (512, 1024)), (200_000, 512, 4096, 0.03, (2048, 2048)),
])  # fmt: skip
def test_default_tree_doubles_for_a_share_of_the_streamed_bytes(plain, room, doubled, share, sizes):
    """Trees of 100 bytes per node; an eighth of the memory has room for `room` nodes."""
    config = EngineConfig("target", "draft")
    streamed = int(50 * doubled / share)
    for more, expected in zip((-2, 2), sizes, strict=True):
        asked = lambda n: 100 * n, 8 * room * 100, plain, streamed + more
        assert pick_drafter(config).limits(config, *asked).n_nodes == expected


def test_further_block_pays_by_tokens_per_second():
    """Rounds with the blocks of parents cost nothing."""
    draw = np.random.default_rng(0)
    conditioned, inherited = Estimates(), Estimates()
    text = TextCandidates(Recycler(PairStats()), Sequence([0], SamplingParams(), 9), 1)
    conditioned.acceptance.first, inherited.acceptance.first = 0.9, 0.3
    decisions = set()
    for n_passes, level_s in itertools.product((1, 3), draw.exponential(0.3, 40)):
        state = SimpleNamespace(tokens=[0], n_recomputable=4, n_passes=n_passes)
        cost = RoundCost(level_s, np.ones(16))
        parts = Estimates(), text, cost, conditioned, inherited
        builder = BlockTreeBuilder(state, (16, 4, 4), 0.0, *parts)
        chances = -np.sort(-(draw.random(7) ** 2))
        builder._nodes = replace(builder._nodes, chances=np.array([1.0, *chances]))
        places = builder._next_round(np.arange(2, 8))
        gain = 0.6 * chances[places[:4] - 1].sum()
        tokens = 1 + chances.sum()
        seconds = 1 + n_passes * level_s
        pays = (tokens + gain) / (seconds + level_s) > tokens / seconds
        assert state.recomputes == pays
        decisions.add(pays)
    assert decisions == {True, False}


@pytest.mark.parametrize(("settings", "words"), [
    ({"drafter": "telepathy"}, ["'telepathy'", *registry.names("speculate.draft")]),
    ({"rule": "anarchy"}, ["'anarchy'", *registry.names("speculate.verify")]),
    ({"drafter": "none", "draft_model": "somewhere"},
        ['draft_model with drafter="none"', "static_tree"]),
    ({"drafter": "static_tree"}, ['drafter="static_tree"', "draft_model"]),
    ({"rule": "traversal"}, ['rule="traversal"', "recycle", 'rule="match"']),
    ({"drafter": "self_window", "draft_context": 31}, ["draft_context"]),
    ({"draft_context": 64}, ["draft_context"]),
])  # fmt: skip
def test_unknown_or_unfit_drafter_and_rule_are_refused(settings, words):
    with pytest.raises(SettingsError) as caught:
        pick_drafter(EngineConfig("model", **settings))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(("drafter", "place", "settings", "said"), [
    ("self_window", "disk", {}, "needs all layers on the device, has 3 of 3 elsewhere"),
    *((name, "resident", {"learn_draft": "on"}, "learn_draft") for name in
        ("recycle", "self", "triforce")),
    ("recycle", "resident", {"draft_quantize": "int8"}, "draft_quantize int8: .*has none"),
    ("static_tree", "resident", {"draft_quantize": "int8", "learn_draft": "on"},
        "draft_quantize int8: .*has a draft model of type llama"),
])  # fmt: skip
def test_settings_that_a_drafter_does_not_take_are_refused(pair, drafter, place, settings, said):
    settings = pair.settings(drafter) | {"draft_quantize": "auto"} | settings
    with pytest.raises(OffloadError, match=said):
        open_llm(pair.target, place, **settings)


@pytest.mark.parametrize(("settings", "drafter", "rule"), [
    ({}, "recycle", "match"),
    ({"draft_model": "somewhere"}, "adaptive_tree", "adaptive"),
    ({"draft_model": "somewhere", "rule": "match"}, "adaptive_tree", "match"),
    ({"drafter": "dynamic_tree", "draft_model": "somewhere"}, "dynamic_tree", "coupled"),
    ({"drafter": "self_window", "draft_context": 32}, "self_window", "traversal"),
])  # fmt: skip
def test_default_drafter_and_rule(settings, drafter, rule):
    drafting = pick_drafter(EngineConfig("model", **settings))
    expected = drafter, drafter_type(drafter), load_rule(rule)
    assert (drafting.name, drafting.type, drafting.rule) == expected
