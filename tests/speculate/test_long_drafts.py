"""Self-drafting, by views on long texts and by copies of layers: contents, unchanged texts."""

from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from support.tiny import (
    after_start,
    assert_continued,
    begin,
    drafter_of,
    logits_of,
    open_llm,
    open_unloaded,
    prefill,
    prompt_of,
)
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, rotate_half

from offload_rt import LLM, SamplingParams
from offload_rt.cli.plan_tables import placement_table
from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import ComputeTimes, MachineProfile, PassBytes
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.errors import CapacityError
from offload_rt.executor.sequence import Sequence
from offload_rt.executor.step import Step
from offload_rt.kv.sparse import RetrievalCache, SnapKVCache, WindowCache
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.tree.topology import Topology

BUDGET = 64
N = 150
LONG = ["self_window", "self_snapkv", "self_retrieval", "triforce"]


# What a view holds and sees, by transformers' caches and the published algorithms


@torch.no_grad()
def peer_cache(model, tokens):
    """Keys, values and rotated queries, each (layers, heads, n, head_dim), by transformers."""
    cache = DynamicCache()
    out = model(torch.tensor([tokens]), past_key_values=cache, output_hidden_states=True)
    cos_sin = model.model.rotary_emb(out.hidden_states[0], torch.arange(len(tokens))[None])
    queries = []
    for layer, x in zip(model.model.layers, out.hidden_states, strict=False):
        q = layer.self_attn.q_proj(layer.input_layernorm(x))
        q = q.view(1, len(tokens), -1, layer.self_attn.head_dim).transpose(1, 2)
        queries.append(apply_rotary_pos_emb(q, q, *cos_sin)[0][0])
    keys, values = zip(*((layer.keys[0], layer.values[0]) for layer in cache.layers), strict=True)
    return torch.stack(keys), torch.stack(values), queries


@torch.no_grad()
def peer_logits(model, token, position, keys, values):
    """Return logits of one more token at a position, after these keys and values."""
    cache = DynamicCache()
    for i, (k, v) in enumerate(zip(keys, values, strict=True)):
        cache.update(k[None], v[None], i)
    options = {"position_ids": torch.tensor([[position]]), "past_key_values": cache}
    return model(torch.tensor([[token]]), **options).logits[0, -1]


def snapkv_rows(keys, q, n, n_recent):
    """SnapKV: the best n by the last queries' attention, averaged over five neighbours."""
    n_kv_heads, n_tokens, head_dim = keys.shape
    groups = q[:, -n_recent:].view(n_kv_heads, -1, n_recent, head_dim)
    scores = groups @ keys[:, None].transpose(2, 3) / head_dim**0.5
    visible = torch.ones(n_recent, n_tokens).tril(n_tokens - n_recent).bool()
    attention = scores.masked_fill(~visible, -torch.inf).softmax(-1).sum((1, 2))[:, :-n_recent]
    return F.avg_pool1d(attention, 5, padding=2, stride=1).topk(n).indices.sort().values


def retrieval_rows(keys, q, n, n_recent):
    """TriForce: chunks of eight by the last query and their mean key, and the first chunk."""
    n_kv_heads, n_tokens, head_dim = keys.shape
    means = keys[:, : n_tokens - n_recent].reshape(n_kv_heads, -1, 8, head_dim).mean(2)
    scores = q[:, -1].view(n_kv_heads, -1, head_dim) @ means.transpose(1, 2) / head_dim**0.5
    scores = scores.softmax(-1).sum(1)
    scores[:, 0] = scores.max() + 1
    chunks = scores.topk(n // 8).indices.sort().values
    return (8 * chunks[..., None] + torch.arange(8)).flatten(1)


def view_of(runner, tokens, kind):
    """A view of the prefilled cache of tokens, brought up to date; its id and itself."""
    id = runner.new_view(prefill(runner, tokens, 256), kind, BUDGET, 8)
    return id, runner._caches[id]


def step_of(runner, id, tokens, n_known):
    """Return logits of the last token and commit the tokens before it."""
    lacking = tokens[n_known:]
    step = Step(id, torch.tensor(lacking), Topology.chain(len(lacking)), 1, len(tokens))
    logits = runner.forward([step])[0][0]
    runner.commit(id, range(len(lacking) - 1))
    return logits


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "llama-tied"])
def test_window_view_equals_streamingllm(zoo, name):
    """Sinks and recent rows, at positions inside the cache."""
    model = zoo.model(name, 0)
    tokens = prompt_of(0, N)
    with open_llm(zoo.directory(name, 0)) as llm:
        runner = llm.engine.runner
        id, view = view_of(runner, tokens[:-1], WindowCache)
        assert runner.rewind(id, tokens[:-1]) == N - 1
        kept = [*range(view.n_kept), *range(view.first_recent, N - 1)]
        assert 3 < view.n_kept < 20 and len(kept) == view.n_held <= BUDGET
        logits = step_of(runner, id, tokens, N - 1)
    keys, values, _ = peer_cache(model, tokens[:-1])
    moved = torch.arange(len(kept)) - torch.tensor(kept)
    cos, sin = model.model.rotary_emb(keys[:, 0], moved[None])
    scale = model.model.rotary_emb.attention_scaling
    keys = keys[:, :, kept] * cos / scale + rotate_half(keys[:, :, kept]) * sin / scale
    expected = peer_logits(model, tokens[-1], len(kept), keys, values[:, :, kept])
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("n", [N, N + 3])
@pytest.mark.parametrize(
    ("kind", "published"), [(SnapKVCache, snapkv_rows), (RetrievalCache, retrieval_rows)]
)
def test_selected_rows_equal_the_published_algorithms(zoo, kind, published, n):
    model = zoo.model("llama", 0)
    tokens = prompt_of(0, n)
    with open_llm(zoo.directory("llama", 0)) as llm:
        runner = llm.engine.runner
        id, view = view_of(runner, tokens[:-1], kind)
        n_known = runner.rewind(id, tokens[:-1])
        # An unfinished selection restarts, for example after a pass without memory.
        assert runner.rewind(id, tokens[:-1]) == n_known == view.first_recent < n - 1
        logits = step_of(runner, id, tokens, n_known)
        torch.testing.assert_close(logits, logits_of(model, tokens)[-1], atol=1e-4, rtol=1e-3)
        assert runner.rewind(id, tokens[:-1]) == n - 1 == view.n_committed
        # A token later: chosen rows, then all from the recent ones on.
        step = Step(id, torch.tensor([tokens[-1], 5]), Topology.chain(2), 1, n + 1, n_done=1)
        logits = runner.forward([step])[0][0]
    keys, values, queries = peer_cache(model, tokens)
    recent = torch.arange(n_known, n).expand(len(keys[0]), -1)
    layers = zip(keys, queries, strict=True)
    chosen = (published(*layer, view.n_kept, n - n_known) for layer in layers)
    at = torch.stack([torch.cat((rows, recent), 1) for rows in chosen])
    at = at[..., None].expand(-1, -1, -1, keys.shape[-1])
    expected = peer_logits(model, 5, n, keys.gather(2, at), values.gather(2, at))
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)


PROMPTS = [prompt_of(seed, n) for seed, n in enumerate((9, 90, 40, 61))]


@pytest.mark.parametrize(
    ("family", "drafter"), [*(("llama", drafter) for drafter in LONG), ("mistral", "self_window")]
)
def test_greedy_tokens_beyond_the_budget_equal_transformers(zoo, monkeypatch, family, drafter):
    """At a tree's start, a view copies committed rows only."""
    pair = zoo.pair(family, 0)
    seen = []

    def check_view(state, tokens):
        view = state._runner._caches[state.cache]
        if isinstance(view, (WindowCache, SnapKVCache, RetrievalCache)):
            n = view.n_committed
            assert view.n_held <= view.budget and (n == len(tokens) - 1 or view.n_seen == n)
            pairs = zip(vars(view.buffer).values(), vars(view.source.buffer).values(), strict=True)
            for mine, theirs in pairs:
                recent = mine[:, :, view.n_kept : view.n_held]
                assert torch.equal(recent, theirs[:, :, view.first_recent : n])
                mine[:, :, view.n_held :] = torch.nan
            seen.append((n, view.first_recent))

    after_start(monkeypatch, check_view)
    settings = pair.settings(drafter) | {
        "tree_size": 24, "tree_depth": 5, "max_model_len": 256, "draft_context": 40,
    }  # fmt: skip
    with open_llm(pair.target, **settings) as llm:
        llm.engine.scheduler = type(llm.engine.scheduler)(10_000, 24)
        llm.engine.drafter._model.n_rows = 1000
        outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=60))
    assert_continued(outputs, pair.model, PROMPTS, 60)
    assert min(output.stats.tokens_per_pass for output in outputs) > 1
    assert max(n for n, _ in seen) > 130
    assert len({first for _, first in seen}) > 8, "views were filled anew"


# TriForce: its chains are enumerated in test_drawn_trees.py


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("models", "n_prompt"), [("pair", 70), ("twin", 20)])
def test_triforce_guesses_save_passes_and_keep_the_trees(
    request, monkeypatch, models, n_prompt, temperature
):
    """Whether they are right sometimes or always."""
    pair = request.getfixturevalue(models)
    with open_llm(pair.target, draft_model=str(pair.draft)) as llm:
        params = SamplingParams(30, temperature, seed=3)
        limits = DraftLimits(30, 12, fixed_size=True)
        results = []
        for guesses in (True, False):
            drafter = drafter_of(llm, "triforce", "coupled", limits, level_s=0.0)
            if not guesses:
                drafter._dynamic = DynamicTreeBuilder
                drafter._grow = drafter._model.grow
            sequences = [Sequence(prompt_of(seed, n_prompt, 64), params, 200) for seed in (0, 1)]
            begin(llm, drafter, sequences, 30)
            with monkeypatch.context() as patch:
                forward = Mock(wraps=llm.engine.runner.forward)
                patch.setattr(llm.engine.runner, "forward", forward)
                results.append((drafter.propose(sequences, 30), forward.call_count))
    (trees, n_passes), (expected, n_plain) = results
    for tree, other in zip(trees, expected, strict=True):
        assert torch.equal(tree.tokens, other.tokens) and len(tree.tokens) == 30
        assert tree.topology.parents.tolist() == other.topology.parents.tolist()
    assert n_passes < n_plain or models == "pair"


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize(("far_s", "pays"), [(1.01, False), (6.0, True)])
def test_no_tree_if_a_level_costs_a_pass(pair, name, far_s, pays):
    """The cost model knows pass times of few and many rows."""
    compute = ComputeTimes((1, 64), (64, 150), ((1.0, 1.1), (far_s, 1.1 * far_s)))
    profile = MachineProfile((), 1e-9, 0.0, compute)
    sequences = [Sequence(prompt_of(seed, 150), SamplingParams(30), 200) for seed in (0, 1)]
    with open_llm(pair.target, draft_model=str(pair.draft)) as llm:
        drafter = drafter_of(llm, name, "traversal", DraftLimits(16, 8))
        drafter._cost = CostEstimator(profile, PassBytes((), 1), 0, 32)
        begin(llm, drafter, sequences, 16)
        trees = drafter.propose(sequences, 16)
    assert all((len(tree.tokens) > 1) == pays for tree in trees)


def test_sequences_beyond_the_views_decode_plainly(pair):
    settings = {"drafter": "self_window", "draft_context": 32, "max_model_len": 64, "tree_size": 8}
    prompts = [prompt_of(seed, 40) for seed in range(3)]
    with open_llm(pair.target, **settings) as llm:
        llm.engine.scheduler = type(llm.engine.scheduler)(10_000, 24)
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=20))
        llm.engine.scheduler = type(llm.engine.scheduler)(10_000, 8)
        again = llm.generate(prompts[2], SamplingParams(max_new_tokens=20))[0]
    assert_continued(outputs, pair.model, prompts, 20)
    assert outputs[0].stats.n_passes < 20 == outputs[2].stats.n_passes > again.stats.n_passes


SETTINGS = {"device": "cpu", "drafter": "self", "tree_size": 12, "max_model_len": 96}


@pytest.mark.numeric
@pytest.mark.parametrize(("name", "n_resident"), [("llama", 0), ("qwen2", 0), ("llama", 1)])
def test_text_equals_plain_decoding(zoo, name, n_resident):
    """With a number of resident layers beside three slots and the copies."""
    directory = str(zoo.directory(name, 0))
    with pytest.raises(CapacityError) as refused:
        LLM(directory, device_memory=1, **SETTINGS)
    least = int(str(refused.value).split("(")[1].split()[0])
    slot = open_unloaded(directory, device="cpu").plan.slot_nbytes
    settings = SETTINGS | {"device_memory": least + (1 + n_resident) * slot}
    prompts = [prompt_of(0, 12), prompt_of(1, 20)]
    with LLM(directory, **settings) as llm:
        assert llm.plan.device_nbytes <= llm.plan.budget.device
        assert llm.plan.tiers.count("device") == n_resident and llm.plan.copies_nbytes > 0
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=16))
        table = placement_table("", llm.plan, llm.spec.memory.cache_rows)
        assert "4-bit copies of the other layers" in list(table.columns[0].cells)
    assert_continued(outputs, zoo.model(name, 0), prompts, 16)
    told = []
    with open_unloaded(directory, **settings) as llm:
        llm.load(progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[-1][0] == told[0][1], "reads for copies count as loaded"
