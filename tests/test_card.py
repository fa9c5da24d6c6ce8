"""The whole engine on a card where there is one, and as far as that can be tested without one: see `pretended_card`."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from pretended_card import CardTensor, pretended_card
from tiny import CASES, Steady, feed, generate, prefill, prompt_of, random_tree

from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.engine import builder
from offload_rt.offload.memory import MemoryTier
from offload_rt.speculate.pair_stats import PairStats


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """Trees that do not depend on the clock, nor on what another test learned."""
    monkeypatch.setattr(builder, "CostEstimator", lambda profile, moved: Steady())
    monkeypatch.setattr(PairStats, "load", lambda *_: PairStats())


@pytest.fixture(params=["pretended", "real"])
def card(request, monkeypatch) -> Callable[..., AbstractContextManager[None]]:
    """Sees to it that there is a card, and one that refuses to pin memory if it is to."""
    if request.param == "pretended":
        yield lambda pins=True: pretended_card(monkeypatch, pins=pins)
        return
    if not torch.cuda.is_available():
        pytest.skip("there is no card")

    def real(pins: bool = True) -> AbstractContextManager[None]:
        if not pins:
            monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 1)
        return nullcontext()

    yield real


def on_card(directory, **settings):
    return LLM(str(directory), **{"device": "cuda", "max_model_len": 128} | settings)


def little(directory):
    """A budget that leaves room for two slots and two layers."""
    with LLM.open(EngineConfig(str(directory), device="cuda", max_model_len=128, drafter="none")) as unloaded:
        return unloaded.plan.reserved.total + 4 * unloaded.plan.slot_nbytes


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("llama", "device"), ("qwen2-window", "device"), ("qwen3", "device"), ("llama", "host"), ("mistral", "host"),
        ("qwen3-window", "disk"), ("qwen2", "disk"), ("llama-dynamic", "unpinned"),
    ],
)  # fmt: skip
def test_greedy_tokens_are_transformers(zoo, card, name, where):
    directory = zoo.directory(name, 0)
    with card(pins=where != "unpinned"):
        budget = {} if where == "device" else {"device_memory": little(directory)}
        with on_card(directory, drafter="none", **budget, **({"host_memory": 1} if where == "disk" else {})) as llm:
            assert set(llm.plan.tiers) == {"device", {"unpinned": "host"}.get(where, where)}
            got = llm.generate(prompt_of(0), SamplingParams(max_new_tokens=24))[0].token_ids
    assert got == zoo.greedy(name, 0)[:24]


@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        ("none", "match"), ("ngram", "match"), ("dynamic_tree", "match"), ("adaptive_tree", "coupled"),
        ("static_tree", "traversal"), ("static_tree", "sequoia"), ("static_tree", "specinfer"), ("static_tree", "match"),
    ],
)  # fmt: skip
def test_every_drafter_and_rule(zoo, card, drafter, rule):
    """One prompt after the other, for what is captured for one ends with it; then two at once."""
    pair, size = zoo.pair("llama", 0), {} if drafter == "none" else {"tree_size": 24}
    with card(), on_card(pair.target, **size, **pair.settings(drafter, rule)) as llm:
        params = SamplingParams(max_new_tokens=16)
        found = [llm.generate(prompt_of(seed), params)[0].token_ids for seed in (0, 1)]
        is_sampled = llm.generate(
            [prompt_of(0), prompt_of(1)], SamplingParams(max_new_tokens=12, temperature=0.8, seed=1)
        )
    assert found == [generate(pair.model, prompt_of(seed), 16) for seed in (0, 1)]
    assert [len(one.token_ids) for one in is_sampled] == [12, 12]


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
def test_a_model_that_the_kernels_serve_strays_no_further_than_rounding_does(tmp_path, card, heads):
    """Prompt, trees and what is captured of them, in bfloat16 with heads of 64 columns."""
    n_heads, n_kv_heads = heads
    sizes = {"head_dim": 64, "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads}
    model = CASES["llama"].build(0, **sizes)
    model.save_pretrained(tmp_path)
    exact, rounded = (
        [one.cpu().float() for one in logits_on("cpu", tmp_path, dtype)] for dtype in ("float32", "bfloat16")
    )
    with card():
        found = [one.cpu().float() for one in logits_on("cuda", tmp_path, "bfloat16")]
    for mine, its, probs in zip(found, rounded, exact, strict=True):
        assert (mine - probs).abs().mean() < 1.5 * (its - probs).abs().mean() + 1e-3


def test_closing_lets_go_of_what_was_captured(zoo, card):
    """At once, not when Python looks for circles: it holds the weights."""
    pair = zoo.pair("llama", 0)
    gc.collect()
    gc.disable()
    try:
        with card(), on_card(pair.target, tree_size=8, **pair.settings("static_tree", "sequoia")) as llm:
            llm.generate(prompt_of(0), SamplingParams(max_new_tokens=8))
            held = [weakref.ref(runner) for runner in (llm.engine.runner, llm.engine.draft)]
        del llm
        assert [one() for one in held] == [None, None]
    finally:
        gc.enable()


def test_closing_lets_go_of_the_memory_of_the_host(zoo, card):
    """At once as well, and also of what was streamed: threads had to do with it."""
    directory = zoo.directory("llama", 0)
    gc.collect()
    gc.disable()
    try:
        with card(), on_card(directory, drafter="none", device_memory=little(directory)) as llm:
            llm.generate(prompt_of(0), SamplingParams(max_new_tokens=4))
            tiers = {tier for tier in llm.engine.runner.streamer._sources.streamed if isinstance(tier, MemoryTier)}
            held = [weakref.ref(image.block) for tier in tiers for image in tier._images.values()]
            del tiers
        del llm
        assert held and not any(one() for one in held)
    finally:
        gc.enable()


def test_the_cap_on_the_cards_memory_ends_with_the_engine(zoo, card):
    directory = zoo.directory("llama", 0)
    with card():
        before = torch.cuda.get_per_process_memory_fraction()
        with on_card(directory, drafter="none", device_memory=little(directory)):
            assert torch.cuda.get_per_process_memory_fraction() < before
        assert torch.cuda.get_per_process_memory_fraction() == before


def logits_on(device, directory, dtype):
    """Of trees below a prompt, each pass made often enough to be captured and replayed."""
    with LLM(str(directory), device=device, dtype=dtype, drafter="ngram", tree_size=32, max_model_len=192) as llm:
        runner, found = llm.engine.runner, []
        cache = prefill(runner, prompt_of(0, 40), 180)
        for seed in (0, 1, 2, 0, 1):
            found.append(feed(runner, cache, prompt_of(seed, 23), random_tree(23, seed, 6)).clone())
            runner.discard(cache)
        return found


def test_a_tensor_of_the_host_does_not_mix(monkeypatch):
    """The pretended card notices what a card would."""
    with pretended_card(monkeypatch):
        on_device = torch.ones(3, device="cuda")
        assert isinstance(on_device, CardTensor) and on_device.device.type == "cuda"
        with pytest.raises(AssertionError, match="two devices"):
            on_device + torch.ones(3)
        with pytest.raises((TypeError, RuntimeError)):
            on_device.numpy()
        with pytest.raises(AssertionError, match="generator"):
            torch.rand(3, device="cuda", generator=torch.Generator())
        assert on_device.cpu().numpy().tolist() == [1, 1, 1]
