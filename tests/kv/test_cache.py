"""KV cache: limits, and exactly the rows that are kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import feed, open_llm, prefill, prompt_of, runner_of

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


def rows_of(cache):
    n = cache.n_committed
    return cache.buffer.keys[:, :, :n], cache.buffer.values[:, :, :n]


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
