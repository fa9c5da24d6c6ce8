"""The whole engine on a card, as far as that can be tested without one: see `pretended_card`."""

import pytest
import torch
from pretended_card import CardTensor, pretended_card
from tiny import CASES, COMBINATIONS, Steady, generate, prompt_of

from offload_rt import LLM, SamplingParams, build
from offload_rt.config import EngineConfig
from offload_rt.drafters._parts import Knowledge


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """Trees that do not depend on the clock, nor on what another test learned."""
    monkeypatch.setattr(build, "Pace", lambda profile, moved: Steady())
    monkeypatch.setattr(build, "recall", lambda target, draft: Knowledge())


def on_card(directory, **settings):
    return LLM(str(directory), **{"device": "cuda", "max_model_len": 128} | settings)


def little(directory):
    """A budget that leaves room for two slots and two layers."""
    with LLM.open(EngineConfig(str(directory), device="cuda", max_model_len=128, drafter="none")) as unloaded:
        return unloaded.plan.need.total + 4 * unloaded.plan.slot_nbytes


@pytest.mark.parametrize("where", ["device", "host", "disk", "unpinned"])
@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_transformers(zoo, monkeypatch, name, where):
    directory = zoo.directory(name, 0)
    with pretended_card(monkeypatch, pins=where != "unpinned"):
        budgets = {} if where == "device" else {"device_memory": little(directory)}
        with on_card(directory, drafter="none", **budgets, **({"host_memory": 1} if where == "disk" else {})) as llm:
            assert set(llm.plan.tiers) == {"device", {"unpinned": "host"}.get(where, where)}
            got = llm.generate(prompt_of(0), SamplingParams(max_new_tokens=24))[0].token_ids
    assert got == zoo.greedy(name, 0)[:24]


@pytest.mark.parametrize(("drafter", "rule"), COMBINATIONS)
def test_every_drafter_and_rule(zoo, monkeypatch, drafter, rule):
    pair = zoo.pair("llama", 0)
    with pretended_card(monkeypatch), on_card(pair.target, tree_size=24, **pair.settings(drafter, rule)) as llm:
        got = llm.generate(prompt_of(0), SamplingParams(max_new_tokens=24))[0].token_ids
        drawn = llm.generate([prompt_of(0), prompt_of(1)], SamplingParams(max_new_tokens=12, temperature=0.8, seed=1))
    assert got == generate(pair.model, prompt_of(0), 24)
    assert [len(one.token_ids) for one in drawn] == [12, 12]


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
