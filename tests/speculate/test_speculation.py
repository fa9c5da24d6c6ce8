"""Speculation end to end: tokens and distributions of plain decoding."""

from weakref import WeakKeyDictionary

import pytest
import torch
from support.fake_gpu import record_graph
from support.heads import assert_plain_texts, edit_config
from support.texts import VOCABULARY, assert_sampled_texts, small_model
from support.tiny import (
    CASES,
    DRAFTERS,
    after_start,
    assert_continued,
    byte_level,
    drafter_of,
    generate,
    nearly,
    open_llm,
    prefill,
    prompt_of,
    save_pair,
)

from offload_rt import SamplingParams
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.executor.captured_passes import capture_passes
from offload_rt.executor.cuda_graphs import GraphShape
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence
from offload_rt.speculate import tree_drafter
from offload_rt.speculate.protocols import DRAFT_MODEL
from offload_rt.speculate.rows import draft_rows
from offload_rt.speculate.select import drafter_type
from offload_rt.system import registry

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("steady")]

# Whose drafts are the draft model's alone.
OF_DRAFT = [name for name in DRAFTERS if drafter_type(name).resources == DRAFT_MODEL]
# At temperature 0 adaptive_tree does what dynamic_tree does, and above it what static_tree does.
TREES = ["static_tree", "dynamic_tree"]
PROMPTS = [prompt_of(seed, n) for seed, n in enumerate((9, 1, 30, 14))]
LENGTHS = (32, 24, 12, 28)


@pytest.mark.parametrize("rule", registry.names("speculate.verify"))
def test_temperature_close_to_zero_is_greedy(pair, rule):
    """However close: the draft's distribution must not overflow either."""
    several = zip(LENGTHS, (1e-4, 1e-40, 1e-45, 1e-300), strict=True)
    params = [SamplingParams(n, temperature, seed=1) for n, temperature in several]
    settings = {"max_model_len": 256, "tree_size": 24, **pair.settings("adaptive_tree", rule)}
    with open_llm(pair.target, **settings) as llm:
        outputs = llm.generate(PROMPTS, params)
    expected = [generate(pair.model, *each) for each in zip(PROMPTS, LENGTHS, strict=True)]
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize("drafter", ["ngram", "lookahead", "recycle", "dynamic_tree"])
def test_match_texts_equal_plain_decoding(tmp_path, drafter):
    """One draw per token; these drafters draw nothing."""
    model = small_model(VOCABULARY, n_layers=1, sureness=0.5)
    pair = save_pair(tmp_path, model, nearly(model, 0.15))
    with open_llm(pair.target, draft_model=str(pair.draft), max_model_len=64) as llm:
        assert_plain_texts(llm, drafter, "match")


# Texts of `match` and `coupled` equal those of plain decoding, and test_exactness.py enumerates
# every rule. Here drafters sample with and without replacement.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "dtype"), [("specinfer", torch.float32), ("traversal", torch.bfloat16)]
)
def test_joint_distribution_of_sampled_tokens(tmp_path, rule, dtype):
    """A pair of any dtype against its float32 distribution."""
    model = small_model(VOCABULARY, n_layers=1, sureness=0.5)
    pair = save_pair(tmp_path, model.to(dtype), nearly(model, 0.15).to(dtype))
    with open_llm(pair.target, draft_model=str(pair.draft), max_model_len=64) as llm:
        assert llm.engine.runner.dtype == llm.engine.draft.dtype == dtype
        drafter = drafter_of(llm, "static_tree", rule, DraftLimits(6, 4))
        assert_sampled_texts(llm, drafter, rule, 6, model.float())


def check_rows(runner, cache):
    """Assert that committed rows equal a prefill of the same tokens; poison all others."""
    cache = runner._caches[cache]
    n = cache.n_committed
    rows = [*vars(cache.buffer).values()]
    if n > 0:
        prefilled = prefill(runner, cache.committed, cache.capacity)
        fresh = vars(runner._caches[prefilled].buffer).values()
        runner.free_cache(prefilled)
        for got, expected in zip(rows, fresh, strict=True):
            torch.testing.assert_close(got[:, :, :n], expected[:, :, :n], atol=1e-4, rtol=1e-4)
    for part in rows:
        part[:, :, n:] = torch.nan
    return n


@pytest.mark.parametrize(
    ("family", "name", "rule"),
    [("mistral", "static_tree", "specinfer"), *(("llama", name, "auto") for name in OF_DRAFT)],
)
def test_committed_rows_equal_a_fresh_prefill(zoo, monkeypatch, family, name, rule):
    pair = zoo.pair(family, 0)
    params = [SamplingParams(*each, seed=1) for each in ((20, 0.0), (14, 0.7), (17, 1.0))]
    with open_llm(pair.target, max_model_len=128, **pair.settings(name, rule)) as llm:
        engine = llm.engine
        n_kept = []
        after_start(monkeypatch, lambda at, _: n_kept.append(check_rows(engine.draft, at.cache)))
        sequences = [Sequence([*PROMPTS[i]], sampling, 128) for i, sampling in enumerate(params)]
        for sequence in sequences:
            engine.add(sequence)
        while engine.step():
            for cache in list(engine.runner._caches):
                check_rows(engine.runner, cache)
    assert max(n_kept) > 12, "the draft kept nothing"
    assert sequences[0].tokens[len(PROMPTS[0]) :] == generate(pair.model, PROMPTS[0], 20)


def test_draft_computes_no_token_twice(pair, monkeypatch):
    """After a commit the draft receives only the bonus token and leaves without a row."""
    lacking = []
    after_start(monkeypatch, lambda state, _: lacking.append(len(state.lacking)))
    # Nothing is copied, since the draft has no row of a copied token.
    monkeypatch.setattr(tree_drafter, "_NGRAM_RATE", 2.0)
    with open_llm(pair.target, tree_depth=3, **pair.settings("dynamic_tree")) as llm:
        llm.generate(PROMPTS[0], SamplingParams(max_new_tokens=40))
    assert lacking[0] == len(PROMPTS[0]) - 1
    assert max(lacking[1:]) <= 1, "only a leaf of the tree, which had no row, may be lacking"


@pytest.mark.parametrize("is_captured", [False, True])
def test_caches_never_exceed_the_plan(pair, monkeypatch, is_captured):
    """With any number of prompts: caches of a wave are freed before the next wave."""
    stores = WeakKeyDictionary()
    most = {}
    new_cache = Runner.new_cache

    def new_cache_counted(runner, *arguments):
        cache = new_cache(runner, *arguments)
        stores[runner._caches[cache].buffer] = runner
        rows = sum(store.capacity for store, whose in stores.items() if whose is runner)
        most[runner] = max(rows, most.get(runner, 0))
        return cache

    with open_llm(pair.target, draft_model=str(pair.draft), max_model_len=64, tree_size=6) as llm:
        target = llm.engine.runner
        draft = llm.engine.draft
        planned = {target: llm.spec.memory.cache_rows, draft: draft_rows(64, 6)}
        if is_captured:
            for runner, rows in planned.items():
                capture_passes(runner, GraphShape(6, rows, 12), record_graph)
        monkeypatch.setattr(Runner, "new_cache", new_cache_counted)
        llm.generate(PROMPTS * 2, [*map(SamplingParams, (30, 3, 30, 30, 40, 4, 5, 30))])
        llm.generate(PROMPTS[0], SamplingParams(max_new_tokens=20))
    assert most.keys() == planned.keys()
    assert all(0 < rows <= planned[runner] for runner, rows in most.items()), (most, planned)


ENDS = [
    *map(SamplingParams, (1, 2, 60)), SamplingParams(40, stop=("a", "e", "o", "t")),
    SamplingParams(40, stop=("q", "w")), SamplingParams(9, stop=("never said",)),
]  # fmt: skip


@pytest.mark.parametrize("drafter", TREES)
def test_batch_rows_end_like_solo_runs(tmp_path, monkeypatch, drafter):
    """An end within a path drops the rest of it. The draft is nearly always right."""
    tokenizer = byte_level()
    changes = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": 7, "num_hidden_layers": 2}
    model = CASES["mistral"].build(0, **changes)
    pair = save_pair(tmp_path, model, nearly(model, 0.003), tokenizer)
    prompts = [prompt_of(seed, n) for seed, n in enumerate((1, 30, 7, 12, 19, 3))]

    def answers(outputs):
        return [(output.token_ids, output.text, output.finish_reason) for output in outputs]

    with open_llm(pair.target, max_model_len=256) as llm:
        plain = answers(llm.generate(prompts, ENDS))
    cut = []
    extend = Sequence.extend

    def extend_seen(sequence, tokens):
        n_before = len(sequence.tokens)
        extend(sequence, tokens)
        cut.append((len(tokens), len(sequence.tokens) - n_before))

    monkeypatch.setattr(Sequence, "extend", extend_seen)
    settings = {"max_model_len": 256, "tree_size": 64, "tree_depth": 12, **pair.settings(drafter)}
    with open_llm(pair.target, **settings) as llm:
        assert answers(llm.generate(prompts, ENDS)) == plain
        for prompt, params, expected in zip(prompts, ENDS, plain, strict=True):
            assert answers(llm.generate(prompt, params)) == [expected]
    assert {reason for _, _, reason in plain} == {"stop", "length"}
    assert max(given for given, _ in cut) >= 4
    assert any(taken < given for given, taken in cut), "no end lay within a path"


@pytest.mark.parametrize(
    ("drafter", "n_positions"), [("dynamic_tree", 64), ("static_tree", 8), ("static_tree", 1)]
)
def test_draft_with_a_shorter_context_continues(pair, tmp_path, monkeypatch, drafter, n_positions):
    """The draft sees a moving window; drafts stay useful unless the window is tiny."""
    seen = []
    after_start(monkeypatch, lambda _, tokens: seen.append(len(tokens)))
    prompt = prompt_of(0, 30)
    pair.draft_model.save_pretrained(tmp_path)
    edit_config(tmp_path, max_position_embeddings=n_positions)
    settings = pair.settings(drafter) | {"draft_model": str(tmp_path)}
    with open_llm(pair.target, max_model_len=160, tree_depth=6, **settings) as llm:
        output = llm.generate(prompt, SamplingParams(max_new_tokens=60))[0]
    assert output.token_ids == generate(pair.model, prompt, 60)
    assert max(seen) + 6 <= max(n_positions, 7), "a tree would not fit into the draft's context"
    assert min(seen) >= (n_positions - 6) // 2
    assert n_positions < 64 or output.stats.tokens_per_pass > 1.1


@pytest.mark.parametrize(("n_more", "temperature"), [(-24, 0.0), (40, 1.0)])
def test_draft_with_a_differently_padded_vocabulary(tmp_path, n_more, temperature):
    """The target may produce tokens without a text, the draft may not."""
    tokenizer = byte_level()
    n = tokenizer.get_vocab_size()
    model = CASES["llama"].build(0, vocab_size=n + 32, num_hidden_layers=2)
    draft = nearly(model, 0.01)
    draft.resize_token_embeddings(n + 32 + n_more, mean_resizing=False)
    pair = save_pair(tmp_path, model, draft, tokenizer)
    prompts = [[*prompt_of(0, 9), n + 31, 5], [n + 30, n + 31], prompt_of(1, 20)]
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=1)
    for drafter in TREES:
        settings = {"max_model_len": 256, "tree_size": 48, **pair.settings(drafter)}
        with open_llm(pair.target, **settings) as llm:
            got = llm.generate(prompts, params)
        assert all(output.stats.n_passes < 30 for output in got), "nothing was accepted"
        if temperature == 0:
            assert_continued(got, model, prompts, 30)
