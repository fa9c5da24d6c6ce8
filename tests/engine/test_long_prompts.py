"""Long prompts beside decoding sequences: chunks of the prompt per pass, unchanged texts."""

from unittest.mock import Mock

import pytest
from support.heads import HEADS
from support.tiny import generate

from offload_rt import SamplingParams
from offload_rt.executor.sequence import Sequence

pytestmark = pytest.mark.numeric

LONG = [3 + (7 * k * k) % 90 for k in range(100)]


GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=0)


def joined(llm, prompt, prompt_seconds, params=GREEDY):
    """A decoding sequence, and a long prompt that joins it."""
    engine = llm.engine
    engine.prompt_seconds = prompt_seconds
    first = Sequence([1, 2, 3], GREEDY, 256)
    long = Sequence([*prompt], params, 256)
    engine.add(first)
    engine.step()
    engine.add(long)
    return first, long


@pytest.mark.parametrize(
    "kind", ["plain", "recycle", "adaptive_tree", "self_window", "general", *HEADS]
)
def test_long_prompt_is_chunked_while_others_decode(kind, opened, monkeypatch):
    llm, model = opened(kind, max_model_len=256, dtype="float32")
    vocab_size = llm.spec.target.checkpoint.spec.vocab_size
    with llm:
        forward = Mock(wraps=llm.engine.runner.forward)
        monkeypatch.setattr(llm.engine.runner, "forward", forward)
        first, long = several = joined(llm, [token % vocab_size for token in LONG], 0.0)
        while first.finish_reason is None or long.finish_reason is None:
            n_before = first.n_new
            llm.engine.step()
            assert first.n_new > n_before or first.finish_reason, "it waits for the prompt"
    for sequence in several:
        prompt = sequence.tokens[: sequence.n_prompt]
        assert sequence.tokens == prompt + generate(model, prompt, 24)
    passes = [call.args[0] for call in forward.call_args_list]
    assert [steps[-1].n_rows for steps in passes if len(steps) == 2][:3] == [32, 32, 32]
    assert len(long.logprobs) - long.n_prompt == 24 or len(long.logprobs) == 24


def test_chunked_prompt_has_the_same_logprobs(opened):
    llm, _ = opened("plain", max_model_len=256, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    with llm:
        expected = llm.generate(LONG, params)[0].prompt_logprobs
        _, long = joined(llm, LONG, 0.0, params)
        while long.finish_reason is None:
            llm.engine.step()
        llm.engine.abort(1)
    assert len(expected) == len(LONG) and expected[0] is None
    for logprobs, wanted in zip(long.logprobs[1 : len(LONG)], expected[1:], strict=True):
        assert {token: entry.logprob for token, entry in logprobs.items()} == {
            token: pytest.approx(entry.logprob, abs=1e-4) for token, entry in wanted.items()
        }


def test_prompt_takes_one_pass_when_alone_or_in_the_allowed_time(opened):
    llm, _ = opened("plain", max_model_len=256, dtype="float32")
    with llm:
        llm.engine.prompt_seconds = 0.0
        output = llm.generate(LONG, SamplingParams(temperature=0, max_tokens=4))[0]
        assert output.stats.n_passes == 4
        llm.engine.reset_prefix_cache()
        _, long = joined(llm, LONG, 1e6)
        llm.engine.step()
        assert long.n_new == 1
        for id in (1, 2):
            llm.engine.abort(id)
