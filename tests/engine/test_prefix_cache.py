"""Prefix cache and chunks of long prompts: fewer rows per pass, unchanged texts."""

from itertools import chain, repeat
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from support.fake_gpu import record_graph
from support.heads import HEADS, few_tokens, random_head
from support.tiny import assert_continued, generate, open_llm, prompt_of, runner_of, say, watch

from offload_rt import SamplingParams
from offload_rt.executor.captured_passes import capture_passes
from offload_rt.executor.cuda_graphs import GraphShape
from offload_rt.executor.sequence import Sequence
from offload_rt.models.families import FAMILIES
from offload_rt.speculate import tree_drafter

pytestmark = pytest.mark.numeric

TREES = ("adaptive_tree", "static_tree", "self_window", "triforce")
KINDS = ("plain", "graphs", "recycle", "lookahead", *TREES, "general")


@pytest.fixture
def opened(zoo, steady, tmp_path, monkeypatch):
    """Open an LLM of some kind; return it with transformers' model."""

    def make(kind, **settings):
        if kind in HEADS:
            model = few_tokens()
            return open_llm(**random_head(tmp_path, kind, model).settings, **settings), model
        pair = zoo.pair("llama", 0)
        if kind == "general":
            monkeypatch.delitem(FAMILIES, "llama")
        if kind in ("plain", "general"):
            return open_llm(pair.target, "disk", **settings), pair.model
        if kind == "graphs":
            llm = open_llm(pair.target, draft_model=str(pair.draft), **settings)
            n_rows = llm.spec.memory.cache_rows
            for runner, n_more in ((llm.engine.runner, 0), (llm.engine.draft, 16)):
                capture_passes(runner, GraphShape(16, n_rows + n_more, 32), record_graph)
            return llm, pair.model
        return open_llm(pair.target, **pair.settings(kind), **settings), pair.model

    return make


@pytest.mark.parametrize("kind", [*KINDS, *HEADS])
def test_next_turn_computes_new_tokens_only(opened, monkeypatch, kind):
    """The last cache is larger than half of all rows."""
    monkeypatch.setattr(tree_drafter, "_NGRAM_RATE", 2.0)  # the draft has no row of a copied token
    llm, model = opened(kind)
    vocab_size = model.config.vocab_size
    with llm:
        passes = watch(monkeypatch, *filter(None, (llm.engine.runner, llm.engine.draft)))
        text = prompt_of(0, 20, vocab_size)
        n_new = 12
        n_before = 0
        for turn in range(3):
            for counted in passes.values():
                counted.clear()
            said = say(llm, text, n_new)
            assert said == generate(model, text, n_new)
            n_known, n_rows = passes[llm.engine.runner][0]
            assert n_known == n_before and n_rows <= len(text) - n_known + 16
            if turn and llm.engine.draft in passes and kind not in ("medusa", "triforce"):
                n_known, _ = passes[llm.engine.draft][0]
                n_lost = 8 if kind in HEADS else 1  # a path below the root; a leaf that has no row
                assert n_known >= n_before - n_lost
            n_before = len(text) + n_new - 1
            text = text + said + prompt_of(turn + 1, 5, vocab_size)
        llm.engine.reset_prefix_cache()
        assert not runner_of(llm)._caches and not (llm.engine.draft and llm.engine.draft._caches)


@pytest.mark.parametrize(
    "kind", ["graphs", "recycle", "static_tree", "triforce", "general", "eagle"]
)
def test_texts_do_not_depend_on_the_prefix_cache(opened, kind):
    """Prompts share prefixes of any length; some are aborted."""
    llm, model = opened(kind)
    vocab_size = model.config.vocab_size
    draw = torch.Generator().manual_seed(1)
    texts = [prompt_of(0, 40, vocab_size)]
    with llm:
        for n, n_prompts in enumerate((1, 3, 2, 4, 1)):
            batch = []
            for i in range(n_prompts):
                old = texts[int(torch.randint(len(texts), (), generator=draw))]
                kept = old[: int(torch.randint(1, len(old) + 1, (), generator=draw))]
                batch.append(kept[:60] + prompt_of(10 * n + i, 1 + n, vocab_size))
            lengths = range(6, 6 + 5 * n_prompts, 5)
            outputs = llm.generate(batch, [SamplingParams(max_new_tokens=n) for n in lengths])
            for prompt, output, n_new in zip(batch, outputs, lengths, strict=True):
                assert output.token_ids == generate(model, prompt, n_new)
                texts.append(prompt + output.token_ids)
            stream = llm.stream(texts[-1][:70], SamplingParams(max_new_tokens=20))
            next(stream), next(stream)
            stream.close()


def test_shared_prefix_of_a_batch_is_computed_once(opened, monkeypatch):
    """Also after a repeated pass for lack of memory, and for a sequence that joins later."""
    llm, model = opened("plain")
    shared = prompt_of(0, 24)
    batch = [shared + prompt_of(seed, 3) for seed in (1, 2, 3)]
    params = SamplingParams(max_new_tokens=8)
    with llm:
        runner = llm.engine.runner
        passes = watch(monkeypatch, runner)[runner]
        assert_continued(llm.generate(batch, params), model, batch, 8)
        assert passes[0] == (0, 27 + 3 + 3)
        llm.engine.reset_prefix_cache()
        with monkeypatch.context() as patch:
            failing = Mock(wraps=runner.forward)
            failing.side_effect = chain([ValueError, torch.OutOfMemoryError], repeat(DEFAULT))
            patch.setattr(runner, "forward", failing)
            with pytest.raises(ValueError):
                llm.generate(batch, params)
            assert_continued(llm.generate(batch, params), model, batch, 8)
        llm.engine.reset_prefix_cache()
        passes.clear()
        for prompt in batch[:2]:
            llm.engine.add(Sequence(list(prompt), params, 128))
            llm.engine.step()
        assert passes == [(0, 27), (27, 1 + 3)]


def test_prefix_cache_evicts_the_oldest_first(opened, monkeypatch):
    llm, _ = opened("plain")
    with llm:
        passes = watch(monkeypatch, llm.engine.runner)[llm.engine.runner]
        first, second, third = (prompt_of(seed, 30) for seed in (0, 1, 2))

        def n_known(prompt, n_new=3):
            passes.clear()
            say(llm, prompt, n_new)
            return passes[0][0]

        for prompt in (first, second, first[:5] + third):  # of 128 rows each takes 38 or less
            n_known(prompt)
        # For the third there is no room: the second is the oldest then.
        assert [
            n_known([*first, 1]), n_known(third, 20), n_known([*first, 1, 2]), n_known(second),
        ] == [30, 0, 31, 0]  # fmt: skip


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
    assert len(long.logprobs) - long.n_prompt == 24


def test_prompt_takes_one_pass_when_alone_or_in_the_allowed_time(opened):
    """A prompt in several passes has the same log-probabilities."""
    llm, _ = opened("plain", max_model_len=256, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1)
    with llm:
        llm.engine.prompt_seconds = 0.0
        output = llm.generate(LONG, params)[0]
        assert output.stats.n_passes == 4
        llm.engine.reset_prefix_cache()
        several = joined(llm, LONG, 1e6)
        llm.engine.step()
        assert several[1].n_new == 1
        for sequence in several:
            llm.engine.abort(sequence)
        first, long = joined(llm, LONG, 0.0, params)
        while long.finish_reason is None:
            llm.engine.step()
        llm.engine.abort(first)
    nothing, *expected = output.prompt_logprobs
    assert nothing is None
    for logprobs, wanted in zip(long.logprobs[1 : len(LONG)], expected, strict=True):
        assert {token: entry.logprob for token, entry in logprobs.items()} == {
            token: pytest.approx(entry.logprob, abs=1e-4) for token, entry in wanted.items()
        }
