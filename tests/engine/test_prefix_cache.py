"""What is kept of sequences that have left: those that begin alike compute the rest alone, and no
text depends on it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.recorded import record
from support.tiny import generate, keep_steady, open_llm, prompt_of, runner_of
from test_heads import few_tokens, random_head

from offload_rt import LLM, SamplingParams
from offload_rt.executor.cuda_graphs import GraphShape
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence
from offload_rt.models.families import FAMILIES
from offload_rt.speculate import tree_drafter

HEADS = ("eagle", "medusa", "qwen")
KINDS = (
    "plain",
    "graphs",
    "recycle",
    "lookahead",
    "adaptive_tree",
    "static_tree",
    "self_window",
    "triforce",
    "general",
)


@pytest.fixture
def steady(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_steady(monkeypatch)


@pytest.fixture
def opened(zoo, steady, tmp_path, monkeypatch) -> Callable[..., tuple[LLM, Any]]:
    """An LLM of some kind, and transformers' model."""

    def make(kind: str, **settings: Any) -> tuple[LLM, Any]:
        if kind in HEADS:
            model = few_tokens()
            return open_llm(**random_head(tmp_path, kind, model), **settings), model
        pair = zoo.pair("llama", 0)
        if kind == "general":
            monkeypatch.delitem(FAMILIES, "llama")
        if kind in ("plain", "general"):
            return open_llm(pair.target, "disk", **settings), pair.model
        if kind == "graphs":
            llm = open_llm(pair.target, draft_model=str(pair.draft), **settings)
            most = llm.spec.memory.cache_rows, llm.spec.memory.limits.n_nodes
            for runner, n_rows in (
                (llm.engine.runner, most[0]),
                (llm.engine.draft, most[0] + most[1]),
            ):
                runner.use_graphs(GraphShape(16, n_rows, 32), record)
            return llm, pair.model
        return open_llm(pair.target, **pair.settings(kind), **settings), pair.model

    return make


def watch(monkeypatch: pytest.MonkeyPatch, *runners: Runner) -> dict[Runner, list[tuple[int, int]]]:
    """For each pass of each runner, the committed rows of its first sequence and the rows computed
    of all.
    """
    passes: dict[Runner, list[tuple[int, int]]] = {runner: [] for runner in runners}
    forward = Runner.forward

    def watched(runner: Runner, steps: Any) -> Any:
        if runner in passes:
            passes[runner].append(
                (runner.n_committed(steps[0].cache), sum(step.n_rows for step in steps))
            )
        return forward(runner, steps)

    monkeypatch.setattr(Runner, "forward", watched)
    return passes


def say(llm: LLM, prompt: list[int], n: int) -> list[int]:
    return llm.generate(prompt, SamplingParams(max_new_tokens=n))[0].token_ids


@pytest.mark.parametrize("kind", [*KINDS, *HEADS])
def test_the_next_turn_of_a_conversation_computes_its_new_tokens_alone(opened, monkeypatch, kind):
    """Of target and draft; each cache is larger than the one before, and the last of them more than
    half of all rows.
    """
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


@pytest.mark.parametrize("kind", [*KINDS, *HEADS])
def test_no_text_depends_on_what_is_kept(opened, kind):
    """Batches of prompts that begin alike up to anywhere, some aborted, with room for few of
    them.
    """
    llm, model = opened(kind)
    vocab_size = model.config.vocab_size
    draw = torch.Generator().manual_seed(1)
    texts = [prompt_of(0, 40)]
    texts = [[token % vocab_size for token in texts[0]]]
    with llm:
        for n in range(5):
            batch = []
            for i in range((1, 3, 2, 4, 1)[n]):
                old = texts[int(torch.randint(len(texts), (), generator=draw))]
                kept = old[: int(torch.randint(1, len(old) + 1, (), generator=draw))]
                batch.append(kept[:60] + prompt_of(10 * n + i, 1 + n, vocab_size))
            outputs = llm.generate(
                batch, [SamplingParams(max_new_tokens=6 + 5 * i) for i in range(len(batch))]
            )
            for i, (prompt, output) in enumerate(zip(batch, outputs, strict=True)):
                assert output.token_ids == generate(model, prompt, 6 + 5 * i)
                texts.append(prompt + output.token_ids)
            stream = llm.stream(texts[-1][:70], SamplingParams(max_new_tokens=20))
            next(stream), next(stream)
            stream.close()


def test_sampled_texts_do_not_depend_on_it_either(opened):
    llm, _ = opened("plain")
    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=3, repetition_penalty=1.2)
    with llm:
        first = llm.generate(prompt_of(0), params)[0].token_ids
        assert llm.generate(prompt_of(0), params)[0].token_ids == first


def test_a_prefix_that_a_batch_shares_is_computed_once(opened, monkeypatch):
    """Also where the pass is made again for want of memory, and by one that joins those that
    run.
    """
    llm, model = opened("plain")
    shared = prompt_of(0, 24)
    batch = [shared + prompt_of(seed, 3) for seed in (1, 2, 3)]
    expected = [generate(model, prompt, 8) for prompt in batch]
    with llm:
        passes = watch(monkeypatch, llm.engine.runner)[llm.engine.runner]
        forward = Runner.forward
        outputs = llm.generate(batch, SamplingParams(max_new_tokens=8))
        assert passes[0] == (0, 27 + 3 + 3) and [one.token_ids for one in outputs] == expected
        errors = [torch.OutOfMemoryError(), ValueError()]

        def failing(runner, steps):
            if errors:
                raise errors.pop()
            return forward(runner, steps)

        llm.engine.reset_prefix_cache()
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "forward", failing)
            with pytest.raises(ValueError):
                llm.generate(batch, SamplingParams(max_new_tokens=8))
            outputs = llm.generate(batch, SamplingParams(max_new_tokens=8))
        assert [one.token_ids for one in outputs] == expected
        llm.engine.reset_prefix_cache()
        passes.clear()
        several = [
            Sequence(list(prompt), SamplingParams(max_new_tokens=8), 128) for prompt in batch[:2]
        ]
        for one in several:
            llm.engine.add(one)
            llm.engine.step()
        assert passes == [(0, 27), (27, 1 + 3)]


def test_the_oldest_go_first_and_a_text_that_shares_little_leaves_what_there_is(
    opened, monkeypatch
):
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
            n_known([*first, 1]),
            n_known(third, 20),
            n_known([*first, 1, 2]),
            n_known(second),
        ] == [30, 0, 31, 0]
