"""Out of device memory, trees and chunks shrink and no token is lost."""

import pytest
import torch
from support.tiny import assert_continued, generate, open_llm, prompt_of

from offload_rt import SamplingParams
from offload_rt.engine import engine as engine_module
from offload_rt.errors import DeviceError


@pytest.fixture
def full(monkeypatch):
    """Raise OutOfMemoryError in passes with more rows per chunk than a limit, or after a pass."""

    def fill(llm, most_rows=10**9, most_probs=10**9, n_good=0):
        runner = llm.engine.runner
        seen = []

        def layers(blocks, hidden, chunks):
            seen.append(max(chunk.rows.stop - chunk.rows.start for chunk in chunks))
            if len(seen) > n_good and seen[-1] > most_rows:
                raise torch.OutOfMemoryError("no room for activations")
            return type(runner).layers(runner, blocks, hidden, chunks)

        def probs(logits, *others):
            if len(logits) > most_probs:
                raise torch.OutOfMemoryError("no room for distributions")
            return plain(logits, *others)

        plain = engine_module.NodeProbs
        monkeypatch.setattr(runner, "layers", layers)
        monkeypatch.setattr(engine_module, "NodeProbs", probs)
        return seen

    return fill


def test_oom_shrinks_a_large_tree(pair, full, capfd):
    with open_llm(pair.target, draft_model=str(pair.draft), tree_size=64) as llm:
        seen = full(llm, most_rows=25)
        output = llm.generate(prompt_of(0), SamplingParams(max_new_tokens=40))[0]
        assert output.token_ids == generate(pair.model, prompt_of(0), 40)
        assert max(seen[5:]) <= 25 and output.stats.tokens_per_pass > 1.2
        # The next run asks for as much as ever.
        llm.generate(prompt_of(0), SamplingParams(max_new_tokens=2))
        assert max(seen) > 25
    assert capfd.readouterr().err.count("device memory ran out: trees shrink to 32 nodes") == 1


def test_oom_keeps_verified_sequences_of_the_batch(pair, full):
    prompts = [prompt_of(seed, n) for seed, n in ((0, 21), (1, 9), (2, 30))]
    with open_llm(pair.target, draft_model=str(pair.draft), tree_size=96, max_model_len=120) as llm:
        full(llm, most_probs=7)
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=30))
    assert_continued(outputs, pair.model, prompts, 30)


def test_oom_prefills_in_smaller_chunks(zoo, full):
    with open_llm(zoo.directory("llama", 0)) as llm:
        seen = full(llm, most_rows=40)
        output = llm.generate(prompt_of(0, 100), SamplingParams(max_new_tokens=8))[0]
    assert output.token_ids == generate(zoo.model("llama", 0), prompt_of(0, 100), 8)
    assert max(seen[-6:]) <= 40


def test_oom_pauses_the_newest_sequence(zoo, monkeypatch):
    prompts = [prompt_of(0), prompt_of(1)]
    with open_llm(zoo.directory("llama", 0)) as llm:
        forward = llm.engine.runner.forward
        seen = []

        def alone(steps):
            seen.append(llm.engine.is_short)
            if len(steps) > 1:
                raise torch.OutOfMemoryError("no room for two")
            return forward(steps)

        monkeypatch.setattr(llm.engine.runner, "forward", alone)
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=6))
        assert True in seen and not llm.engine.is_short
    assert_continued(outputs, zoo.model("llama", 0), prompts, 6)


def test_oom_without_remedy_keeps_the_tokens(zoo, full):
    with open_llm(zoo.directory("llama", 0)) as llm:
        full(llm, most_rows=0, n_good=3)
        pieces = llm.stream(prompt_of(0), SamplingParams(max_new_tokens=8))
        first = [next(pieces).token_ids[0] for _ in range(3)]
        with pytest.raises(DeviceError, match=r"memory is used up.*max_model_len"):
            next(pieces)
    assert first == zoo.greedy("llama", 0, 3)
