"""The cache: what is kept is what a fresh prefill would give, and nothing else is ever read."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import feed, open_llm, prefill, prompt_of, random_tree, runner_of

from offload_rt.errors import CapacityError
from offload_rt.executor import runner as runner_module
from offload_rt.kv.cache import KVBuffer, KVCache, ReusableKVBuffer
from offload_rt.tree.topology import Topology

CAPACITY = 96


@pytest.fixture(scope="module", params=["llama-tied", "qwen3-window", "mistral"])
def runner(request, zoo):
    with open_llm(zoo.directory(request.param, 0)) as llm:
        yield runner_of(llm)


def rows_of(cache):
    return cache.keys[:, :, : cache.n_committed], cache.values[:, :, : cache.n_committed]


def poison(cache):
    for store in (cache.keys, cache.values):
        store[:, :, cache.n_committed :] = torch.nan


def random_path(topology, generator):
    """The rows of a path from the root to a random node."""
    node, path = int(torch.randint(len(topology), (), generator=generator)), []
    while node >= 0:
        path.append(node)
        node = int(topology.parents[node])
    return path[::-1]


def step(runner, cache, seed, generator):
    """Feed a random tree below a few tokens the cache lacks, keep a random path of it; returns the tokens kept."""
    n_lacking = int(torch.randint(4, (), generator=generator))
    tree = random_tree(9, seed)
    tokens = prompt_of(seed, n_lacking + len(tree))
    logits = feed(runner, cache, tokens, tree.after_chain(n_lacking))
    assert logits.isfinite().all(), "a row that is not committed was read"
    rows = [*range(n_lacking), *(n_lacking + node for node in random_path(tree, generator))]
    cache.commit(rows)
    return [tokens[row] for row in rows]


@pytest.mark.parametrize("chunk_rows", [512, 4])
def test_kept_rows_are_those_of_a_fresh_prefill(runner, chunk_rows, monkeypatch):
    """Step after step, with everything that is not committed poisoned; the kept path may skip any of the rows."""
    monkeypatch.setattr(runner_module, "CHUNK_ROWS", chunk_rows)
    generator = torch.Generator().manual_seed(chunk_rows)
    cache, tokens = runner.new_cache(CAPACITY), []
    for seed in range(8):
        poison(cache)
        if seed % 3 == 2:
            tokens = [*tokens[:-2], 1]
            assert cache.rewind_to(tokens) == len(tokens) - 1
            tokens.pop()
            poison(cache)
        tokens += step(runner, cache, seed, generator)
        assert cache.committed == tokens and cache.n_committed == len(tokens)
        for got, expected in zip(rows_of(cache), rows_of(prefill(runner, tokens, CAPACITY)), strict=True):
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_discarded_pass_leaves_nothing(runner):
    tokens, tree = prompt_of(0, 12), random_tree(7, 0)
    cache = prefill(runner, tokens, CAPACITY)
    before = [store.clone() for store in rows_of(cache)]
    feed(runner, cache, prompt_of(1, 7), tree)
    cache.discard()
    poison(cache)
    assert cache.committed == tokens
    assert all(torch.equal(*pair) for pair in zip(before, rows_of(cache), strict=True))
    got = feed(runner, cache, prompt_of(2, 7), tree)
    assert torch.equal(got, feed(runner, prefill(runner, tokens, CAPACITY), prompt_of(2, 7), tree))


def test_a_cache_that_is_full_says_so(runner):
    cache = prefill(runner, prompt_of(0, 10), 12)
    feed(runner, cache, [1, 2], Topology.chain(2))
    cache.discard()
    with pytest.raises(CapacityError, match="13 rows"):
        feed(runner, cache, [1, 2, 3], Topology.chain(3))
    assert cache.n_committed == 10


class _Sizes:
    n_layers, n_kv_heads, head_dim = 2, 3, 4


def filled(tokens, capacity):
    """A cache of rows that say where they came from: every value of the row of token t at place p is 100 p + t."""
    cache = KVCache(KVBuffer.empty(_Sizes, capacity, torch.float32, torch.device("cpu")))
    write(cache, tokens)
    cache.commit(range(len(tokens)))
    return cache


def write(cache, tokens):
    cache.begin(tokens)
    shape = (len(tokens), _Sizes.n_kv_heads, _Sizes.head_dim)
    rows = 100.0 * torch.arange(cache.n_committed, cache.n_committed + len(tokens)) + torch.tensor(tokens)
    for layer in range(_Sizes.n_layers):
        keys, values = cache.write(layer, 0, rows[:, None, None].expand(shape), -rows[:, None, None].expand(shape))
        assert keys.shape == values.shape == (_Sizes.n_kv_heads, cache.n_committed + len(tokens), _Sizes.head_dim)
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
    assert (rows_of(cache)[0] == expected[:, None]).all() and (rows_of(cache)[1] == -expected[:, None]).all()


@given(texts, texts, st.integers(0, 12))
def test_rewinding_keeps_the_common_prefix(tokens, other, n_shared):
    wanted = tokens[:n_shared] + other
    cache = filled(tokens, 30)
    before = cache.keys.clone()
    common = max(n for n in range(len(tokens) + 1) if tokens[:n] == wanted[:n])
    assert cache.rewind_to(wanted) == common == cache.n_committed
    assert cache.committed == wanted[:common]
    assert torch.equal(rows_of(cache)[0], before[:, :, :common])
    assert cache.rewind_to(wanted) == common, "rewinding again changes nothing"


def test_rows_to_commit_ascend():
    for rows in ([1, 0], [1, 1]):
        cache = filled([0], 9)
        write(cache, [1, 2, 3])
        with pytest.raises(AssertionError):
            cache.commit(rows)


def test_memory_is_lent_to_one_cache_at_a_time():
    made = []

    def new(capacity):
        made.append(KVBuffer.empty(_Sizes, capacity, torch.float32, torch.device("cpu")))
        return made[-1]

    reusable = ReusableKVBuffer(10, new)
    assert reusable.acquire(11) is None and not made
    cache = reusable.acquire(8)
    assert cache.capacity == 10 and reusable.acquire(1) is None
    write(cache, [3, 1, 2])
    cache.commit([0, 1, 2])
    reusable.release()  # not while it is in use
    del cache
    again = reusable.acquire(10)
    assert again.store is made[0] and again.n_committed == 0 and not again.keys.any()
    del again
    reusable.release()
    assert reusable.acquire(10).store is made[1]
