"""CPU passes over any tree, chunk or batch equal plain decoding bit for bit, also in 16 bits."""

from collections.abc import Sequence
from unittest.mock import Mock

import pytest
import torch
from support import tiny
from support.gguf_files import build
from support.tiny import feed, open_llm, prefill, prompt_of, prompt_steps, random_tree, runner_of
from torch import Tensor

from offload_rt.executor.runner import Runner
from offload_rt.executor.step import Step
from offload_rt.models.architecture import Architecture
from offload_rt.models.native import NativeDecoder
from offload_rt.ops import cpu, decoder_cpu
from offload_rt.tree.topology import Topology

# Every family in bfloat16; one with full and one with windowed attention in every dtype.
CASES = [
    *((name, "bfloat16") for name in ("llama-dynamic", "mistral", "qwen2", "qwen3")),
    *((name, dtype) for name in ("llama", "qwen2-window") for dtype in ("bfloat16", "float16",
        "float32")),
]  # fmt: skip

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.skipif(cpu.library() is None, reason="no C++ compiler"),
]


def decoded(runner: Runner, tokens: Sequence[int], n_prompt: int) -> Tensor:
    """(n, vocabulary): logits of plain decoding, one token at a time after the prompt."""
    cache = runner.new_cache(len(tokens))
    logits = []
    for start, stop in [(0, n_prompt), *((n, n + 1) for n in range(n_prompt, len(tokens)))]:
        step = Step(
            cache, torch.tensor(tokens[start:stop]), Topology.chain(stop - start), stop - start,
            n_prompt,
        )  # fmt: skip
        logits += runner.forward([step])
        runner.commit(cache, range(stop - start))
    runner.free_cache(cache)
    return torch.cat(logits)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_tree_logits_equal_plain_decoding_bit_for_bit(zoo, name, dtype):
    """Below tokens missing in the cache, and after the commit of a path moved rows."""
    prompt = prompt_of(1, 11)
    with open_llm(zoo.directory(name, 0), dtype=dtype) as llm:
        runner = runner_of(llm)
        cache = prefill(runner, prompt, 128)
        text = list(prompt)
        for turn in range(2):
            tree = random_tree(24, seed=turn, reach=5)
            lacking = prompt_of(2 + turn, 3 * turn)
            drafted = prompt_of(4 + turn, len(tree))
            step = Step(
                cache, torch.tensor(lacking + drafted), tree.after_chain(len(lacking)), len(tree),
                len(text + lacking + drafted), n_chain=len(lacking),
            )  # fmt: skip
            (got,) = runner.forward([step])
            paths = [[0, *tree.path_to(node)] for node in range(len(tree))]
            for node in [*range(0, len(tree), 5), len(tree) - 1]:
                tokens = text + lacking + [drafted[ancestor] for ancestor in paths[node]]
                assert torch.equal(got[node], decoded(runner, tokens, n_prompt=len(prompt))[-1])
            longest = max(paths, key=len)
            runner.commit(cache, [*range(len(lacking)), *(len(lacking) + node for node in longest)])
            text += lacking + [drafted[node] for node in longest]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_chunks_and_batches_equal_single_rows_bit_for_bit(zoo, name, dtype, monkeypatch):
    prompts = [prompt_of(seed, n) for seed, n in enumerate((5, 33, 1, 16))]
    with open_llm(zoo.directory(name, 0), dtype=dtype) as llm:
        runner = runner_of(llm)
        expected = [decoded(runner, prompt, n_prompt=1) for prompt in prompts]
        for chunk_rows in (512, 7):
            monkeypatch.setattr(runner, "_chunk_rows", chunk_rows)
            steps = prompt_steps(runner, prompts, 64)
            for got, rows in zip(runner.forward(steps), expected, strict=True):
                assert torch.equal(got, rows)


def logits_of_passes(runner: Runner) -> list[Tensor]:
    """Two sequences together, then a tree after the first of them."""
    prompts = [prompt_of(seed, n) for seed, n in enumerate((9, 20))]
    steps = prompt_steps(runner, prompts, 64)
    logits = runner.forward(steps)
    runner.commit(steps[0].cache, range(9))
    tree = random_tree(6, seed=0)
    return [*logits, feed(runner, steps[0].cache, prompt_of(2, 6), tree)]


@pytest.mark.parametrize("place", ["resident", "disk"])
@pytest.mark.parametrize(("name", "dtype"), [*CASES, ("llama Q4_0", "bfloat16")])
def test_one_call_for_layers_equals_single_operations(
    zoo, name, dtype, place, tmp_path, monkeypatch
):
    """Also in the row order of GGUF files, where partners of a rotation are side by side."""
    if name == "llama Q4_0":
        build(path := tmp_path / "m.gguf", tiny.CASES["llama"].build(0), "Q4_0")
    else:
        path = zoo.directory(name, 0)
    monkeypatch.setattr(decoder_cpu, "decode", decode := Mock(wraps=decoder_cpu.decode))
    with open_llm(path, place, dtype=dtype) as llm:
        runner = runner_of(llm)
        got = logits_of_passes(runner)
        n = runner.spec.n_layers
        n_layers = [len(call.args[1]) for call in decode.call_args_list]
        assert n_layers == ([n] * 2 if place == "resident" else [1] * 2 * n)
        monkeypatch.setattr(NativeDecoder, "layer_group", Architecture.layer_group)
        for rows, expected in zip(got, logits_of_passes(runner), strict=True):
            assert torch.equal(rows, expected)
        assert decode.call_count == len(n_layers)


def test_tree_of_more_than_2048_nodes(zoo):
    """Masks, chunks and caches of a tree beyond the default sizes."""
    prompt = prompt_of(1, 11)
    tree = random_tree(2500, seed=0)
    drafted = prompt_of(2, len(tree))
    with open_llm(zoo.directory("llama", 0)) as llm:
        runner = runner_of(llm)
        cache = prefill(runner, prompt, len(prompt) + len(tree))
        got = feed(runner, cache, drafted, tree)
        for node in (0, 2047, 2048, len(tree) - 1):
            path = [drafted[ancestor] for ancestor in (0, *tree.path_to(node))]
            assert torch.equal(got[node], decoded(runner, prompt + path, len(prompt))[-1])
