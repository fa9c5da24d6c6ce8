"""A draft that learns the target's predictions: loss, updates, timing and exact texts."""

from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from support.tiny import (
    assert_continued,
    drafter_of,
    engine_of,
    logits_of,
    nearly,
    open_llm,
    prompt_of,
    save_pair,
)

from offload_rt import SamplingParams
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.executor.sequence import Sequence
from offload_rt.offload.meter import LinkMeter
from offload_rt.sampling import TopTokens, top_tokens
from offload_rt.speculate.learner import Learner, Passage
from offload_rt.system.files import cache_directory

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("empty_cache")]

CHANGED = 0.1


def passage_of(model, seed):
    """Return a random text with a model's predictions after its last 25 tokens."""
    tokens = prompt_of(seed, 40)
    return Passage(torch.tensor(tokens), top_tokens(logits_of(model, tokens)[-25:], 8))


def weights_of(llm):
    return torch.cat([block.data.clone() for block in llm.engine.draft.streamer.sweep()])


def change(learner):
    """Set random values, as after learning."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in learner._parameters().items():
        if name.endswith(".b"):
            parameter.data.copy_(CHANGED * torch.randn(parameter.shape, generator=generator))


def read(learner, passages, waited_s=1e9):
    """Feed passages to a learner, with a given link wait after every layer."""
    learner._new.extend(passages)
    while True:
        before = learner._n_slices
        learner._meter.waited_s += waited_s
        learner.work()
        if learner._n_slices == before:
            return


@contextmanager
def opened(pair):
    """Open a pair, with a learner apart from the engine."""
    with open_llm(pair.target, draft_model=str(pair.draft)) as llm:
        yield llm, Learner(llm.engine.draft, LinkMeter())


def adapted(learner, model):
    """Each matrix of the draft in transformers, with a and b of its change."""
    for i, view in enumerate(learner._layers):
        for name, adapter in view.adapters.items():
            yield model.get_submodule(f"model.layers.{i}.{name}").weight, adapter.a, adapter.b


def cross_entropy(model, passage):
    """Return (m,) float64 cross-entropies over the best tokens and one class for the rest."""
    tokens, probs = passage.labels
    logits = model(passage.tokens[None]).logits[0, -len(tokens) :].double()
    q = logits.softmax(-1).gather(1, tokens)
    return -(probs * q.log()).sum(-1) - (1 - probs.sum(-1)) * (1 - q.sum(-1)).log()


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "qwen2-window", "llama-tied"])
def test_loss_and_gradients_equal_cross_entropy_of_transformers(zoo, name):
    """The gradient of b equals that of b @ a."""
    pair = zoo.pair(name, 0)
    passage = passage_of(pair.model, 7)
    model = nearly(pair.draft_model, 0.0)
    with opened(pair) as (_, learner):
        change(learner)
        without = cross_entropy(model, passage).detach()
        for weight, a, b in adapted(learner, model):
            weight.data += (b @ a).detach()
        changed = cross_entropy(model, passage)
        for is_served in (False, True):
            learner._serve(is_served)
            for share, wanted in ((0.0, without), (1.0, changed.detach())):
                loss = learner.loss(passage, share).double()
                torch.testing.assert_close(loss, wanted, rtol=2e-4, atol=2e-4)
        changed.sum().backward()
        learner.loss(passage, 1.0).sum().backward()
        for weight, a, b in adapted(learner, model):
            torch.testing.assert_close(b.grad, weight.grad @ a.detach().T, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(a.grad, b.detach().T @ weight.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_learning_lowers_the_loss_on_unseen_texts(zoo, tmp_path):
    """The target is the draft with a change of rank two."""
    draft = zoo.pair("llama", 0).model
    target = nearly(draft, 0.0)
    for layer in target.model.layers:
        weight = layer.mlp.down_proj.weight
        weight.data += torch.randn(len(weight), 2) @ torch.randn(2, weight.shape[1])
    pair = save_pair(tmp_path, target, draft)
    passages = [passage_of(pair.model, seed) for seed in range(12)]
    unseen = [passage_of(pair.model, seed) for seed in range(100, 106)]
    with opened(pair) as (llm, learner), torch.no_grad():
        before = weights_of(llm)
        read(learner, passages)
        gains = [learner.loss(text, 0.0).mean() - learner.loss(text, 1.0).mean() for text in unseen]
        assert learner.n_predicted and not torch.equal(weights_of(llm), before)
    assert torch.stack(gains).mean() > 0.1


def test_passage_has_accepted_tokens_and_predictions(pair):
    """No token after the end of the sequence."""
    text = prompt_of(1, 120)
    predicted = TopTokens(torch.arange(120 * 8).view(120, 8) % 128, torch.full((120, 8), 0.1))
    with opened(pair) as (_, learner):
        sequence = Sequence(text[:50], SamplingParams(1000), 118)
        for first in range(49, 119, 10):
            learner.add(sequence, TopTokens(*(part[first : first + 10] for part in predicted)))
            sequence.extend(text[first + 1 : first + 11])
        learner.end(sequence)
    sizes = [(len(passage.tokens), len(passage.labels.tokens)) for passage in learner._new]
    assert sizes == [(89, 40), (118, 29)]
    for passage, last in zip(learner._new, (89, 118), strict=True):
        assert passage.tokens.tolist() == text[max(last - len(passage.tokens), 0) : last]
        for labels, all_of_it in zip(passage.labels, predicted, strict=True):
            assert torch.equal(labels, all_of_it[last - len(labels) : last])


def test_learning_ends_without_gain(pair, monkeypatch):
    """Draft and target are equal: weights stay, and requests for predictions end."""
    monkeypatch.setattr("offload_rt.speculate.learner._PATIENCE", 12)
    with open_llm(pair.target, draft_model=str(pair.target)) as llm:
        learner = Learner(llm.engine.draft, LinkMeter())
        before = weights_of(llm)
        drafter = drafter_of(llm, "static_tree", "match", DraftLimits(8, 4), learner=learner)
        assert drafter.n_predicted == 8
        read(learner, [passage_of(pair.model, seed) for seed in range(40)])
        assert learner.n_predicted == 0 and torch.equal(weights_of(llm), before)
        n_slices = learner._n_slices
        engine = engine_of(llm, drafter, n_nodes=8)
        engine.add(Sequence([1, 2, 3], SamplingParams(30), 64))
        while engine.step():
            pass
        assert drafter.n_predicted == 0 and learner._n_slices == n_slices


def test_learning_uses_only_idle_link_time_and_free_memory(pair, monkeypatch):
    """No learning in waits shorter than a slice; its estimate decays."""
    with opened(pair) as (llm, learner):
        before = weights_of(llm)
        read(learner, [passage_of(pair.model, seed) for seed in range(3)], waited_s=0.0)
        learner._slice_s = 100.0
        read(learner, [], waited_s=99.0)
        assert learner._n_slices == 0
        learner._meter.waited_s += 99.9
        learner.work()
        assert learner._n_slices == 1 and learner._slice_s < 99.0
        learner._slice_s = 50.0
        learner.work()  # the link has not been waited for since
        assert learner._n_slices == 1
        change(learner)
        learner._serve(True)
        monkeypatch.setattr(learner, "loss", Mock(side_effect=torch.OutOfMemoryError))
        read(learner, [])
        assert learner.n_predicted == 0 and torch.equal(weights_of(llm), before)


@pytest.mark.parametrize(
    ("drafter", "place"), [("adaptive_tree", "disk"), ("static_tree", "resident")]
)
def test_greedy_tokens_equal_transformers_while_learning(pair, monkeypatch, steady, drafter, place):
    monkeypatch.setattr("offload_rt.speculate.learner._RATE", CHANGED)
    prompts = [prompt_of(seed, 9) for seed in range(2)]
    with open_llm(pair.target, place, learn_draft="on", **pair.settings(drafter)) as llm:
        before = weights_of(llm)
        learner = llm.engine.drafter._learner

        def meanwhile():
            learner._meter.waited_s += 1e9
            learner.work()

        # It learns and serves at every layer, with or without gain.
        learner._judge = lambda gain: learner._serve(True)
        llm.engine.runner.meanwhile = meanwhile
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=60))
        assert learner._n_slices > 16 and not torch.equal(weights_of(llm), before)
    assert_continued(outputs, pair.model, prompts, 60)


def test_learned_weights_are_kept_for_the_pair(zoo, pair):
    """Served from the next run's first draft on, while they gain."""
    settings = {"draft_model": str(pair.draft), "learn_draft": "keep"}
    with open_llm(pair.target, **settings) as llm:
        learner = llm.engine.drafter._learner
        original = weights_of(llm)
        change(learner)
        learner._serve(True)
        served = weights_of(llm)
    assert not torch.equal(original, served)
    (path,) = cache_directory().glob("draft-*")
    content = path.read_bytes()
    with open_llm(pair.target, **settings) as llm:
        assert torch.equal(weights_of(llm), served)
    for learning in ("on", "off"):
        with open_llm(pair.target, **settings | {"learn_draft": learning}) as llm:
            assert torch.equal(weights_of(llm), original)
    other = str(zoo.pair("llama", 1).draft)
    with open_llm(pair.target, draft_model=other, learn_draft="keep") as llm:
        assert not llm.engine.drafter._learner._serves
    assert [kept.name for kept in cache_directory().glob("*draft-*")] == [path.name]
    assert path.read_bytes() == content
    for damaged in (content[: len(content) // 2], b"", content[:-4] + b"\xff\xff\xff\xff"):
        path.write_bytes(damaged)
        with open_llm(pair.target, **settings) as llm:
            assert torch.equal(weights_of(llm), original)
        assert not path.exists(), "nothing gains: what is kept is gone"
