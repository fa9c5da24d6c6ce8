"""Features of vLLM's API: log-probabilities, n, defaults, prompt types, asyncio."""

import asyncio
import json
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.serving import engine_held, wait_until
from support.tiny import assert_continued, keep_steady, logits_of, open_llm, prompt_of

from offload_rt import LLM, SamplingParams
from offload_rt.errors import CheckpointError, PromptError, SettingsError
from offload_rt.weights.files import sampling_defaults

PROMPTS = [prompt_of(seed, n) for seed, n in enumerate((9, 1, 150))]


@pytest.fixture(scope="module")
def llm(pair):
    """With trees of a fixed size, so that a seed makes a text."""
    with pytest.MonkeyPatch.context() as patch:
        keep_steady(patch)
        settings = {"max_model_len": 256, "tree_size": 16, "rule": "coupled"}
        with open_llm(pair.target, draft_model=str(pair.draft), **settings) as llm:
            yield llm


def assert_logprobs(logprobs, tokens, rows, k):
    """Of the model's raw distribution after each of the rows of logits, by transformers."""
    probs = torch.log_softmax(rows.double(), -1)
    for by_id, token, row in zip(logprobs, tokens, probs, strict=True):
        assert by_id[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert by_id[token].rank == 1 + int((row > row[token] + 1e-6).sum())
        best = sorted((id for id in by_id if by_id[id].rank <= k), key=lambda id: by_id[id].rank)
        assert best == row.topk(k).indices.tolist() and len(by_id) <= k + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_equal_the_taken_tokens(llm, pair, temperature):
    """Trees produce several tokens at once, and the last pass more than required."""
    params = SamplingParams(max_tokens=11, temperature=temperature, top_k=9, seed=1)
    several = [replace(params, logprobs=k) for k in (0, 2, 5)]
    outputs = llm.generate(PROMPTS, several)
    assert any(output.stats.n_passes < 11 for output in outputs)
    for output, asked in zip(outputs, several, strict=True):
        prompt = output.prompt_token_ids
        logits = logits_of(pair.model, prompt + output.token_ids)[len(prompt) - 1 : -1]
        assert_logprobs(output.logprobs, output.token_ids, logits, asked.logprobs)
        assert output.prompt_logprobs is None


@pytest.mark.parametrize("drafter", ["none", "recycle", "dynamic_tree"])
def test_prompt_logprobs_are_computed_in_chunks_of_the_prefill(pair, drafter, monkeypatch):
    with open_llm(pair.target, max_model_len=256, **pair.settings(drafter)) as llm:
        spec = type(llm.engine.runner.spec)
        widths = []
        head = spec.head
        monkeypatch.setattr(
            spec, "head", lambda self, weights, x: widths.append(len(x)) or head(self, weights, x)
        )
        asked = llm.generate(PROMPTS, SamplingParams(max_tokens=3, prompt_logprobs=2))
        plain = llm.generate(PROMPTS, SamplingParams(max_tokens=3))
    for output, without in zip(asked, plain, strict=True):
        assert output.token_ids == without.token_ids
        assert output.logprobs is without.prompt_logprobs is None
        first, *logprobs = output.prompt_logprobs
        assert first is None
        prompt = output.prompt_token_ids
        assert_logprobs(logprobs, prompt[1:], logits_of(pair.model, prompt)[:-1], 2)
    assert max(widths) <= 64 and sum(widths) >= sum(len(prompt) - 1 for prompt in PROMPTS)


def test_end_tokens_of_sampling_and_of_the_model(zoo, tmp_path):
    """A stop token ends a text like an end token, which can be ignored; min_tokens delays both."""
    text = zoo.greedy("llama", 0)
    path = tmp_path / "ends"
    n_stop, n_end = (next(n for n in range(at, 64) if text.index(text[n]) == n) for at in (6, 15))
    shutil.copytree(zoo.directory("llama", 0), path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": text[n_end]}))
    with open_llm(path) as llm:

        def run(**settings):
            output = llm.generate(prompt_of(0), SamplingParams(**settings))[0]
            return output.token_ids, output.finish_reason

        assert run() == run(min_tokens=n_end) == (text[: n_end + 1], "stop")
        assert run(stop_token_ids=[text[n_stop]]) == (text[: n_stop + 1], "stop")
        assert run(ignore_eos=True) == (text, "length")
        endless, _ = run(max_tokens=None, ignore_eos=True)
        assert endless[:64] == text and len(endless) == llm.max_model_len - len(prompt_of(0))
        later, _ = run(min_tokens=n_end + 1)
        assert later[:n_end] == text[:n_end] and later[n_end] != text[n_end]
        assert len(later) > n_end + 1


def test_stop_string_counts_after_min_tokens(speaking):
    with open_llm(speaking) as llm:
        plain = llm.generate("the fox", SamplingParams(max_tokens=30, logprobs=2))[0]
        entries = [entry for by_id in plain.logprobs for entry in by_id.items()]
        assert all(each.decoded_token == llm.tokenizer.decode([id]) for id, each in entries)
        stop = plain.text[0]
        ids = plain.token_ids
        texts = [llm.tokenizer.decode(ids[:i], skip_special_tokens=True) for i in range(31)]
        for n in (0, 5, 30):
            params = SamplingParams(max_tokens=30, stop=stop, min_tokens=n)
            got = llm.generate("the fox", params)[0]
            ends = [i for i in range(n + 1, 31) if stop in texts[i][len(texts[i - 1]) :]]
            expected = (ends[0], "stop") if ends else (30, "length")
            assert (len(got.token_ids), got.finish_reason) == expected


def test_n_answers_equal_their_seeds(llm):
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5, logprobs=1, prompt_logprobs=1)
    whole = llm.generate(PROMPTS[0], replace(params, n=3))[0]
    alone = [llm.generate(PROMPTS[0], replace(params, seed=seed))[0] for seed in (5, 6, 7)]
    assert [output.token_ids for output in whole.outputs] == [output.token_ids for output in alone]
    assert [output.index for output in whole.outputs] == [0, 1, 2] and whole.outputs[0] is whole
    *most, last = pieces = list(llm.stream(PROMPTS[0], replace(params, n=3)))
    assert last.output is not None and not any(piece.output for piece in most)
    assert [piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs] == [
        output.prompt_logprobs for output in whole.outputs
    ]
    for output in whole.outputs:
        mine = [piece for piece in pieces if piece.index == output.index]
        assert [token for piece in mine for token in piece.token_ids] == output.token_ids
        assert [by_id for piece in mine for by_id in piece.logprobs] == output.logprobs
        reasons = [piece.finish_reason for piece in mine]
        assert reasons == [None] * (len(mine) - 1) + [output.finish_reason]
    with pytest.raises(SettingsError, match="n is 2"):
        llm.generate(PROMPTS[0], SamplingParams(n=2))
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=None, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine._running and not llm.engine._waiting


@pytest.mark.parametrize(("file", "expected"), [
    (None, {}), ({"eos_token_id": 3}, {}),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20},
        {"temperature": 0.6, "top_p": 0.9, "top_k": 20}),
    ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"top_p": 0.9}),
    ({"temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"do_sample": True, "top_k": None}, {"temperature": 1.0}),
    *((wrong, None) for wrong in (
        {"top_p": "high"}, {"repetition_penalty": -1}, {"do_sample": True, "temperature": [1]})),
])  # fmt: skip
def test_default_params_come_from_generation_config(file, expected, tmp_path):
    if file is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(file))
    if expected is not None:
        assert sampling_defaults(tmp_path) == SamplingParams(**expected)
    else:
        with pytest.raises(CheckpointError, match=f"generation_config.json: {list(file)[-1]}"):
            sampling_defaults(tmp_path)


def test_unset_params_follow_the_model(zoo, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(zoo.directory("llama", 0), path)
    given = {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.5}
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, **given}))
    with open_llm(zoo.directory("llama", 0)) as plain, open_llm(path) as llm:

        def text(llm, **params):
            params = SamplingParams(max_tokens=20, seed=3, **params)
            return llm.generate(prompt_of(0), params)[0].token_ids

        assert text(llm) == text(plain, **given)
        assert text(llm, temperature=0.0) == text(plain, temperature=0.0, repetition_penalty=1.5)
        assert text(llm, top_p=1.0, repetition_penalty=1.0) == text(plain, temperature=0.9)
        assert llm.get_default_sampling_params() == SamplingParams(**given)


def test_prompts_can_be_texts_or_ids(speaking):
    params = SamplingParams(max_tokens=4)
    with open_llm(speaking) as llm:
        ids = llm.encode("the quick fox")
        expected = llm.generate("the quick fox", params)[0].token_ids
        forms = list, tuple, np.array, np.int32, torch.tensor, lambda ids: list(np.array(ids))
        prompts = [form(ids) for form in forms]
        prompts += [{"prompt": "the quick fox"}, {"prompt_token_ids": ids}]
        for given, n in (*((each, 1) for each in prompts), (prompts, len(prompts)),
                         (torch.tensor([ids, ids]), 2), ([], 0)):  # fmt: skip
            assert [got.token_ids for got in llm.generate(given, params)] == [expected] * n
        pieces = [piece for _, piece in llm.stream_all("the quick fox", params)]
        assert [token for piece in pieces for token in piece.token_ids] == expected
        arrays = [torch.tensor([1.0]), np.array(3)]
        for wrong in (None, 5, 1.5, b"text", [1, "x"], [1.5], [[1, 2], None], [[[1]]], *arrays):
            with pytest.raises(PromptError) as caught:
                llm.generate(wrong, params)
            assert "needs a text, or whole numbers" in str(caught.value)
            assert "\n" not in str(caught.value)
        with pytest.raises(PromptError, match=r"^prompts\[1\]: the prompt: needs a text"):
            llm.generate(["the fox", 3, None], params)
        for wrong in ({"max_tokens": 3}, 3, [3]):
            with pytest.raises(SettingsError, match="needs SamplingParams"):
                llm.generate("x", wrong)
        with pytest.raises(PromptError, match="needs a list of dictionaries"):
            llm.chat("hello", params, chat_template="{{ messages }}")
        for wrong in ({}, {"text": "x"}, {"prompt": "x", "text": "x"}):
            with pytest.raises(PromptError, match='needs "prompt" or "prompt_token_ids"') as caught:
                llm.generate(wrong, params)
            assert all(repr(key) in str(caught.value) for key in {*wrong} - {"prompt"})
        for wrong in ({"logit_bias": {10**6: 1.0}}, {"stop_token_ids": [10**6]}):
            with pytest.raises(SettingsError, match="token id 1000000"):
                llm.generate("x", SamplingParams(**wrong))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_bars_appear_on_a_terminal(is_terminal, zoo, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    params = SamplingParams(max_tokens=2)
    path = str(zoo.directory("llama", 0))
    settings = {"device": "cpu", "max_model_len": 64, "drafter": "none"}

    def shown():
        out, err = capsys.readouterr()
        return [word for word in ("loaded", "prompts", "2/2") if word in err or out]

    with LLM(path, **settings) as llm:
        assert shown() == ["loaded"] * is_terminal
        llm.generate([[1], [2]], params)
        assert shown() == ["prompts", "2/2"] * is_terminal
        llm.generate([[1], [2]], params, use_tqdm=False)
        llm.generate([1], params)
    LLM(path, use_tqdm_on_load=False, **settings).close()
    assert shown() == []


async def collect(llm, prompt, params):
    return [piece async for piece in llm.astream(prompt, params)]


def n_threads():
    return sum(thread.name.startswith("engine") for thread in threading.enumerate())


def count_steps(llm, monkeypatch):
    """Record the number of sequences of each pass."""
    batch_sizes = []
    step = llm.engine._pass

    def counted(going):
        batch_sizes.append(len(going))
        step(going)

    monkeypatch.setattr(llm.engine, "_pass", counted)
    return batch_sizes


def test_tasks_share_passes_and_equal_generate(llm, monkeypatch):
    several = [
        SamplingParams(max_tokens=n, temperature=1.0, seed=n, n=1 + n % 2) for n in (12, 17, 9)
    ]
    prompts = [*PROMPTS[:2], prompt_of(3, 20)]
    expected = llm.generate(prompts, several)
    passes = count_steps(llm, monkeypatch)

    async def main():
        return await asyncio.gather(*map(collect, [llm] * 3, prompts, several))

    for pieces, want in zip(asyncio.run(main()), expected, strict=True):
        for got, output in zip(pieces[-1].output.outputs, want.outputs, strict=True):
            mine = [piece for piece in pieces if piece.index == output.index]
            streamed = [token for piece in mine for token in piece.token_ids]
            assert got.token_ids == streamed == output.token_ids
    assert max(passes) == 5, "all five answers were in one pass"
    *_, alone = asyncio.run(collect(llm, PROMPTS[0], several[0]))
    assert alone.output.token_ids == expected[0].token_ids
    assert not llm.engine._running and not llm.engine._waiting


@pytest.mark.parametrize("way", ["cancel", "close", "loop"])
def test_cancelled_task_leaves_passes_to_others(llm, monkeypatch, way):
    """After cancellation, closing, or the end of its event loop, its rows are free for others."""
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1)
    expected = llm.generate(PROMPTS[1], params)[0].token_ids
    passes = count_steps(llm, monkeypatch)

    async def lose_interest(started):
        async with aclosing(llm.astream(PROMPTS[0], SamplingParams(max_tokens=120))) as pieces:
            async for _ in pieces:
                if max(passes) > 1:  # the other has joined
                    started.set()
                    if way == "close":
                        return

    async def main():
        started = asyncio.Event()
        gone = asyncio.create_task(lose_interest(started))
        stays = asyncio.create_task(collect(llm, PROMPTS[1], params))
        await started.wait()
        if way == "cancel":
            gone.cancel()
        elif way == "loop":
            return None
        return (await stays)[-1].output.token_ids

    assert asyncio.run(main()) in (expected, None)
    # behind all that the tasks have left it to do
    llm._open_thread._thread.submit(lambda: None).result()
    assert not llm.engine._running and not llm.engine._waiting
    assert llm.generate(PROMPTS[1], params)[0].token_ids == expected
    assert passes[-1] == 1 < max(passes)


def test_calls_of_several_threads_share_passes(llm, monkeypatch):
    params = SamplingParams(max_tokens=20)
    expected = [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS[:2]]
    passes = count_steps(llm, monkeypatch)
    with ThreadPoolExecutor(2) as pool, engine_held(llm):
        calls = [pool.submit(llm.generate, prompt, params) for prompt in PROMPTS[:2]]
        wait_until(lambda: llm._open_thread._thread._work_queue.qsize() == 2)
    assert [call.result()[0].token_ids for call in calls] == expected
    assert passes[0] == 2


def test_close_ends_the_thread_and_wakes_waiting_tasks(pair):
    n_before = n_threads()
    llm = open_llm(pair.target, max_model_len=256)
    assert n_threads() == n_before, "no task, no thread"

    async def main():
        started = asyncio.Event()

        async def wait():
            endless = SamplingParams(max_tokens=None, ignore_eos=True)
            async for _ in llm.astream(PROMPTS[0], endless):
                started.set()

        tasks = [asyncio.create_task(wait()) for _ in range(3)]
        late = llm._open_thread.apieces([llm.requests.build(PROMPTS[0])])
        await started.wait()
        assert n_threads() == n_before + 1
        llm.close()
        assert n_threads() == n_before
        waiting = (*tasks, anext(late), collect(llm, PROMPTS[0], None))
        return await asyncio.gather(*waiting, return_exceptions=True)

    closed = "this LLM is closed; create another LLM"
    assert [str(error) for error in asyncio.run(main())] == [closed] * 5


@pytest.mark.parametrize("n", [1, 3])
def test_planned_number_of_long_sequences_runs_together(zoo, monkeypatch, n):
    prompts = [prompt_of(seed) for seed in range(4)]
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with open_llm(zoo.directory("llama", 0), max_model_len=40, max_num_seqs=n) as llm:
        batch_sizes = count_steps(llm, monkeypatch)
        outputs = llm.generate(prompts, params)
    assert llm.max_model_len == 40 and max(batch_sizes) == n
    assert_continued(outputs, zoo.model("llama", 0), prompts, 40 - len(prompts[0]))
