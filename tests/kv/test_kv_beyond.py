"""Keys and values beyond the device: results do not depend on the place of the rows."""

import errno
import os
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_gpu import fake_gpu
from support.host_memory import CountingHost
from support.tiny import (
    CASES,
    SMALLER,
    Steady,
    assert_continued,
    feed,
    generate,
    nearly,
    open_llm,
    open_unloaded,
    prefill,
    prompt_of,
    random_tree,
    runner_of,
    save_pair,
    say,
    watch,
)

from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import MachineProfile, PassBytes, StreamedRows, pass_times
from offload_rt.dtypes import DType
from offload_rt.engine import builder
from offload_rt.engine.memory_plan import READ_BUFFERS, plan_memory
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import CapacityError, LinkError
from offload_rt.kv import split as kv_split
from offload_rt.kv.split import KVSplit, RowFormat
from offload_rt.models.families import parse_architecture
from offload_rt.offload.offloaded_cache import HostCache, HostMemory
from offload_rt.offload.offloaded_rows import FileRows
from offload_rt.offload.placement import MemoryBudget
from offload_rt.planning.known_models import KNOWN
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.select import pick_drafter

pytestmark = pytest.mark.numeric

CAPACITY = 700
N_NODES = 9
N_NEW = 8
SPEC = parse_architecture(KNOWN["llama2-7b"])
HALF = DType.FLOAT16
# the fixture below only sets small blocks
UNCHECKED = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Use small blocks, temporary files and fixed tree sizes."""
    monkeypatch.setattr(kv_split, "_TAIL_ROWS", 8)
    monkeypatch.setattr(kv_split, "_BLOCK_NBYTES", 16 << 10)
    monkeypatch.setattr(kv_split, "MAX_SCORES", 4 << 10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(builder, "CostEstimator", lambda *_: Steady())
    monkeypatch.setattr(PairStats, "load", lambda *_: PairStats())


@pytest.fixture(scope="module", params=["llama-tied", "qwen3-window", "mistral"])
def runner(request, zoo):
    with open_llm(zoo.directory(request.param, 0)) as llm:
        yield runner_of(llm)


assert_close = partial(torch.testing.assert_close, atol=2e-4, rtol=2e-4)


@contextmanager
def beyond(runner, n_on_device, n_rows=CAPACITY, is_fp8=False):
    """Let a runner create caches with `n_on_device` rows on the device and the rest in a file."""
    spec = runner.spec
    rows = RowFormat(spec.n_kv_heads, spec.head_dim, DType.from_torch(runner.dtype), is_fp8)
    split = replace(KVSplit.least(spec, n_rows, N_NODES, rows, False), n_on_device=n_on_device)
    with closing(FileRows(split, spec.n_layers, runner.streamer)) as store:
        memory = runner.memory
        runner.memory = HostMemory(spec, runner.dtype, runner.device, store)
        yield store
        runner.memory = memory


def offloaded_cache(runner, n_rows=CAPACITY, n_nodes=N_NODES):
    return runner.new_cache(n_rows, share=runner.memory.store.split.share(n_rows, n_nodes))


def new_caches(runner):
    """Create a device cache and an offloaded cache."""
    caches = runner.new_cache(CAPACITY), offloaded_cache(runner)
    assert isinstance(runner._caches[caches[1]], HostCache)
    return caches


@pytest.mark.parametrize(
    ("n_on_device", "chunk_rows"), [(N_NODES + 8, 512), (N_NODES + 8, 40), (150, 512), (400, 4)]
)
def test_any_cache_history_equals_a_prefill(runner, n_on_device, chunk_rows, monkeypatch):
    """Of device and host caches: long prompts, trees, skipped rows, failed passes, rewinds."""
    monkeypatch.setattr(runner, "_chunk_rows", chunk_rows)
    draw = np.random.default_rng(n_on_device)
    tokens = []
    with beyond(runner, n_on_device):
        ids = new_caches(runner)
        device, host = (runner._caches[cache_id] for cache_id in ids)
        for step in range(16):
            tokens = tokens[: draw.integers(len(tokens) + 1)] if step in (4, 9) else tokens
            assert {runner.rewind(cache_id, [*tokens, -1]) for cache_id in ids} == {len(tokens)}
            for rows in (device.buffer.keys, device.buffer.values):
                rows[:, :, device.n_committed :] = torch.nan
            n_lacking = {0: 230, 6: 200, 10: 300}.get(step, int(draw.integers(12)))
            tree = random_tree(N_NODES, step)
            new = prompt_of(step, n_lacking + N_NODES)
            whole, parts = (
                feed(runner, cache_id, new, tree.after_chain(n_lacking), N_NODES)
                for cache_id in ids
            )
            assert_close(parts, whole)
            assert whole.isfinite().all(), "a row that is not committed was read"
            if step in (5, 6):
                for cache_id in ids:
                    runner.discard(cache_id)
                continue
            path = [n_lacking + node for node in (0, *tree.path_to(int(draw.integers(N_NODES))))]
            for cache_id in ids:
                runner.commit(cache_id, [*range(n_lacking), *path])
            tokens = tokens + [new[row] for row in (*range(n_lacking), *path)]
            assert device.committed == host.committed == tokens
            some = range(*sorted(draw.integers(len(tokens) + 1, size=2).tolist()))
            for layer, of in ((0, range(len(tokens))), (runner.spec.n_layers - 1, some)):
                assert_close(*(cache.rows(layer, of) for cache in (device, host)))
        assert len(tokens) > 330 and (len(host._blocks) > 1 or n_on_device == 400)
        fresh = runner._caches[prefill(runner, tokens, CAPACITY)]
        for layer in range(runner.spec.n_layers):
            assert_close(*(cache.rows(layer, range(len(tokens))) for cache in (device, fresh)))
        for cache_id in ids:
            runner.free_cache(cache_id)
        assert_all_blocks_are_free(runner)


def assert_all_blocks_are_free(runner):
    assert len(runner.memory.store._free) == runner.memory.store._n_blocks


def test_full_cache_raises_capacity_error(runner):
    cache = prefill(runner, prompt_of(0, 10), 12)
    feed(runner, cache, [1, 2], random_tree(2, 0))
    runner.discard(cache)
    with pytest.raises(CapacityError, match="13 rows"):
        feed(runner, cache, [1, 2, 3], random_tree(3, 0))
    assert runner.n_committed(cache) == 10


def test_window_fetches_only_visible_pages(runner):
    """At every position of the window's first row in a page."""
    with beyond(runner, N_NODES + 8):
        cache = offloaded_cache(runner)
        for n_rows in range(400, 400 + kv_split.PAGE_ROWS):
            runner.assume_context(cache, n_rows)
            for layer in range(runner.spec.n_layers):
                n = sum(span.stop - span.start for span in runner._caches[cache].offloaded(layer))
                window = runner.spec.window(layer)
                n_seen = n_rows if window is None else window - 1
                assert n_seen <= n <= min(n_seen + kv_split.PAGE_ROWS, n_rows)
        runner.free_cache(cache)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    sizes = SMALLER | {"max_position_embeddings": 512, "num_hidden_layers": 8}
    model = CASES["llama"].build(0, **sizes)
    return save_pair(tmp_path_factory.mktemp("pair"), model, nearly(model, 0.03))


def least_of(error):
    return int(str(error).split("(")[1].split(" bytes")[0])


def little(pair, drafter, n_rows, **more):
    """Return settings with two layer slots and `n_rows` cache rows beyond the minimum."""
    size = {} if drafter == "none" else {"tree_size": N_NODES}
    given = {"device": "cpu", "max_model_len": 320, **size, **pair.settings(drafter), **more}
    with open_unloaded(pair.target, **given) as unloaded:
        plan = unloaded.plan
    with pytest.raises(CapacityError) as refused:
        open_unloaded(pair.target, kv_memory=1, **given)
    row = unloaded.spec.target.checkpoint.spec.kv_nbytes(4)
    kv_memory = least_of(refused.value) + n_rows * row
    rest = plan.reserved.total + 2 * plan.slot_nbytes - plan.reserved.cache
    return given | {"kv_memory": kv_memory, "device_memory": rest + kv_memory}


@pytest.mark.parametrize("drafter", ["none", "static_tree", "recycle"])
def test_greedy_tokens_equal_transformers(pair, monkeypatch, drafter):
    """Long and short prompts, alone and in a batch, with layers on disk, and a next turn."""
    prompts = [prompt_of(0, 250), prompt_of(1, 30), prompt_of(2, 170)]
    with LLM(str(pair.target), **little(pair, drafter, 40)) as llm:
        assert llm.plan.split.n_resident > 0 and "disk" in llm.plan.tiers
        assert llm.plan.device_nbytes <= llm.plan.budget.device
        runner = runner_of(llm)
        params = SamplingParams(max_new_tokens=N_NEW)
        first = llm.generate(prompts[0], params)[0]
        assert_continued([first], pair.model, prompts[:1], N_NEW)
        passes = watch(monkeypatch, runner)[runner]
        next_turn = prompts[0] + first.token_ids + prompt_of(3, 6)
        assert say(llm, next_turn, N_NEW) == generate(pair.model, next_turn, N_NEW)
        assert passes[0][0] == len(prompts[0]) + N_NEW - 1, "only new tokens are computed"
        assert [type(cache) for cache in runner._caches.values()] == [HostCache]
        assert_continued(llm.generate(prompts, params), pair.model, prompts, N_NEW)
        llm.engine.reset_prefix_cache()
        assert_all_blocks_are_free(runner)
        rows = llm.plan.pass_bytes.rows
        stats = first.stats
        weights = llm.plan.streamed_nbytes
    # What came is the layers and the rows of each pass, and what the slots took in besides.
    least = (stats.n_passes - 1) * (0.9 * weights + rows.pass_nbytes(250) - 8 * rows.nbytes * 3)
    assert least < stats.link_bytes < (stats.n_passes + 3) * (weights + rows.pass_nbytes(320)) * 1.3


@pytest.mark.parametrize(("drafter", "pins"), [("recycle", True), ("none", False)])
def test_device_and_host_budgets_hold_on_cuda(pair, monkeypatch, drafter, pins):
    prompts = [prompt_of(0, 150), prompt_of(1, 40)]
    with fake_gpu(monkeypatch, pins=pins):
        given = little(pair, drafter, 20, device="cuda", host_memory=1 << 30)
        with open_unloaded(pair.target, **given) as unloaded:
            given["host_memory"] = unloaded.plan.budget.buffers + unloaded.plan.host_nbytes
        with monkeypatch.context() as patch:
            counted = CountingHost(patch)
            with LLM(str(pair.target), **given) as llm:
                assert "host" in llm.plan.tiers and llm.plan.kv_tier == "host"
                outputs = llm.generate(prompts, SamplingParams(max_new_tokens=5))
                cache = offloaded_cache(runner_of(llm), 320 + N_NODES - 1)
                buffer = runner_of(llm)._caches[cache]._buffer
                assert buffer.keys.nbytes + buffer.values.nbytes <= llm.plan.reserved.cache
                if pins:
                    assert counted.most["layers"] <= given["host_memory"] - READ_BUFFERS
            del llm
        assert counted.now["layers"] == 0
    assert_continued(outputs, pair.model, prompts, 5)


@settings(max_examples=60, **UNCHECKED)
@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 32)), min_size=1, max_size=6),
)
def test_caches_fit_the_split_and_a_single_cache_always_fits(more, caches):
    rows = RowFormat(2, 16, DType.FLOAT32)
    split = KVSplit.least(SPEC, 1600, 64, rows, has_card=False)
    split = replace(split, n_on_device=min(split.n_on_device + more, 1600))
    for is_alone in (False, True):
        share = split.share(caches[0][0] + caches[0][1], caches[0][1], is_alone)
        assert split.fits([share]) and share.n_on_device <= split.n_on_device
        assert -(-share.n_offloaded // split.block_rows) <= split.n_blocks
    shares = [split.share(n + nodes, nodes, i == 0) for i, (n, nodes) in enumerate(caches)]
    if split.fits(shares):
        assert sum(share.n_on_device for share in shares) <= split.n_on_device
        assert sum(-(-share.n_offloaded // split.block_rows) for share in shares) <= split.n_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_heads", [1, 3])
def test_rows_round_trip_and_fp8_rounds_by_row_and_head(dtype, n_heads):
    generator = torch.Generator().manual_seed(0)
    shape = (2, n_heads, 5, 24)
    scales = torch.logspace(-6, 6, 10)
    pair = [
        (torch.randn(shape, generator=generator) * scales.view(2, 1, 5, 1)).to(dtype)
        for _ in range(2)
    ]
    plain, fp8 = (
        RowFormat(n_heads, 24, DType.from_torch(dtype), is_fp8) for is_fp8 in (False, True)
    )
    for i in range(2):
        for unpacked, there in zip(plain.unpack(plain.pack(*pair)[i]), pair, strict=True):
            assert torch.equal(unpacked, there[i])
        for unpacked, there in zip(fp8.unpack(fp8.pack(*pair)[i]), pair, strict=True):
            # Three bits behind the first; near zero steps of 2^-9 of a code, of which 448 is the
            # largest.
            most = there[i].float().abs().amax(-1, keepdim=True)
            error = (unpacked.float() - there[i].float()).abs()
            assert (error <= there[i].float().abs() * 2**-4 * 1.1 + most / 448 * 2**-9).all()
            assert error.max() > 0
    assert plain.nbytes % 64 == fp8.nbytes % 64 == 0
    wide = RowFormat(8, 128, DType.BFLOAT16)
    assert wide.nbytes == 4096 > 1.9 * replace(wide, is_fp8=True).nbytes


def test_fp8_logits_are_close_and_reported(pair):
    given = little(pair, "none", 0)
    with LLM(str(pair.target), **given, kv_dtype="fp8") as llm:
        assert "fp8" in llm.spec.notice and "not exactly" in llm.spec.notice
        runner = runner_of(llm)
        tokens = prompt_of(0, 200)
        logits = []
        for cache in (runner.new_cache(310), offloaded_cache(runner, 310, 1)):
            feed(runner, cache, tokens, random_tree(200, 0, 1), 1)
            runner.commit(cache, range(200))
            logits.append(feed(runner, cache, [1], random_tree(1, 0)))
        error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 1e-5 < error < 0.2
    with LLM(str(pair.target), **given) as llm:
        assert "fp8" not in llm.spec.notice


def planned(device, **settings):
    config = EngineConfig("x", **settings)
    target = Sizes.of_spec(SPEC, HALF)
    budget = MemoryBudget(device)
    return plan_memory(config, pick_drafter(config), (target, None), HALF, budget).plan


@settings(max_examples=20, **UNCHECKED)
@given(st.floats(0, 1), st.integers(2000, 4000), st.integers(1, 64), st.booleans())
def test_device_split_moves_the_fewest_bytes_at_any_context(share, max_len, n_nodes, is_fp8):
    given = {"drafter": "recycle", "max_model_len": max_len, "tree_size": n_nodes}
    given["kv_dtype"] = "fp8" if is_fp8 else "auto"
    with pytest.raises(CapacityError) as refused:
        planned(1000, **given)
    whole = sum(Sizes.of_spec(SPEC, HALF).layer_nbytes)
    plan = planned(int(least_of(refused.value) + share * (whole + 2**31)), **given)
    row = SPEC.kv_nbytes(2)
    assert plan.device_nbytes <= plan.budget.device
    if plan.split is None:
        return
    of_layer = plan.layer_nbytes[0]
    n_on_device = plan.split.n_on_device
    spare = plan.budget.device - plan.device_nbytes
    assert spare < max(row, of_layer) if plan.tiers.count("device") == 32 else spare < row
    for n_fewer in range(plan.tiers.count("device") + 1):
        more = (spare + n_fewer * of_layer) // row
        split = replace(plan.split, n_on_device=min(n_on_device + more, plan.split.n_rows))
        most = plan.streamed_nbytes + n_fewer * of_layer + row
        for context in (0, 100, max_len // 2, max_len - 1):
            mine = plan.pass_bytes.at(context).get("disk", 0)
            assert mine <= most + split.streamed("disk").pass_nbytes(context)


def test_all_rows_are_on_the_device_if_they_fit():
    plain = partial(planned, max_model_len=4096, drafter="none")
    whole = plain(6 << 30)
    assert whole.split is None and plain(6 << 30, kv_memory="3GiB").split is None
    half = plain(6 << 30, kv_memory="1GiB")
    assert half.split is not None
    assert half.reserved.cache <= 1 << 30 < half.reserved.cache + SPEC.kv_nbytes(2)
    assert half.tiers.count("device") > whole.tiers.count("device")
    with pytest.raises(CapacityError, match="kv_memory is too small"):
        plain(6 << 30, kv_memory="1MiB")


@given(
    st.integers(0, 300),
    st.integers(0, 900),
    st.lists(st.none() | st.integers(1, 400), min_size=1, max_size=5),
)
def test_moved_bytes_count_visible_rows_only(n_resident, context, windows):
    rows = StreamedRows("disk", n_resident, 10, tuple(windows), 512)
    seen = [
        [r for r in range(n_resident, context) if not window or r >= context - window]
        for window in windows
    ]
    assert rows.pass_nbytes(context) == 10 * sum(map(len, seen))
    assert rows.pass_nbytes(context, 513) == 2 * rows.pass_nbytes(context)
    assert rows.pass_nbytes(context, 1, n_sequences=3) >= rows.pass_nbytes(context)
    away = replace(rows, n_resident=0)
    assert away.pass_nbytes(context, 1, 3) == 3 * away.pass_nbytes(context)
    if not any(windows):
        assert rows.pass_nbytes(context, 1, 3) == rows.pass_nbytes(3 * context)


def test_pass_time_includes_weights_and_rows():
    rows = StreamedRows("disk", 100, 10**6, (None,) * 10, 512)
    moved = PassBytes((("host", 0), ("disk", 2 * 10**9)), 10**6, rows=rows)
    profile = MachineProfile((("disk", 2.0), ("host", 1.0)), 100.0)
    alone = PassBytes((), 10**6, rows=rows)
    for what, n_rows, context, n_sequences, seconds in (
        (moved, 1, 50, 1, 1.0), (moved, 1, 500, 1, 3.0), (moved, 512, 500, 1, 3.0),
        (moved, 513, 500, 1, 5.0), (alone, 1, 500, 1, 2.0), (alone, 8, 500, 2, 4.5),
    ):  # fmt: skip
        times = pass_times(profile, what, np.array([n_rows]), context, n_sequences=n_sequences)
        assert times == pytest.approx(seconds, rel=1e-3)


def test_self_drafting_level_waits_for_no_link():
    rows = StreamedRows("disk", 10, 10**6, (None,) * 10, 512)
    profile = MachineProfile((("disk", 2.0),), 100.0)
    cost = CostEstimator(profile, PassBytes((), 10**9, rows=rows), draft_context=500)
    assert cost.level(1) == pytest.approx(0.01)
    cost.passed(1, 500, 0.0, 25.0, 0.2)  # ten times slower than it was thought
    assert cost.level(1) == pytest.approx(0.01) and cost.seconds(np.array([1]), 500)[0] > 4
    for _ in range(50):
        cost.drafted(3, 0.09)
    assert cost.level(1) == pytest.approx(0.03, rel=1e-3)


def test_unusable_cache_file_is_one_sentence(pair, monkeypatch, tmp_path):
    given = little(pair, "none", 0)
    (tmp_path / "in_the_way").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "in_the_way"))
    said = r"no file for keys and values below .*in_the_way.*Not a directory.*XDG_CACHE_HOME"
    with pytest.raises(LinkError, match=said):
        LLM(str(pair.target), **given)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_full_disk_is_one_sentence_and_leaves_no_file(pair, monkeypatch, tmp_path, call):
    given = little(pair, "none", 0)
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        said = r"needs .*iB, has No space left on device; make room"
        with pytest.raises(LinkError, match=said), LLM(str(pair.target), **given) as llm:
            say(llm, prompt_of(0, 250), 2)
    assert len(os.listdir("/proc/self/fd")) == before
    with LLM(str(pair.target), **given) as llm:
        say(llm, prompt_of(0, 250), 2)
        files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert all(path.suffix == ".json" for path in files)
    assert len(os.listdir("/proc/self/fd")) == before


def test_failed_read_ends_the_pass_and_the_next_pass_works(runner, monkeypatch):
    tree = random_tree(N_NODES, 0)
    tokens = prompt_of(0, 300)
    with beyond(runner, N_NODES + 8) as store:
        caches = new_caches(runner)
        for cache in caches:
            feed(runner, cache, tokens, random_tree(300, 0, 1), 1)
            runner.commit(cache, range(300))
        expected = feed(runner, caches[0], prompt_of(1, N_NODES), tree)
        cache = runner._caches[caches[1]]
        reads = any(list(cache.offloaded(i)) for i in range(runner.spec.n_layers))
        with monkeypatch.context() as patch:
            patch.setattr(store, "_request", Mock(side_effect=LinkError("the disk has gone")))
            with pytest.raises(LinkError, match="gone") if reads else nullcontext():
                feed(runner, caches[1], prompt_of(1, N_NODES), tree)
        runner.discard(caches[1])
        assert_close(feed(runner, caches[1], prompt_of(1, N_NODES), tree), expected)
        for cache in caches:
            runner.free_cache(cache)
