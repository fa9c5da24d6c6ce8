"""Prefix cache: sequences with a common prefix compute only the rest, and texts stay the same."""

from itertools import chain, repeat
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from support.heads import HEADS
from support.tiny import assert_continued, generate, prompt_of, runner_of, say, watch

from offload_rt import SamplingParams
from offload_rt.executor.sequence import Sequence
from offload_rt.speculate import tree_drafter

pytestmark = pytest.mark.numeric

TREES = ("adaptive_tree", "static_tree", "self_window", "triforce")
KINDS = ("plain", "graphs", "recycle", "lookahead", *TREES, "general")


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


def test_sampled_texts_do_not_depend_on_the_prefix_cache(opened):
    llm, _ = opened("plain")
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, repetition_penalty=1.2)
    with llm:
        first, again = (llm.generate(prompt_of(0), params)[0].token_ids for _ in range(2))
    assert first == again


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
