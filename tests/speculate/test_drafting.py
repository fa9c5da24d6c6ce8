"""Parts of drafters: copying, sampling, growing, planning, learning, storing and refusing."""

import os
import re
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import add_tokenizer
from support.tiny import (
    CASES,
    assert_drawn,
    byte_level,
    drafter_of,
    exact_draws,
    metaspace,
    open_llm,
    open_unloaded,
    prompt_of,
)
from torch.distributed._tools.mem_tracker import MemTracker

from offload_rt import LLM, SamplingParams
from offload_rt.cli.plan_request import assumed
from offload_rt.config import EngineConfig
from offload_rt.cost.tree_size import Acceptance, DraftLimits
from offload_rt.dtypes import DType
from offload_rt.engine import profile
from offload_rt.engine.memory_plan import _Memory
from offload_rt.engine.model_sizes import Sizes
from offload_rt.engine.profile import pass_profile
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.executor.sequence import Sequence
from offload_rt.models.families import parse_architecture
from offload_rt.offload.placement import MemoryBudget
from offload_rt.planning.known_models import KNOWN
from offload_rt.speculate import child_sampling
from offload_rt.speculate.ngrams import MatchRates, append_ngram, find_matches
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.rows import ROWS_PER_NODE
from offload_rt.speculate.select import pick_drafter
from offload_rt.speculate.static_builder import StaticTree, StaticTreeBuilder
from offload_rt.speculate.tree_state import TreeState, select_tokens
from offload_rt.system.files import cache_directory
from offload_rt.tree.topology import DraftTree, Topology, Verdict

token = st.integers(0, 2)
few_tokens = st.lists(token, min_size=1, max_size=24)


@given(few_tokens, st.integers(0, 6))
def test_ngram_matches_are_the_longest_earlier_places(tokens, n_next):
    n = len(tokens)
    places = []
    for end in range(n - 1):
        n_equal = next(k for k in range(n + 1) if k > end or tokens[end - k] != tokens[n - 1 - k])
        if n_equal:
            places.append((min(n_equal, 8), end))
    places.sort(reverse=True)
    wanted = [(n_equal, tuple(tokens[end + 1 : end + 1 + n_next])) for n_equal, end in places[:4]]
    matches = find_matches(Sequence(tokens, SamplingParams(), 99), n_next)
    assert [(match.n_equal, match.tokens) for match in matches] == wanted


def test_copy_rate_equals_the_observed_rate():
    rates = MatchRates()
    (match,) = find_matches(Sequence([1, 2, 3, 4, 1], SamplingParams(), 99), 3)
    assert (match.n_equal, match.tokens) == (1, (2, 3, 4))
    for _ in range(400):
        rates.observe(match, [2, 3, 9])  # two right, the third wrong
        rates.observe(match, [2])  # one right, and no more of it known
    assert abs(rates.rate(1) - 3 / 4) < 0.02
    assert rates.rate(2) == MatchRates().rate(2)


@given(st.lists(few_tokens, max_size=4), st.lists(token, max_size=6), st.integers(1, 14))
def test_copied_continuation_adds_only_missing_nodes(texts, copied, n_nodes):
    paths = sorted({tuple(text[:k]) for text in [[], *texts] for k in range(min(len(text), 4) + 1)})
    parents = [paths.index(path[:-1]) if path else -1 for path in paths]
    tokens = [path[-1] if path else 0 for path in paths]
    tree = DraftTree(Topology(np.array(parents)), torch.tensor(tokens), expected=1.5)
    appended = append_ngram(tree, tuple(copied), n_nodes)
    n = len(tree.topology)
    assert appended.topology.parents[:n].tolist() == parents
    assert appended.tokens[:n].tolist() == tokens
    assert len(appended.topology) <= max(n, n_nodes)
    whole = {*tree.paths()} | {tuple(copied[: k + 1]) for k in range(len(copied))}
    different = {*appended.paths()}
    assert different <= whole and len(different) == len(appended.topology)
    assert different == whole or len(different) == max(n, n_nodes)


@pytest.mark.parametrize("struck", [(), (0,), (1, 4)])
@pytest.mark.parametrize(
    "probs", [(0.4, 0.25, 0.2, 0.1, 0.05, 0.0), (0.7, 0.3, 0.0, 0.0, 0.0, 0.0)]
)
@pytest.mark.parametrize("n", [1, 4])
def test_children_without_replacement(probs, n, struck):
    rows = torch.tensor(probs).expand(20_000, -1)
    mask = torch.zeros_like(rows, dtype=torch.bool)
    mask[:, list(struck)] = True
    given = rows, n, torch.default_generator, mask if struck else None
    children = child_sampling.without_replacement(*given)
    assert_drawn(map(tuple, children.tolist()), exact_draws(np.array(probs), n, excluded=struck))


@pytest.mark.parametrize("n", [1, 2])
def test_children_with_replacement(n):
    probs = torch.tensor([0.7, 0.3, 0.0, 0.0])
    children = child_sampling.independent(probs.expand(20_000, -1), n, torch.default_generator)
    drawn = exact_draws(probs.double().numpy(), n, independent=True)
    assert_drawn(map(tuple, children.tolist()), drawn)


@pytest.mark.parametrize("vocab_size", [3, 5, 8])
def test_most_probable_tokens_lie_within_the_vocabulary_of_the_target(vocab_size):
    """Of a draft with five tokens."""
    logits = torch.tensor([[0.0, 3.0, 1.0, -2.0, 5.0]])
    select = child_sampling.MostProbable(8, vocab_size, temperature=0.5)
    tokens, values = child_sampling.unpacked(select(logits), vocab_size)
    best, order = (2 * logits[0, :vocab_size]).softmax(-1).sort(descending=True)
    assert tokens[0, : len(order)].tolist() == order.tolist()
    assert values[0, : len(order)] == pytest.approx(best.tolist())
    assert (values[0, len(order) :] == 0).all()


def counts_of(pair_stats):
    return {
        key: [ratios.counts() for ratios in vars(estimates).values()]
        for key, estimates in pair_stats.estimates.items()
    }


@pytest.mark.parametrize("drafter", ["static_tree", "dynamic_tree", "adaptive_tree", "recycle"])
def test_pair_statistics_are_restored(pair, empty_cache, drafter):
    with open_llm(pair.target, **pair.settings(drafter)) as llm:
        for temperature in (0.0, 0.8):
            llm.generate(prompt_of(0), SamplingParams(20, temperature, seed=1))
        learned = counts_of(llm.engine.drafter.pair_stats)
        draft = llm.spec.draft.drafting.draft
        pair_ids = llm.spec.target.checkpoint.identity, draft.identity if draft else drafter
        assert not (cache_directory() / "pairs.json").exists()
    # Trees of coupled noise are not trees of temperature 0.
    kinds = {"static_tree": "without_replacement", "recycle": "recycled"}
    kind = kinds.get(drafter, "coupled-dynamic")
    assert f"{kind} 0.8" in learned
    drafted = [counts for key, counts in learned.items() if not re.match(r"recycled \d ", key)]
    assert all(sum(tried) > 0 for (_, tried), *_ in drafted)
    config = EngineConfig(str(pair.target), **pair.settings(drafter))
    assert f"of {kind} trees" in assumed("auto", 0.8, config, drafter).source
    assert counts_of(PairStats.load(*pair_ids)) == learned
    with open_llm(pair.target, **pair.settings(drafter)) as llm:
        assert counts_of(llm.engine.drafter.pair_stats) == learned
    other = PairStats.load(pair_ids[0], "another draft")
    assert not other.estimates
    other.at("dynamic", 0.0)
    other.save()
    assert counts_of(PairStats.load(*pair_ids)) == learned, "one pair is kept beside the other"


@pytest.mark.parametrize("holds", [True, False])
def test_cached_pass_times_are_used_while_they_hold(pair, empty_cache, monkeypatch, holds):
    monkeypatch.setattr(profile, "_STALE", 1e9 if holds else 1e-9)
    monkeypatch.setattr(profile, "compute_times", measure := Mock(wraps=profile.compute_times))
    with open_llm(pair.target) as llm:
        given = llm.engine.runner, llm.plan.pass_bytes, (16, 128)
        measure.reset_mock()
        first, second = (pass_profile(*given).compute for _ in range(2))
    assert measure.call_count == (1 if holds else 2)
    assert first.widths == second.widths and (first == second or not holds)


def test_acceptance_counts_the_outcome_of_nodes(pair):
    """Verdicts that always accept the second child make the second rank the best."""
    with open_llm(pair.target, draft_model=str(pair.draft)) as llm:
        shape = Topology(np.array([-1, 0, 0, 1, 2]))
        drafter = drafter_of(llm, "static_tree", "match", DraftLimits(9, 4), shape=shape)
        sequence = Sequence(prompt_of(0), SamplingParams(99), 200)
        for _ in range(60):
            (tree,) = drafter.propose([sequence], 9)
            drafter.learn(sequence, tree, Verdict((2, 4), 5), None)
    taken, tried = drafter.estimates_at(0.0).acceptance.counts()
    # The first child of the root was never taken, the second always, and below it the only one.
    assert taken[1] > 40 and abs(taken[0] - taken[1]) < 0.2 and abs(tried[0] - 2 * tried[1]) < 0.2


@pytest.mark.parametrize("tree_size", [None, 16])
@pytest.mark.parametrize("drafter", ["ngram", "static_tree"])
def test_too_small_budget_names_the_flag(pair, drafter, tree_size):
    """The named budget and larger budgets suffice; one byte less fails, and leaves no open file."""
    settings = {"device": "cpu", "max_model_len": 64, "tree_size": tree_size}
    open_with = partial(open_unloaded, pair.target, **settings, **pair.settings(drafter))
    with pytest.raises(CapacityError, match="device_memory") as caught:
        open_with(device_memory=1000)
    assert "tree_size" in str(caught.value)
    least = int(str(caught.value).split("set device_memory to ")[1].split()[0])
    for budget in (least, least + 1, *range(least, 3 * least, least // 10)):
        with open_with(device_memory=budget) as llm:
            assert llm.spec.plan.device_nbytes <= budget
    n_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError):
        open_with(device_memory=least - 1)
    assert len(os.listdir("/proc/self/fd")) == n_open


@pytest.mark.parametrize(("drafter", "sampling"), [
    ("static_tree", "without_replacement"), ("block", "independent"),
    ("eagle", "deterministic"), ("dynamic_tree", "deterministic"),
])  # fmt: skip
def test_reserved_memory_holds_the_distributions_of_a_tree(drafter, sampling):
    """Drawn children need the distributions of all nodes, coupled trees a few rows at once."""
    spec = parse_architecture(KNOWN["qwen3-0.6b"])
    sizes = Sizes.of_spec(spec, DType.BFLOAT16)
    drafting = pick_drafter(EngineConfig("target", "draft", drafter=drafter))
    budget = MemoryBudget(1 << 30)
    plan = _Memory(EngineConfig("target"), drafting, sizes, sizes, DType.BFLOAT16, budget)
    tree = StaticTree(Topology(np.array([-1, *(k // 2 for k in range(30))])), 1.0, sampling, 1.0)
    n = len(tree.topology)
    sequence = Sequence([0], SamplingParams(seed=0), 64)
    state = TreeState(spec.vocab_size, ROWS_PER_NODE * n, sequence, torch.device("cpu"))
    if sampling == "deterministic":
        state.noise = torch.zeros(tree.topology.n_levels, spec.vocab_size)
    builder = StaticTreeBuilder(state, tree, Acceptance())
    memory = MemTracker()
    while len(state.tokens) > state.n_done:
        logits = torch.randn(len(state.tokens) - state.n_done, spec.vocab_size).bfloat16()
        with memory:
            selected = select_tokens(builder, logits)
            state.computed()
            builder.extend(selected)
    most = memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert most <= plan._probs_nbytes(n) < 4 * most


def test_different_tokenizer_is_refused_with_the_first_token(pair, tmp_path):
    ours = byte_level()
    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    draft = Path(shutil.copytree(pair.draft, tmp_path / "draft"))
    add_tokenizer(target, ours)
    for theirs in (byte_level(330), metaspace()):
        add_tokenizer(draft, theirs)
        first = next(i for i in range(999) if ours.id_to_token(i) != theirs.id_to_token(i))
        with pytest.raises(SettingsError, match=rf"tokenizer.*token {first}\b"):
            LLM(str(target), draft_model=str(draft), device="cpu")
    add_tokenizer(draft, byte_level())
    open_unloaded(target, str(draft), device="cpu").close()
    # Without tokenizers, the sizes must be equal.
    CASES["llama"].build(0, vocab_size=96, num_hidden_layers=1).save_pretrained(tmp_path / "other")
    with pytest.raises(SettingsError, match="96 tokens"):
        LLM(str(pair.target), draft_model=str(tmp_path / "other"), device="cpu")
