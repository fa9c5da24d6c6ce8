"""Captured passes give the logits and cache rows of ordinary passes, after any earlier pass."""

from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.fake_gpu import record_graph
from support.tiny import CASES, feed, open_llm, prefill, prompt_of, random_tree, runner_of

from offload_rt import ops
from offload_rt.executor.captured_passes import capture_passes
from offload_rt.executor.cuda_graphs import GraphShape
from offload_rt.executor.step import Step
from offload_rt.ops import reference
from offload_rt.speculate.child_sampling import MostProbable, unpacked
from offload_rt.tree.topology import Topology


def buffer_of(runner, cache):
    return runner._caches[cache].buffer


def passes_of(runner, cache):
    return runner.replay.__self__._passes[buffer_of(runner, cache)]


assert_close = partial(torch.testing.assert_close, atol=2e-4, rtol=1e-4)


@contextmanager
def both(zoo, shape, capture=record_graph, name="llama"):
    """An ordinary runner, and one that captures passes."""
    with open_llm(zoo.directory(name, 0)) as plain, open_llm(zoo.directory(name, 0)) as graphs:
        capture_passes(runner_of(graphs), shape, capture)
        yield runner_of(plain), runner_of(graphs)


def fed_alike(runners, caches, seed, tree, path=()):
    """Feed the same rows to both runners, compare the logits, and commit a path."""
    want, got = (
        feed(runner, cache, prompt_of(seed, len(tree)), tree).clone()
        for runner, cache in zip(runners, caches, strict=True)
    )
    assert_close(got, want)
    if path:
        for runner, cache in zip(runners, caches, strict=True):
            runner.commit(cache, path)


@pytest.mark.parametrize("name", CASES)
def test_captured_pass_equals_ordinary_pass(zoo, name):
    """Passes with too many rows, or that fill the cache to its last row, run without a graph."""
    with both(zoo, GraphShape(64, 512, 128), name=name) as runners:
        caches = [prefill(runner, prompt_of(0), 21 + 8 + 63) for runner in runners]
        passes = passes_of(runners[1], caches[1])
        assert len(passes) == 1
        for seed, n in enumerate((1, 5, 7, 1, 33, 65, 64, 6, 63)):
            before = dict(passes)
            fed_alike(runners, caches, seed, random_tree(n, seed), [0])
            assert n not in (65, 63) or passes == before
        n = runners[0].n_committed(caches[0])
        want, got = map(buffer_of, runners, caches)
        assert_close(got.keys[:, :, :n], want.keys[:, :, :n])
        assert_close(got.values[:, :, :n], want.values[:, :, :n])


def test_tree_levels_are_replayed_in_turn(zoo):
    tree = random_tree(20, 3, reach=6)
    with open_llm(zoo.directory("llama", 0)) as llm:
        runner = runner_of(llm)
        prompt = prompt_of(0)
        tokens = prompt_of(1, 20)
        whole = feed(runner, prefill(runner, prompt, 256), tokens, tree)
        cache = prefill(runner, prompt, 256)
        capture_passes(runner, GraphShape(64, 256, 128), record_graph)
        parts = []
        for start, stop in ((0, 1), (1, 6), (6, 13), (13, 20)):
            some = Topology(tree.parents[:stop])
            step = Step(
                cache, torch.tensor(tokens[:stop]), some, stop - start, len(prompt) + stop,
                n_done=start,
            )  # fmt: skip
            parts.append(runner.forward([step])[0].clone())
    assert_close(torch.cat(parts), whole)


def test_sequences_in_turn_share_graphs(zoo):
    """A concurrent sequence gets its own graphs."""
    capture = Mock(side_effect=record_graph)
    with both(zoo, GraphShape(64, 256, 128), capture) as runners:
        runner = runners[1]
        for seed in range(3):
            caches = [runner.new_cache(100 + seed, is_alone=True) for runner in runners]
            for i in range(3):
                fed_alike(runners, caches, i + 10 * seed, random_tree(8, i))
            buffer_of(runner, caches[1]).values.fill_(torch.nan)
            for owner, cache in zip(runners, caches, strict=True):
                owner.free_cache(cache)
        assert capture.call_count == 1
        first = runner.new_cache(100, is_alone=True)
        assert len(runner.replay.__self__._passes) == 1
        second = runner.new_cache(100, is_alone=True)
        assert buffer_of(runner, first) is not buffer_of(runner, second)
        for cache in (first, second):
            runner.free_cache(cache)
        # Too long to share; beside others, which need the memory.
        for capacity, is_alone in ((300, True), (100, False)):
            shared = runner.new_cache(100, is_alone=True)
            feed(runner, shared, prompt_of(0, 8), random_tree(8, 0))
            runner.free_cache(shared)
            assert len(runner.replay.__self__._passes) == 1
            runner.free_cache(runner.new_cache(capacity, is_alone))
            assert len(runner.replay.__self__._passes) == 0


def test_growing_cache_uses_a_few_sizes(zoo, monkeypatch):
    monkeypatch.setattr("offload_rt.executor.captured_passes._KEYS", 8)
    monkeypatch.setattr("offload_rt.executor.captured_passes._LEAST_KEYS", 16)
    monkeypatch.setattr(ops, "goes_by_extent", lambda keys: True)

    def attention(q, k, v, mask, scale, *_):
        return reference.tree_attention(q, k, v, mask.dense(), scale)

    monkeypatch.setattr(ops, "tree_attention", attention)
    with both(zoo, GraphShape(8, 100, 8)) as runners:
        caches = [runner.new_cache(100) for runner in runners]
        for turn in range(12):
            tree = random_tree(8, turn)
            fed_alike(runners, caches, turn, tree, tree.path_to(7) or [0])
        assert runners[1].n_committed(caches[1]) > 32
        sizes = {shape.n_keys for shape in passes_of(runners[1], caches[1])}
        assert sizes <= {16, 32, 64, 100} and len(sizes) >= 3


@pytest.mark.parametrize("reduce", [MostProbable(5, 128), MostProbable(9, 140, 0.7)])
def test_sampling_probabilities_are_captured(zoo, reduce):
    """Of the rows that are wanted; filled up to a larger vocabulary."""
    with both(zoo, GraphShape(8, 256, 64)) as runners:
        caches = [runner.new_cache(256) for runner in runners]
        for turn in range(4):
            draws = []
            for runner, cache in zip(runners, caches, strict=True):
                tokens = torch.tensor(prompt_of(turn, 7))
                step = Step(cache, tokens, random_tree(7, turn), 3 + turn, 7, reduce=reduce)
                tokens, values = unpacked(runner.forward([step])[0], reduce.k)
                assert tokens.shape == values.shape == (3 + turn, reduce.k)
                draws.append((tokens, values.copy()))
                runner.discard(cache)
            np.testing.assert_array_equal(draws[0][0], draws[1][0])
            np.testing.assert_allclose(draws[0][1], draws[1][1], rtol=1e-3, atol=1e-4)
        assert len(runners[1].replay.__self__._reductions) == 1


def test_graph_cache_keeps_the_most_recent_sizes(zoo, monkeypatch):
    monkeypatch.setattr("offload_rt.executor.captured_passes._MOST_KEPT", 2)
    with open_llm(zoo.directory("llama", 0)) as llm:
        runner = runner_of(llm)
        capture_passes(runner, GraphShape(64, 256, 128), record_graph)
        cache = runner.new_cache(256)
        for n in (1, 2, 1, 4):
            feed(runner, cache, prompt_of(0, n), random_tree(n, 0))
        assert [shape.n_rows for shape in passes_of(runner, cache)] == [1, 4]
