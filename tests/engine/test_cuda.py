"""The whole engine on CUDA: on a real device if available, otherwise on `fake_gpu`."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.experts import open_touched
from support.fake_gpu import FakeCopyDevice, fake_gpu, record_graph
from support.tiny import (
    CASES,
    feed,
    generate,
    least_streaming,
    open_unloaded,
    prefill,
    prompt_of,
    random_tree,
    say,
)

from offload_rt import LLM, SamplingParams
from offload_rt.engine import builder, engine_spec, loader, profile
from offload_rt.engine import device as engine_device
from offload_rt.engine.memory_plan import DRIVER, READ_BUFFERS, less_margin
from offload_rt.errors import CapacityError, LinkError
from offload_rt.executor.cuda_graphs import CudaCapture, GraphPass
from offload_rt.executor.sequence import Sequence

pytestmark = pytest.mark.usefixtures("steady")


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.cuda)])
def card(request, monkeypatch) -> Callable[..., AbstractContextManager[None]]:
    """Return a context manager for a device, which optionally refuses to pin memory."""
    if request.param == "pretended":
        yield lambda pins=True: fake_gpu(monkeypatch, pins=pins)
        return

    def real(pins: bool = True) -> AbstractContextManager[None]:
        if not pins:
            monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 1)
        return nullcontext()

    yield real


def on_card(directory, **settings):
    return LLM(str(directory), **{"device": "cuda", "max_model_len": 128} | settings)


def little(directory, place="host"):
    """Budgets for two slots and two layers on the device, and for a slot on the host if on disk."""
    with open_unloaded(directory, device="cuda", max_model_len=128, drafter="none") as unloaded:
        plan = unloaded.plan
    on_host = {"host_memory": READ_BUFFERS + plan.slot_nbytes} if place == "disk" else {}
    return {"device_memory": plan.reserved.total + 4 * plan.slot_nbytes, **on_host}


@pytest.mark.parametrize(("name", "where"), [
    ("llama", "device"), ("qwen2-window", "device"), ("qwen3", "device"), ("llama", "host"),
    ("mistral", "host"),
    ("qwen3-window", "disk"), ("qwen2", "disk"), ("llama-dynamic", "unpinned"),
])  # fmt: skip
def test_greedy_tokens_equal_transformers(zoo, card, name, where):
    directory = zoo.directory(name, 0)
    with card(pins=where != "unpinned"):
        budget = {} if where == "device" else little(directory, where)
        with on_card(directory, drafter="none", **budget) as llm:
            assert set(llm.plan.tiers) == {"device", {"unpinned": "host"}.get(where, where)}
            got = say(llm, prompt_of(0), 12)
    assert got == zoo.greedy(name, 0, 12)


@pytest.mark.parametrize(("drafter", "rule"), [
    ("none", "match"), ("ngram", "match"), ("dynamic_tree", "match"),
    ("adaptive_tree", "coupled"),
    ("static_tree", "traversal"), ("static_tree", "sequoia"), ("static_tree", "specinfer"),
    ("static_tree", "match"),
])  # fmt: skip
def test_every_drafter_and_rule_runs_on_cuda(pair, card, drafter, rule):
    """Two prompts in turn, since graphs of the first prompt end with it; then both at once."""
    size = {} if drafter == "none" else {"tree_size": 8}
    with card(), on_card(pair.target, **size, **pair.settings(drafter, rule)) as llm:
        params = SamplingParams(max_new_tokens=6)
        tokens = [llm.generate(prompt_of(seed), params)[0].token_ids for seed in (0, 1)]
        is_sampled = llm.generate(
            [prompt_of(0), prompt_of(1)], SamplingParams(max_new_tokens=4, temperature=0.8, seed=1)
        )
    assert tokens == [generate(pair.model, prompt_of(seed), 6) for seed in (0, 1)]
    assert [len(output.token_ids) for output in is_sampled] == [4, 4]


@pytest.mark.parametrize(("kind", "host"), [
    ("qwen3_moe", {}), ("deepseek_v3", {"host_memory": READ_BUFFERS + (1 << 19)}),
    ("qwen3_next", {}),
])  # fmt: skip
def test_trees_of_general_models_run_on_cuda(mixture_of, card, monkeypatch, kind, host):
    """Slots for four experts, with and without host experts; states of delta nets."""
    monkeypatch.setattr(profile, "upload_gbps", lambda _: 1.0)  # the fake GPU has no clock
    model, folder = mixture_of(kind)
    settings = {"device": "cuda", "drafter": "recycle", "tree_size": 8, "max_model_len": 128}
    with card(), open_touched(folder, 4, **settings, **host) as llm:
        assert (llm.plan.pass_bytes.disk_experts is not None) == bool(host)
        text = say(llm, prompt_of(0, 15, 150), 8)
    assert text == generate(model, prompt_of(0, 15, 150), 8)


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
def test_kernel_logits_differ_only_by_rounding(tmp_path, card, heads):
    """Prompt, trees and captured passes in bfloat16 with heads of 64 columns."""
    n_heads, n_kv_heads = heads
    sizes = {"head_dim": 64, "num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads}
    model = CASES["llama"].build(0, **sizes)
    model.save_pretrained(tmp_path)
    exact, rounded = (logits_on("cpu", tmp_path, dtype) for dtype in ("float32", "bfloat16"))
    with card():
        on_cuda = logits_on("cuda", tmp_path, "bfloat16")
    for mine, its, probs in zip(on_cuda, rounded, exact, strict=True):
        assert (mine - probs).abs().mean() < 1.5 * (its - probs).abs().mean() + 1e-3


@pytest.mark.parametrize("is_streamed", [False, True])
def test_close_releases_graphs_and_host_memory(zoo, pair, card, is_streamed):
    """At once, not when Python looks for circles, including layers that threads have used."""
    gc.disable()
    with card():
        directory = pair.target
        settings = {"tree_size": 8, **pair.settings("static_tree", "sequoia")}
        if is_streamed:
            directory = zoo.directory("llama", 0)
            settings = {"drafter": "none", **little(directory)}
        with on_card(directory, **settings) as llm:
            llm.generate(prompt_of(0), SamplingParams(max_new_tokens=8))
            tiers = set(filter(None, llm.engine.runner.streamer._sources.streamed))
            held = [weakref.ref(image.block) for tier in tiers for image in tier._images.values()]
            held += map(weakref.ref, filter(None, (llm.engine.runner, llm.engine.draft)))
        del llm, tiers
    gc.enable()
    assert len(held) > 1 and not any(reference() for reference in held)


def test_memory_cap_and_float32_sums_end_with_the_engine_or_a_load_error(zoo, card, monkeypatch):
    directory = zoo.directory("llama", 0)
    products = torch.backends.cuda.matmul

    def state():
        names = (f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16"))
        allowed = tuple(getattr(products, name) for name in names)
        return torch.cuda.get_per_process_memory_fraction(), allowed

    with card():
        budget = little(directory)
        before = state()
        assert before[1] == (True, True)
        with on_card(directory, drafter="none", **budget):
            assert state()[0] < before[0] and state()[1] == (False, False)
        assert state() == before
        monkeypatch.setattr(loader, "read_parallel", Mock(side_effect=LinkError("no disk")))
        with pytest.raises(LinkError):
            on_card(directory, drafter="none", **budget)
        assert state() == before


def test_gpu_that_shares_the_memory_of_the_host_holds_no_second_copy(zoo, monkeypatch):
    directory = zoo.directory("llama", 0)
    with (
        fake_gpu(monkeypatch, is_integrated=True),
        on_card(directory, drafter="none", **little(directory)) as llm,
    ):
        assert say(llm, prompt_of(0), 4) == zoo.greedy("llama", 0, 4)
        assert set(llm.plan.tiers) == {"device", "disk"}, "a separate GPU has layers on the host"


def test_gpu_that_shares_the_memory_of_the_host_counts_the_page_cache_as_free(zoo, monkeypatch):
    """CUDA reports less there: files in the page cache, e.g. a downloaded model, count as used."""
    free = 8 << 30
    monkeypatch.setattr(engine_device, "memory_free", lambda: free)
    with (
        fake_gpu(monkeypatch, nbytes=1 << 30, is_integrated=True),
        open_unloaded(zoo.directory("llama", 0), device="cuda") as unloaded,
    ):
        budget = unloaded.plan.budget
    assert budget.device + budget.host == less_margin(free)
    assert 0 < budget.host <= free // 8


def test_budget_is_compared_with_free_memory(zoo, monkeypatch):
    """Another process may have most of a card, and the driver loads modules after planning."""
    directory = zoo.directory("llama", 0)
    free = 1 << 30
    with fake_gpu(monkeypatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, 4 << 30))
        with open_unloaded(directory, device="cuda", device_memory=free - DRIVER) as unloaded:
            assert unloaded.plan.budget.device == free - DRIVER
        with pytest.raises(CapacityError, match="device_memory is more than there is"):
            open_unloaded(directory, device="cuda", device_memory=free - DRIVER + 1)


@pytest.mark.parametrize(("settings", "memory_gbps", "is_told"), [
    ({}, 1000.0, True),
    ({}, 25.0, False),  # reading the weights takes as long as their transfer
    ({"link_format": "raw"}, 1000.0, False),
    ({"dtype": "float32"}, 1000.0, False),
])  # fmt: skip
def test_streamed_16_bit_layers_name_the_lossless_encoding(
    zoo, monkeypatch, settings, memory_gbps, is_told
):
    directory = zoo.directory("llama", 0, dtype=torch.bfloat16)
    with fake_gpu(monkeypatch, has_kernels=True):
        monkeypatch.setattr(engine_spec, "_gpu_rates", lambda target: (25.0, memory_gbps))
        settings = {"device": "cuda", "drafter": "none", **settings}
        settings["device_memory"] = least_streaming(directory, **settings)
        with open_unloaded(directory, **settings) as unloaded:
            notice = unloaded.spec.notice
            assert unloaded.plan.on("host")
    assert (f"run `offload-rt convert {directory}` once, which writes about " in notice) == is_told


def logits_on(device, directory, dtype):
    """Of trees below a prompt, each pass made often enough to be captured and replayed."""
    sizes = {"drafter": "ngram", "tree_size": 32, "max_model_len": 192}
    with LLM(str(directory), device=device, dtype=dtype, **sizes) as llm:
        runner = llm.engine.runner
        logits = []
        cache = prefill(runner, prompt_of(0, 40), 180)
        for seed in (0, 1, 2, 0, 1):
            tree = random_tree(23, seed, 6)
            logits.append(feed(runner, cache, prompt_of(seed, 23), tree).cpu().float())
            runner.discard(cache)
        return logits


@pytest.mark.parametrize(("begun", "variable", "release", "expected"), [
    (False, "", "6.8.0-generic", ["expandable_segments:True"]),
    (False, "PYTORCH_ALLOC_CONF", "6.8.0-generic", []),
    (False, "PYTORCH_CUDA_ALLOC_CONF", "6.8.0-generic", []),
    (True, "", "6.8.0-generic", []),
    (False, "", "5.15.90.1-microsoft-standard-WSL2", []),
])  # fmt: skip
def test_expandable_segments_unless_configured(monkeypatch, begun, variable, release, expected):
    applied = []
    with fake_gpu(monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
        if variable:
            monkeypatch.setenv(variable, "max_split_size_mb:64")
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", applied.append)
        monkeypatch.setattr(engine_device.platform, "release", lambda: release)
        assert engine_device.pick_device("cpu").type == "cpu" and not applied
        assert engine_device.pick_device("auto").type == "cuda"
    assert applied == expected


def counted_steps(llm, counts, params):
    """Return waits, uploads and drafted levels per step, without the first two steps."""
    forward = Mock()
    if llm.engine.draft is not None:
        llm.engine.draft.forward = forward = Mock(wraps=llm.engine.draft.forward)
    sequence = Sequence(prompt_of(0), params, 100)
    llm.engine.add(sequence)
    totals = []
    while sequence.finish_reason is None:
        llm.engine.step()
        totals.append((counts.n_waits, counts.n_uploads, forward.call_count))
    return np.diff(totals[1:], axis=0).tolist()


@pytest.mark.parametrize(("drafter", "rule", "place"), [
    ("static_tree", "traversal", "host"), ("adaptive_tree", "coupled", "device"),
    ("ngram", "match", "host"),
])  # fmt: skip
def test_host_waits_for_each_level_the_pass_and_the_verdict(
    pair, monkeypatch, drafter, rule, place
):
    """Also for the predictions that dynamic trees learn from.

    Only layers pass through the copy engine, neither inputs of a pass nor rows to commit.
    """
    settings = {"tree_size": 24, "tree_depth": 5, "max_model_len": 128, "device": "cuda"}
    settings |= pair.settings(drafter, rule)
    with fake_gpu(monkeypatch, has_kernels=True) as counts:
        if place == "host":
            settings["device_memory"] = least_streaming(pair.target, **settings)
        with LLM(str(pair.target), **settings) as llm:
            assert set(llm.plan.tiers) == {place}
            params = SamplingParams(max_new_tokens=18, temperature=0.8, seed=1)
            steps = counted_steps(llm, counts, params)
    assert len(steps) > 4 and (drafter == "ngram" or sum(n_levels for *_, n_levels in steps) > 10)
    n_others = 2 + (drafter == "adaptive_tree")
    assert all(n_waits <= n_levels + n_others for n_waits, _, n_levels in steps), steps
    assert not any(n_uploads for _, n_uploads, _ in steps), steps


def capture_early(monkeypatch, watch):
    """Capture all likely passes while loading; show their computations to `watch`."""
    capture = Mock(side_effect=lambda compute: watch(compute) or record_graph(compute))
    monkeypatch.setattr(builder, "CudaCapture", lambda: capture)
    monkeypatch.setattr(builder, "_CAPTURING_S", 1e9)


def test_draft_is_captured_before_layers_are_copied(pair, monkeypatch):
    """A capture beside copies would wait for them."""
    order = []
    copy = FakeCopyDevice.copy
    settings = {"tree_size": 8, "max_model_len": 128, "device": "cuda"}
    settings |= pair.settings("adaptive_tree")
    with fake_gpu(monkeypatch):
        monkeypatch.setattr(
            FakeCopyDevice, "copy", lambda *args: order.append("copy") or copy(*args)
        )
        capture_early(monkeypatch, lambda _: order.append("capture"))
        settings["device_memory"] = least_streaming(pair.target, **settings)
        LLM(str(pair.target), **settings).close()
    assert order[:4] == ["capture"] * 4 and set(order[4:]) == {"copy"}


class BrokenGraph:
    """A CUDA graph whose capture fails, except the first capture."""

    n_captures = 0

    def capture_begin(self, **_):
        BrokenGraph.n_captures += 1

    def capture_end(self):
        if BrokenGraph.n_captures > 1:
            raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED\nmore")

    replay = None


def test_failed_capture_disables_graphs_with_a_notice(zoo, monkeypatch, capfd):
    monkeypatch.setattr(BrokenGraph, "n_captures", 0)
    with fake_gpu(monkeypatch):
        monkeypatch.setattr(builder, "CudaCapture", CudaCapture)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", BrokenGraph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
        with on_card(zoo.directory("llama", 0), drafter="none") as llm:
            got = say(llm, prompt_of(0), 12)
    assert got == zoo.greedy("llama", 0, 12) and BrokenGraph.n_captures == 2
    notice = "CUDA graphs are off, which slows small passes: CUBLAS_STATUS"
    assert capfd.readouterr().err.count(notice) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_streamed_engine_gathers_memory_and_its_threads_select_the_device(
    zoo, monkeypatch, is_streamed
):
    """Passes find memory in one block. Threads would leave a context on the first card."""
    gathered = []
    monkeypatch.setattr(builder, "_gather_memory", lambda nbytes, device: gathered.append(nbytes))
    directory = zoo.directory("llama", 0)
    with fake_gpu(monkeypatch) as counts:
        budget = little(directory) if is_streamed else {}
        with on_card(directory, drafter="none", **budget) as llm:
            reserved = llm.plan.reserved
            llm._thread._thread.submit(int).result()
        assert counts.selected == {"engine_0", *["copies"] * is_streamed}
    assert gathered == [reserved.cache + reserved.scratch] * is_streamed


def test_passes_are_captured_while_loading(pair, monkeypatch):
    """Of all widths up to the largest tree; no sequence captures them again."""
    captured = []
    with fake_gpu(monkeypatch):
        capture_early(
            monkeypatch,
            lambda compute: captured.append(getattr(compute.__self__._function, "__self__", None)),
        )
        with on_card(pair.target, tree_size=8, **pair.settings("adaptive_tree")) as llm:
            n_loaded = len(captured)
            for runner in (llm.engine.runner, llm.engine.draft):
                passes = runner.replay.__self__._passes[runner.memory._shared]
                assert sorted(shape.n_rows for shape in passes) == [1, 2, 4, 8]
            text = say(llm, prompt_of(0), 10)
    assert n_loaded == 8 and not any(isinstance(entry, GraphPass) for entry in captured[n_loaded:])
    assert text == generate(pair.model, prompt_of(0), 10)
