"""Long prompts beside decoding sequences: chunks of the prompt per pass, unchanged texts."""

import pytest
from support.heads import HEADS
from support.tiny import generate

from offload_rt import SamplingParams
from offload_rt.executor.sequence import Sequence

pytestmark = pytest.mark.numeric

LONG = [3 + (7 * k * k) % 90 for k in range(100)]


@pytest.mark.parametrize(
    "kind", ["plain", "recycle", "adaptive_tree", "self_window", "general", *HEADS]
)
def test_long_prompt_is_chunked_while_others_decode(kind, opened, monkeypatch):
    llm, model = opened(kind, max_model_len=256, dtype="float32")
    rows = []
    with llm:
        engine = llm.engine
        forward = llm.engine.runner.forward
        monkeypatch.setattr(
            engine.runner,
            "forward",
            lambda steps: rows.append([s.n_rows for s in steps]) or forward(steps),
        )
        engine.prompt_seconds = 0.0
        vocab = llm.spec.target.checkpoint.spec.vocab_size
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
        first = Sequence([1, 2, 3], params, 256)
        long = Sequence([token % vocab for token in LONG], params, 256)
        engine.add(first)
        engine.step()
        engine.add(long)
        while first.finish_reason is None or long.finish_reason is None:
            n_before = first.n_new
            engine.step()
            assert first.n_new > n_before or first.finish_reason, (
                "it goes on while the prompt is computed"
            )
    for sequence in (first, long):
        assert sequence.tokens == sequence.tokens[: sequence.n_prompt] + generate(
            model, sequence.tokens[: sequence.n_prompt], 24
        )
    assert [step[-1] for step in rows if len(step) == 2][:3] == [32, 32, 32]
    assert len(long.logprobs) - long.n_prompt == 24 or len(long.logprobs) == 24


def test_chunked_prompt_has_the_same_logprobs(opened):
    llm, _ = opened("plain", max_model_len=256, dtype="float32")
    with llm:
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
        expected = llm.generate(LONG, params)[0].prompt_logprobs
        engine = llm.engine
        engine.prompt_seconds = 0.0
        first = Sequence([1, 2], SamplingParams(temperature=0, max_tokens=40), 256)
        long = Sequence([*LONG], params, 256)
        engine.add(first)
        engine.step()
        engine.add(long)
        while long.finish_reason is None:
            engine.step()
        engine.abort(1)
    assert len(expected) == len(LONG) and expected[0] is None
    for logprobs, wanted in zip(long.logprobs[1 : len(LONG)], expected[1:], strict=True):
        assert logprobs.keys() == wanted.keys()
        assert all(
            logprobs[token].logprob == pytest.approx(wanted[token].logprob, abs=1e-4)
            for token in wanted
        )


def test_prompt_takes_one_pass_when_alone(opened):
    llm, _ = opened("plain", max_model_len=256, dtype="float32")
    with llm:
        llm.engine.prompt_seconds = 0.0
        output = llm.generate(LONG, SamplingParams(temperature=0, max_tokens=4))[0]
    assert output.stats.n_passes == 4


def test_prompt_chunks_fill_the_allowed_time(opened):
    llm, _ = opened("plain", max_model_len=256, dtype="float32")
    with llm:
        engine = llm.engine
        engine.prompt_seconds = 1e6
        first, long = (
            Sequence(prompt, SamplingParams(temperature=0, max_tokens=9), 256)
            for prompt in ([1, 2], [*LONG])
        )
        engine.add(first)
        engine.step()
        engine.add(long)
        engine.step()
        assert long.n_new == 1
        engine.abort(1)
        engine.abort(2)
