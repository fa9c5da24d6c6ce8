"""A failing sequence ends alone; out of memory, trees and chunks shrink and no token is lost."""

import asyncio
import gc
import re
import weakref
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from support.fake_gpu import fake_gpu
from support.tiny import assert_continued, generate, open_llm, prompt_of

from offload_rt import LLM, SamplingParams
from offload_rt.engine import engine as engine_module
from offload_rt.errors import DeviceError, NumericsError
from offload_rt.executor.sequence import Sequence
from offload_rt.text.detokenize import TextStream

PROMPTS = [prompt_of(seed, n) for seed, n in ((0, 21), (1, 9), (2, 30))]
PARAMS = SamplingParams(max_tokens=12, temperature=0)

pytestmark = pytest.mark.usefixtures("steady")


def spoil(llm, monkeypatch, prompt, after):
    """Replace a prompt's logits by NaN after some tokens; return weak references to them."""
    forward = llm.engine.runner.forward
    spoiled = []

    def spoiling(steps):
        sequences = {running.cache: running.sequence for running in llm.engine._running}
        logits = forward(steps)
        for i, step in enumerate(steps):
            sequence = sequences[step.cache]
            if sequence.tokens[: len(prompt)] == prompt and sequence.n_new >= after:
                logits[i] = logits[i] * torch.nan
                spoiled.append(weakref.ref(logits[i]))
        return logits

    monkeypatch.setattr(llm.engine.runner, "forward", spoiling)
    return spoiled


def sequences(*prompts):
    return [Sequence([*prompt], PARAMS, 128) for prompt in prompts]


def run(llm, several):
    """All of them, to their ends."""
    for sequence in several:
        llm.engine.add(sequence)
    while any(sequence.finish_reason is None for sequence in several):
        llm.engine.step()
    return [sequence.tokens[sequence.n_prompt :] for sequence in several]


def assert_released(llm):
    """Assert that no sequence runs and that no cache remains after a reset of the prefix cache."""
    llm._open_thread._thread.submit(lambda: None).result()  # after all queued tasks
    assert llm.engine.n_running == llm.engine.n_waiting == 0
    llm.engine.reset_prefix_cache()
    assert not llm.engine.runner._caches and not (llm.engine.draft and llm.engine.draft._caches)


@pytest.mark.parametrize(("device", "drafter", "after"), [
    ("cpu", "none", 3), ("cpu", "recycle", 0), ("cpu", "adaptive_tree", 0),
    ("cpu", "adaptive_tree", 3), ("cuda", "none", 3), ("cuda", "adaptive_tree", 3),
    ("kernels", "none", 3),
])  # fmt: skip
def test_nan_logits_end_their_sequence_alone(pair, monkeypatch, device, drafter, after):
    expected = [generate(pair.model, prompt, 12) for prompt in PROMPTS]
    settings = {"max_model_len": 128, "max_num_seqs": 3, **pair.settings(drafter)}
    settings |= {} if drafter == "none" else {"tree_size": 8}
    card = nullcontext()
    if device != "cpu":
        card = fake_gpu(monkeypatch, has_kernels=device == "kernels")
        device = "cuda"
    with card, LLM(str(pair.target), device=device, **settings) as llm:
        with monkeypatch.context() as patch:
            spoiled = spoil(llm, patch, PROMPTS[1], after)
            read = Mock(wraps=llm.engine.drafter.read)
            patch.setattr(llm.engine.drafter, "read", read)
            gc.disable()
            first, wrong, last = several = sequences(*PROMPTS)
            outputs = run(llm, several)
            assert isinstance(wrong.error, NumericsError) and wrong.finish_reason == "error"
            assert outputs[::2] == expected[::2] and outputs[1] == expected[1][: len(outputs[1])]
            assert first.error is None is last.error and len(outputs[1]) >= after
            assert spoiled and not any(reference() is not None for reference in spoiled), (
                "the error holds no memory of the device"
            )
            gc.enable()
            assert read.call_count == (0 if drafter == "none" else 3 if after else 2)
            assert all(call.args[1].probs.isfinite().all() for call in read.call_args_list)
            # its rows may be no numbers
            assert wrong not in [kept.sequence for kept in llm.engine._kept]
            with pytest.raises(NumericsError, match="contain NaN or Inf"):
                llm.generate(PROMPTS, PARAMS)
            with pytest.raises(NumericsError, match="contain NaN or Inf"):
                list(llm.stream(PROMPTS[1], PARAMS))
        assert run(llm, sequences(*PROMPTS)) == expected
        assert_released(llm)


def test_error_of_a_task_does_not_reach_other_tasks(speaking, monkeypatch):
    """Its sampling, its text and the log-probabilities of its prompt."""

    def break_for(owner, name, is_wrong):
        plain = getattr(owner, name)

        def broken(first, second, *others):
            if is_wrong(first, second):
                raise ZeroDivisionError(name)
            return plain(first, second, *others)

        monkeypatch.setattr(owner, name, broken)

    with open_llm(speaking, max_num_seqs=4) as llm:
        more = ({}, {"logit_bias": {3: 1.0}}, {"stop": "none such"}, {"prompt_logprobs": 2})
        params = [replace(PARAMS, **changes) for changes in more]
        prompts = ["the fox", "a dog", "the quick", "jumps"]
        expected = llm.generate(prompts, params)[0].token_ids
        break_for(engine_module, "NodeProbs", lambda _, sampling: sampling.logit_bias)
        break_for(TextStream, "add", lambda text, _: text._stop and text.text)
        break_for(Sequence, "read", lambda sequence, _: sequence.sampling.prompt_logprobs)

        async def tokens(*request):
            return [token async for piece in llm.astream(*request) for token in piece.token_ids]

        async def together():
            return await asyncio.gather(*map(tokens, prompts, params), return_exceptions=True)

        first, *others = asyncio.run(together())
        assert first == expected
        assert [type(error) for error in others] == [ZeroDivisionError] * 3
        assert [str(error) for error in others] == ["NodeProbs", "add", "read"]
        assert_released(llm)


def test_sequence_too_large_for_memory_ends_alone(zoo, monkeypatch):
    with open_llm(zoo.directory("llama", 0), max_num_seqs=3) as llm:
        forward = llm.engine.runner.forward
        too_long = prompt_of(3, 60)

        def full(steps):
            if any(step.n_prompt == len(too_long) for step in steps):
                raise torch.OutOfMemoryError("no room")
            return forward(steps)

        monkeypatch.setattr(llm.engine.runner, "forward", full)
        _, wrong, _ = several = sequences(PROMPTS[0], too_long, PROMPTS[1])
        expected = [generate(zoo.model("llama", 0), prompt, 12) for prompt in PROMPTS[:2]]
        assert run(llm, several)[::2] == expected
        assert isinstance(wrong.error, DeviceError)
        assert re.search("memory is used up.*max_model_len", str(wrong.error))
        assert_released(llm)


@pytest.fixture
def full(monkeypatch):
    """Raise OutOfMemoryError in passes with more rows per chunk than a limit, or after a pass."""

    def fill(llm, most_rows=10**9, most_probs=10**9):
        runner = llm.engine.runner
        seen = []

        def layers(blocks, hidden, chunks):
            seen.append(max(chunk.rows.stop - chunk.rows.start for chunk in chunks))
            if seen[-1] > most_rows:
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


@pytest.mark.parametrize(("n_prompt", "n_failed", "tokens_per_pass"), [(21, 5, 1.2), (80, 12, 1)])
def test_oom_shrinks_a_large_tree_then_chunks(
    pair, full, capfd, n_prompt, n_failed, tokens_per_pass
):
    prompt = prompt_of(0, n_prompt)
    with open_llm(pair.target, draft_model=str(pair.draft), tree_size=64) as llm:
        seen = full(llm, most_rows=25)
        output = llm.generate(prompt, SamplingParams(max_new_tokens=40))[0]
        assert output.token_ids == generate(pair.model, prompt, 40)
        assert max(seen[n_failed:]) <= 25 and output.stats.tokens_per_pass >= tokens_per_pass
    assert capfd.readouterr().err.count("device memory ran out: trees shrink to 32 nodes") == 1


def test_oom_keeps_verified_sequences_of_the_batch(pair, full):
    with open_llm(pair.target, draft_model=str(pair.draft), tree_size=96, max_model_len=120) as llm:
        full(llm, most_probs=7)
        outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=30))
    assert_continued(outputs, pair.model, PROMPTS, 30)


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
