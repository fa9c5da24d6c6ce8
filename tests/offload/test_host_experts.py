"""Experts computed by the host beside a device: the same text, without more waits."""

import itertools
import random
import threading
import time
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch
from support.checkpoints import pack
from support.experts import FakeGPUWithDisk, cache_on, open_touched
from support.fake_gpu import PATIENCE_S, fake_gpu
from support.programs import wait_until
from support.streams import FakeGPU, Host, content, stream_layers, wanted
from support.tiny import feed, generate, keep_steady, prompt_of, runner_of, say
from transformers import GptOssForCausalLM, Mxfp4Config

from offload_rt.cost.pass_times import ComputeTimes, MachineProfile
from offload_rt.engine import profile
from offload_rt.models.layers import HostWork
from offload_rt.offload.host_experts import HostExperts
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.streamer import LayerView
from offload_rt.tree.topology import Topology

pytestmark = pytest.mark.numeric
CPU = torch.device("cpu")


def set_rates(host, seconds):
    """Set the host's seconds per expert, relative to a copy of one second."""
    host.copy_s = 1.0
    host.times = ComputeTimes((1,), (0,), ((seconds,),))
    host.is_on = True


@pytest.fixture
def computed(monkeypatch):
    """The blocks that hosts compute, by threads of their own."""
    blocks = []
    compute = HostExperts._compute

    def watched(self, work, first, block, rows):
        assert threading.current_thread() is not threading.main_thread()
        blocks.append(block)
        return compute(self, work, first, block, rows)

    monkeypatch.setattr(HostExperts, "_compute", watched)
    return blocks


def check_texts(model, folder, monkeypatch, computed, ways, **settings):
    keep_steady(monkeypatch)
    prompt = prompt_of(0, 15, 150)
    settings |= {"device": "cuda"}
    for seconds, more in ways:
        with fake_gpu(monkeypatch), open_touched(folder, 4, **settings | more) as llm:
            runner = runner_of(llm)
            set_rates(runner.experts.host, seconds)
            before = runner.streamer.meter.read()[0]
            assert say(llm, prompt, 6) == generate(model, prompt, 6)
            assert len(computed) > 8 and runner.streamer.meter.read()[0] > before
        computed.clear()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_cuda_texts_equal_transformers(mixture_of, kind, monkeypatch, computed):
    """With some experts computed on either side, plainly and by trees."""
    ways = (0.5, {}), (2.0, {"drafter": "recycle", "tree_size": 8})
    check_texts(*mixture_of(kind), monkeypatch, computed, ways)


def test_host_computes_quantised_experts_from_their_codes(mxfp4_checkpoint, monkeypatch, computed):
    options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.float32}
    model = GptOssForCausalLM.from_pretrained(mxfp4_checkpoint, **options).eval()
    check_texts(model, mxfp4_checkpoint, monkeypatch, computed, [(0.3, {})], dtype="float32")


@pytest.mark.parametrize(("kind", "n_routers"), [("qwen3_moe", 4), ("deepseek_v3", 3)])
def test_routers_are_the_only_waits(kind, n_routers, mixture_of, monkeypatch, computed):
    """The first of four layers of deepseek_v3 is dense."""
    prompt = prompt_of(0, 15, 150)
    folder = mixture_of(kind)[1]
    with fake_gpu(monkeypatch) as counts, open_touched(folder, 4, device="cuda") as llm:
        runner = runner_of(llm)
        feed(runner, runner.new_cache(40), prompt, Topology.chain(15))  # times experts
        assert runner.experts.host.is_on
        assert all(seconds > 0 for seconds in runner.experts.host.times.seconds[0])
        set_rates(runner.experts.host, 0.5)
        computed.clear()
        before = counts.n_waits
        feed(runner, runner.new_cache(40), prompt, Topology.chain(15))
        assert counts.n_waits - before == n_routers and len(computed) > 4


def test_passes_are_timed_without_the_host(mixture_of, monkeypatch):
    def profile_passes(runner, moved, rows, disk):
        feed(runner, runner.new_cache(40), prompt_of(0, 9, 150), Topology.chain(9))
        assert not runner.experts.host.is_on
        return MachineProfile((("host", 1.0),), 1.0)

    monkeypatch.setattr(profile, "pass_profile", profile_passes)
    folder = mixture_of("qwen3_moe")[1]
    more = {"device": "cuda", "drafter": "recycle", "tree_size": 4}
    with fake_gpu(monkeypatch), open_touched(folder, 4, **more) as llm:
        host = runner_of(llm).experts.host
        assert host.is_on and llm.engine.cost._moved.experts.host == host.times


@contextmanager
def host_of(cache, images, seconds):
    """Attach host experts of a given speed to a cache."""
    view = lambda layout, block: LayerView(0, layout, block)  # noqa: E731
    cache.host = HostExperts(images.image, view, 1.0, CPU, 1)
    set_rates(cache.host, seconds)
    with closing(cache.host):
        yield


def nothing(x, *_):
    """Compute nothing."""
    return x


def test_experts_on_all_three_tiers_are_computed(files):
    """Copied or computed on the host, each with its own bytes."""
    chance = random.Random(0)
    requests = [(0, [0, 1]), (1, [0, 1]), (0, [0, 1])]
    requests += [(i % 2, chance.sample(range(3), chance.randrange(1, 4))) for i in range(12)]
    n_computed = 0
    with (
        cache_on(FakeGPUWithDisk, files, 2, 4) as (cache, _, device),
        host_of(cache, cache._host, 0.4),
    ):
        images = cache._host
        cache.host.release = images.release
        for k, experts in requests:
            contents = {}

            def compute(x, expert, view, contents=contents):
                contents[expert] = content(view.layout, view.data)
                time.sleep(0.005)
                assert contents[expert] == content(view.layout, view.data)
                return x

            copied, came = visit(cache, k, experts, compute, device.look)
            assert [seen for _, seen in device.seen()] == [
                wanted(3 * k + expert) for expert in came if expert in copied
            ]
            rest = set(experts) - copied
            assert contents == {expert: wanted(3 * k + expert) for expert in rest}
            n_computed += len(contents)
            assert not images._taken.any()
    assert n_computed


def visit(cache, k, experts, compute, look=lambda view: None):
    """Return the experts that arrived as weights, at which a device looks, and all results."""
    work = HostWork(compute, lambda expert: torch.full((1, 1), float(expert)))
    came, copied = {}, set()
    for expert, what in cache.arrive(k, dict.fromkeys(experts, 1), work):
        came[expert] = what
        if not isinstance(what, torch.Tensor):
            look(what)
            copied.add(expert)
    assert came.keys() == set(experts)
    return copied, came


def test_frequently_used_experts_are_copied_to_the_device():
    """An expert used once is not copied."""
    with cache_on(FakeGPU, None, 2) as (cache, tier, device), host_of(cache, tier, 0.01):
        times = []
        for expert in [0] * 20 + [1] * 20:
            times.append(visit(cache, 0, [expert], nothing)[0])
            device.copies.synchronize()
        assert times == [set(), *[{0}] * 19, set(), *[{1}] * 19]
        n_copies = device.copies.n_copies
        assert visit(cache, 1, [2], nothing)[0] == set()
        assert device.copies.n_copies == n_copies
        assert visit(cache, 0, [0, 1], nothing)[0] == {0, 1}


def test_host_does_not_wait_for_a_running_copy(files):
    """The host computes instead if that ends first; the copy continues for the next pass."""
    go = threading.Event()
    images = MemoryTier()
    for i, layer in enumerate(stream_layers()):
        images.put(i, pack(layer))
    trap = lambda i, n: i == 3 and (go.wait(PATIENCE_S), go.set())  # noqa: E731
    with (
        cache_on(Host, files, 3, n_parallel=1, trap=trap) as (cache, *_),
        host_of(cache, images, 2.0),
    ):
        cache.expect(1, [0])
        assert visit(cache, 0, [1], nothing)[0] == {1}  # and block 3 is being read
        set_rates(cache.host, 0.5)
        assert visit(cache, 1, [0], nothing)[0] == set()
        go.set()
        wait_until(lambda: not cache._coming)
        assert visit(cache, 1, [0], nothing)[0] == {0}


def test_host_error_is_raised_in_the_caller():
    def fail(*_):
        raise MemoryError("no room")

    with cache_on(FakeGPU, None, 3) as (cache, tier, _), host_of(cache, tier, 0.6):
        with pytest.raises(MemoryError, match="no room"):
            visit(cache, 0, [0, 1, 2], fail)
        visit(cache, 1, [0, 1, 2], nothing)


def test_division_of_experts_is_optimal():
    """Compare with all divisions of up to seven experts."""
    rng = np.random.default_rng(0)
    host = HostExperts(None, None, 1.0, CPU, 1)
    for n in [*range(8)] * 8:
        rows = rng.integers(1, 90, n)
        set_rates(host, 0.5)
        seconds = tuple(np.sort(rng.exponential(1.0, 2)).tolist())
        host.times = ComputeTimes((1, 64), (0,), (seconds,))

        def ends(here, rows=rows):
            return max(len(rows) - len(here), host.times.at(rows[[*here]]).sum() if here else 0.0)

        best = min(ends(here) for k in range(n + 1) for here in itertools.combinations(range(n), k))
        assert ends(host.select(dict(enumerate(rows)), np.zeros(n))) == pytest.approx(best)
    for seconds, rows, probs, more, expected in (
        # the second copy would end after the second product
        (1.0, {0: 1, 1: 1}, [0, 0], {"n_before": 1}, [0, 1]),
        # the copy of the other one has begun
        (0.9, {0: 1, 1: 1}, [0.9, 0.1], {"coming": {1}}, [0]),
        (1.0, dict.fromkeys(range(4), 3), [0.1, 0.4, 0.2, 0.3], {}, [0, 2]),
    ):
        set_rates(host, seconds)
        assert host.select(rows, np.array(probs), **more) == expected
    host.is_on = False
    assert host.select({0: 1}, np.zeros(1)) == []
    host.close()
