"""KV cache: kept rows equal a fresh prefill, and no other row is read."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import feed, open_llm, prefill, prompt_of, random_tree, runner_of

from offload_rt.errors import CapacityError
from offload_rt.kv.cache import ContiguousCache
from offload_rt.models.layers import KVShape
from offload_rt.tree.topology import Topology

pytestmark = pytest.mark.numeric

CAPACITY = 96


@pytest.fixture(scope="module", params=["llama-tied", "qwen3-window", "mistral"])
def runner(request, zoo):
    with open_llm(zoo.directory(request.param, 0)) as llm:
        yield runner_of(llm)


def of(runner, cache):
    return runner._caches[cache]


def rows_of(cache):
    n = cache.n_committed
    return cache.buffer.keys[:, :, :n], cache.buffer.values[:, :, :n]


def poison(cache):
    cache.buffer.keys[:, :, cache.n_committed :] = torch.nan
    cache.buffer.values[:, :, cache.n_committed :] = torch.nan


def are_equal(some, others):
    return all(torch.equal(*pair) for pair in zip(some, others, strict=True))


assert_close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)


def step(runner, cache, seed, generator):
    """Feed a random tree below a few missing tokens and keep a random path; returns its tokens."""
    n_lacking = int(torch.randint(4, (), generator=generator))
    tree = random_tree(9, seed)
    tokens = prompt_of(seed, n_lacking + len(tree))
    logits = feed(runner, cache, tokens, tree.after_chain(n_lacking))
    assert logits.isfinite().all(), "a row that is not committed was read"
    node = int(torch.randint(len(tree), (), generator=generator))
    rows = [*range(n_lacking), *(n_lacking + ancestor for ancestor in [0, *tree.path_to(node)])]
    runner.commit(cache, rows)
    return [tokens[row] for row in rows]


@pytest.mark.parametrize("chunk_rows", [512, 4])
def test_kept_rows_equal_a_fresh_prefill(runner, chunk_rows, monkeypatch):
    """Uncommitted rows are poisoned; the kept path may skip rows."""
    monkeypatch.setattr(runner, "_chunk_rows", chunk_rows)
    generator = torch.Generator().manual_seed(chunk_rows)
    id = runner.new_cache(CAPACITY)
    tokens = []
    cache = of(runner, id)
    for seed in range(8):
        poison(cache)
        if seed % 3 == 2:
            tokens = [*tokens[:-2], 1]
            assert runner.rewind(id, tokens) == len(tokens) - 1
            tokens.pop()
            poison(cache)
        tokens += step(runner, id, seed, generator)
        assert cache.committed == tokens and runner.n_committed(id) == len(tokens)
        assert_close(rows_of(cache), rows_of(of(runner, prefill(runner, tokens, CAPACITY))))


def test_discarded_pass_leaves_no_rows(runner):
    tokens = prompt_of(0, 12)
    tree = random_tree(7, 0)
    id = prefill(runner, tokens, CAPACITY)
    cache = of(runner, id)
    before = [part.clone() for part in rows_of(cache)]
    feed(runner, id, prompt_of(1, 7), tree)
    runner.discard(id)
    poison(cache)
    assert cache.committed == tokens
    assert are_equal(before, rows_of(cache))
    got = feed(runner, id, prompt_of(2, 7), tree)
    assert torch.equal(got, feed(runner, prefill(runner, tokens, CAPACITY), prompt_of(2, 7), tree))


def test_full_cache_raises_capacity_error(runner):
    cache = prefill(runner, prompt_of(0, 10), 12)
    feed(runner, cache, [1, 2], Topology.chain(2))
    runner.discard(cache)
    with pytest.raises(CapacityError, match="13 rows"):
        feed(runner, cache, [1, 2, 3], Topology.chain(3))
    assert runner.n_committed(cache) == 10


class _Sizes:
    kv_shapes = (KVShape(3, 4, 4),) * 2


def filled(tokens, capacity):
    """Return a cache whose rows encode their origin: token t at position p is 100 p + t."""
    cache = ContiguousCache.empty(_Sizes, capacity, torch.float32, torch.device("cpu"))
    write(cache, tokens)
    cache.commit(range(len(tokens)))
    return cache


def write(cache, tokens):
    cache.begin(tokens)
    first = cache.n_committed
    last = cache.n_committed + len(tokens)
    rows = 100.0 * torch.arange(first, last) + torch.tensor(tokens)
    cache.buffer.keys[:, :, first:last] = rows[:, None]
    cache.buffer.values[:, :, first:last] = -rows[:, None]
    return rows


texts = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@given(texts, texts, st.data())
def test_commit_keeps_exactly_the_given_rows(tokens, pending, data):
    cache = filled(tokens, 30)
    rows = write(cache, pending)
    kept = sorted(data.draw(st.sets(st.integers(0, len(pending) - 1))))
    cache.commit(kept)
    expected = torch.cat((100.0 * torch.arange(len(tokens)) + torch.tensor(tokens), rows[kept]))
    assert cache.committed == tokens + [pending[row] for row in kept]
    assert (rows_of(cache)[0] == expected[:, None]).all()
    assert (rows_of(cache)[1] == -expected[:, None]).all()


@given(texts, texts, st.integers(0, 12))
def test_rewind_keeps_the_common_prefix(tokens, other, n_shared):
    wanted = tokens[:n_shared] + other
    cache = filled(tokens, 30)
    before = cache.buffer.keys.clone()
    common = max(n for n in range(len(tokens) + 1) if tokens[:n] == wanted[:n])
    assert cache.rewind_to(wanted) == common == cache.n_committed
    assert cache.committed == wanted[:common]
    assert torch.equal(rows_of(cache)[0], before[:, :, :common])
    assert cache.rewind_to(wanted) == common, "rewinding again changes nothing"
