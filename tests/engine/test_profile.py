"""Measured rates of memory and link; host memory within its budget, also while loading."""

import time
from functools import partial
from itertools import chain, repeat
from unittest.mock import Mock

import pytest
import torch
from support.fake_gpu import fake_gpu
from support.host_memory import CountingHost, pin_at_most
from support.tiny import (
    CASES,
    generate,
    keep_steady,
    open_llm,
    open_streamed,
    open_unloaded,
    prompt_of,
    save_pair,
    say,
)

from bench.models.tiny import config_of, random_model
from offload_rt import LLM
from offload_rt.engine import link_rates, profile
from offload_rt.engine.memory_plan import READ_BUFFERS
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.system.files import read_cached
from offload_rt.weights.layout import PAGE


def test_memory_rate_is_measured_beyond_the_caches(monkeypatch):
    linear = Mock(wraps=profile.linear)
    monkeypatch.setattr(profile, "linear", linear)
    monkeypatch.setattr(profile, "cache_nbytes", lambda: 100 << 20)
    assert profile.memory_gbps(torch.bfloat16, torch.device("cpu")) > 0
    assert {call.args[1].nbytes for call in linear.call_args_list} == {400 << 20}
    monkeypatch.setattr(profile, "memory_free", lambda: 64 << 20)
    profile.memory_gbps(torch.bfloat16, torch.device("cpu"))
    assert linear.call_args.args[1].nbytes == 16 << 20, "at most a quarter of free memory"


def test_streamed_and_resident_passes_have_their_own_times(zoo, monkeypatch, tmp_path):
    """Adjacent layers are timed as one call unless they are streamed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profile, "_RUN_S", 1e6)  # however slow the machine is
    for n, (open_, sizes) in enumerate(((open_llm, {1, 6}), (open_streamed, {1})) * 2):
        with open_(zoo.directory("llama", 0), drafter="none") as llm:
            layers = Mock(wraps=llm.engine.runner.layers)
            monkeypatch.setattr(llm.engine.runner, "layers", layers)
            profile.pass_profile(llm.engine.runner, llm.spec.pass_bytes, (8, 64))
        assert {len(call.args[0]) for call in layers.call_args_list} == sizes
        assert len(read_cached("passes.json", profile._PASSES_VERSION)) == min(n + 1, 2)


def test_gpu_rates_use_cuda_events(monkeypatch):
    """On a device on which each piece of work takes 10 ms."""
    with fake_gpu(monkeypatch, nbytes=256 << 20):
        clock = Mock(elapsed_time=lambda end: 10.0)
        monkeypatch.setattr(torch.cuda, "Event", lambda *, enable_timing: enable_timing and clock)
        card = torch.device("cuda", 0)
        assert profile.memory_gbps(torch.float16, card) == pytest.approx((64 << 20) / 0.01 / 1e9)
        assert profile.upload_gbps(card, 32 << 20) == pytest.approx((32 << 20) / 0.01 / 1e9)


_GBPS = {32 << 20: 24.7, 64 << 20: 24.9, 128 << 20: 25.0, 256 << 20: 24.9}


def link(device, chunk_nbytes):
    """Copy device with the rates of some chunk sizes, after a slow first copy."""
    rate = _GBPS[chunk_nbytes] * 1e9
    slow = chain([1.0], repeat(0.0))
    return Mock(
        copy=lambda moves, after: (0, len(moves[0][0])),
        seconds_between=lambda start, end: end / rate + next(slow),
    )


def test_chunks_of_copies_are_selected_by_measurement(monkeypatch, tmp_path):
    """The smallest within 0.5 % of the fastest, measured once per GPU model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(link_rates, "CopyDevice", opened := Mock(side_effect=link))
    card = torch.device("cuda", 0)
    with fake_gpu(monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
        assert link_rates.copy_chunk(card) == 64 << 20
        n_measured = opened.call_count
        assert link_rates.copy_chunk(card) == 64 << 20
        assert opened.call_count == n_measured > 0
        rates = link_rates.chunk_rates(card)
    assert rates == pytest.approx(_GBPS)


def test_no_layer_is_read_while_passes_are_timed(tmp_path, monkeypatch):
    """Reads on the processors of the computation would prolong it."""
    reads = DiskTier.reads
    timed = profile._seconds_of_parts
    n_reads = []

    def slow(i, read):
        time.sleep(0.02 * i)
        n_reads.append(i)
        return read()

    def watched(*arguments):
        n_before = len(n_reads)
        time.sleep(0.03)
        seconds = timed(*arguments)
        assert len(n_reads) == n_before > 0
        return seconds

    def slow_reads(tier, i, into):
        return [partial(slow, i, read) for read in reads(tier, i, into)]

    monkeypatch.setattr(DiskTier, "reads", slow_reads)
    monkeypatch.setattr(profile, "_seconds_of_parts", watched)
    random_model(config_of("llama")).save_pretrained(tmp_path)
    with open_streamed(tmp_path, drafter="none") as llm:
        assert min(llm.engine.runner.do(profile.seconds_of_passes, [(1, 8), (4, 8)])) > 0


N_NEW = 4


@pytest.mark.slow
def test_host_memory_stays_within_its_budget(tmp_path, monkeypatch):
    """From one layer on its way to all of them, pinned or not."""
    keep_steady(monkeypatch)
    model, draft = (CASES["llama"].build(0, num_hidden_layers=n) for n in (7, 2))
    pair = save_pair(tmp_path, model, draft)
    wanted = generate(model, prompt_of(0), N_NEW)
    mixes = set()
    settings = {"device": "cuda", "max_model_len": 128, "tree_size": 8}
    settings |= pair.settings("static_tree", "match")
    with fake_gpu(monkeypatch):
        with open_unloaded(pair.target, **settings) as unloaded:
            nbytes = unloaded.plan.slot_nbytes
            # three slots and a layer
            settings["device_memory"] = unloaded.plan.reserved.total + 4 * nbytes
        for n_blocks, n_pinned in ((1, 100), (5, 100), (9, 100), (5, 0), (9, 2), (9, 0)):
            pin_at_most(monkeypatch, n_pinned)
            with monkeypatch.context() as patch:
                host = CountingHost(patch)
                budget = READ_BUFFERS + n_blocks * nbytes + nbytes // 2
                with LLM(str(pair.target), host_memory=budget, **settings) as llm:
                    assert say(llm, prompt_of(0), N_NEW) == wanted
                    mixes.add(tuple(sorted(set(llm.plan.tiers))))
                    assert llm.plan.host_nbytes <= budget
                assert host.most["layers"] <= budget - READ_BUFFERS, (n_blocks, nbytes)
                assert host.most["buffers"] <= READ_BUFFERS
                assert host.now["layers"] == 0
    assert mixes == {("device", "disk"), ("device", "disk", "host"), ("device", "host")}


def test_read_buffers_stay_within_their_reserve():
    """Two buffer sets: one loads a draft model while the other reads layers."""
    for settings in (*profile._CANDIDATES, ReadSettings()):
        assert 2 * settings.n_parallel * (settings.request_nbytes + 2 * PAGE) <= READ_BUFFERS
