"""Experts on demand: each is read once while cached, or computed by the host beside a device."""

import itertools
import random
import re
import threading
import time
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest
import torch
from support.checkpoints import pack
from support.experts import FakeGPUWithDisk, cache_on, open_touched
from support.fake_gpu import PATIENCE_S, fake_gpu
from support.programs import wait_until
from support.spies import before_calls
from support.streams import FakeGPU, Host, content, stream_layers, wanted
from support.tiny import feed, generate, keep_steady, open_unloaded, prompt_of, runner_of, say
from transformers import GptOssForCausalLM, Mxfp4Config

from bench.models.tiny import config_of
from offload_rt import LLM
from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import ComputeTimes, MachineProfile, PassBytes, TouchedExperts
from offload_rt.engine import profile
from offload_rt.engine.memory_plan import READ_BUFFERS
from offload_rt.errors import CapacityError, LinkError
from offload_rt.models import traced_experts
from offload_rt.models.families import parse_architecture
from offload_rt.models.layers import HostWork
from offload_rt.offload import expert_cache
from offload_rt.offload.card_experts import CardExperts, TieredExperts
from offload_rt.offload.expert_cache import ExpertCache
from offload_rt.offload.host_experts import HostExperts
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.streamer import LayerView
from offload_rt.offload.thread_experts import ThreadExperts
from offload_rt.tree.topology import Topology

pytestmark = pytest.mark.numeric


def visit(cache, device, k, experts):
    """Request experts of layer k; compare the bytes of each on arrival and before the next."""
    came = []
    for expert, view in cache.arrive(k, dict.fromkeys(experts, 1)):
        device.look(view)
        device.look(view)
        came.append(expert)
    assert sorted(came) == sorted(experts)
    expected = [wanted(3 * k + expert) for expert in came for _ in range(2)]
    assert [seen for _, seen in device.seen()] == expected


@pytest.mark.parametrize("make", [Host, FakeGPU, FakeGPUWithDisk])
@pytest.mark.parametrize(("n_slots", "late_s"), [(2, 0.002), (3, 0.0), (5, 0.002), (6, 0.0)])
def test_experts_arrive_with_their_bytes(make, files, n_slots, late_s):
    chance = random.Random(n_slots)
    with cache_on(make, files, n_slots, late_s=late_s, seed=n_slots) as (cache, _, device):
        for _ in range(30):
            for k in range(2):
                cache.expect(1 - k, chance.sample(range(3), chance.randrange(4)))
                visit(cache, device, k, chance.sample(range(3), chance.randrange(1, 4)))


@pytest.mark.parametrize(("make", "n_slots", "requests", "expected"), [
    # Experts 0 of both layers are always needed, of the others one after the other.
    (Host, 3, [(k, {0, i}) for i in (0, 0, 0, 0, 0, 0, 1, 2, 1, 2) for k in range(2)],
        {0: 1, 3: 1, 1: 2, 2: 2, 4: 2, 5: 2}),
    # An expert that is no longer used is evicted.
    (Host, 2, [(0, {i}) for i in [0] * 60 + [1] * 30 + [2] + [1]], {0: 1, 1: 1, 2: 1}),
    # All experts are in host memory, beside a card that has room for two.
    (FakeGPUWithDisk, 2, [(0, {0, 1, 2}), (1, {0, 1, 2})] * 5, dict.fromkeys(range(6), 1)),
])  # fmt: skip
def test_cached_experts_are_not_read_and_the_most_used_stay(
    make, n_slots, requests, expected, files
):
    with cache_on(make, files, n_slots, n_on_host=6) as (cache, tier, device):
        for k, experts in requests:
            visit(cache, device, k, experts)
    assert tier.n_reads() == expected


def test_expected_experts_are_read_during_compute(files, monkeypatch):
    """After needed experts; unlikely experts are cancelled if their read has not started."""
    order = []
    trap = lambda i, n: order.append(i)  # noqa: E731
    with cache_on(Host, files, 4, n_parallel=1, trap=trap) as (cache, tier, device):
        monkeypatch.setattr(expert_cache, "_AHEAD", 1.0)
        cache.expect(1, [2, 0])
        for _, view in cache.arrive(0, {1: 1, 2: 1}):
            device.look(view)
        wait_until(lambda: tier.n_reads().get(3) == 1)
        device.seen()
        visit(cache, device, 1, [0, 2])
    assert list(dict.fromkeys(order)) == [1, 2, 5, 3] and set(tier.n_reads().values()) == {1}
    monkeypatch.undo()
    # cached predictions leave the prefetch to missing experts
    with cache_on(Host, files, 5) as (cache, tier, device):
        visit(cache, device, 1, [0])
        cache.expect(1, [0, 1, 2])
        visit(cache, device, 0, [0])
        wait_until(lambda: tier.n_reads().get(4) == 1)
    assert tier.n_reads() == {3: 1, 0: 1, 4: 1}


READING = pytest.mark.parametrize("make", [Host, FakeGPUWithDisk])


def test_predictions_are_ranked_by_frequency_and_probability():
    chosen = torch.tensor([[5, 1, 4], [1, 7, 5], [0, 1, 2]])
    assert traced_experts._ranked(chosen, range(8)) == [1, 5, 0, 7, 4, 2]
    assert traced_experts._ranked(chosen, range(4, 8)) == [1, 3, 0]


@READING
def test_failed_read_is_raised_and_releases_all_slots(make, files):
    def fail(i, n):
        if i == 2 and n == 1:
            raise LinkError("the disk is gone")

    with cache_on(make, files, 4, trap=fail) as (cache, tier, device):
        reads = cache if make is Host else cache._host

        def is_released():
            is_idle = not reads._n_reading and not reads._coming
            return is_idle and not cache._taken.any() and not reads._taken.any()

        visit(cache, device, 0, [0])
        with pytest.raises(LinkError, match="gone"):
            visit(cache, device, 0, [0, 1, 2])
        assert is_released()
        device.seen()
        visit(cache, device, 0, [0, 1, 2])
        assert tier.n_reads()[0] == 1
        ahead = cache.arrive(1, {0: 1, 1: 1, 2: 1})
        next(ahead)
        ahead.close()  # whoever computed has failed
        assert is_released()
        visit(cache, device, 1, [0, 1, 2])


@READING
def test_close_wakes_a_waiting_pass(make, files, monkeypatch):
    is_reading = threading.Event()
    go_on = threading.Event()

    def trap(i, n):
        is_reading.set()
        assert go_on.wait(PATIENCE_S)

    with cache_on(make, files, 2, trap=trap) as (cache, _, device):
        # The pass has left its wait before the read ends.
        for kind in (ThreadExperts, CardExperts):
            before_calls(monkeypatch, kind, "_drain", lambda _: go_on.set())
        closer = threading.Thread(target=lambda: is_reading.wait(PATIENCE_S) and cache.close())
        closer.start()
        with pytest.raises(LinkError, match="released"):
            visit(cache, device, 0, [0, 1])
        closer.join(PATIENCE_S)
        assert not closer.is_alive()


def test_pass_reads_exactly_the_missing_experts(mixture_of, monkeypatch):
    """By transformers' routers, of which the next predicts experts on this layer's input."""
    model, folder = mixture_of("deepseek_v3")
    prompt = prompt_of(4, 9, 150)
    text = [*prompt, *generate(model, prompt, 8)]
    gates = [layer.mlp.gate for layer in model.model.layers[1:]]
    given = []
    keep = lambda *io: given.append(io[1][0].view(17, -1))  # noqa: E731
    hooks = [gate.register_forward_hook(keep) for gate in gates]
    model(torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    touched, expected = [], []
    monkeypatch.setattr(ExpertCache, "expect", lambda _, k, likely: expected.append((k, {*likely})))
    with open_touched(folder, 7, watch=True) as llm, torch.no_grad():
        runner = runner_of(llm)
        cache = runner.experts
        meter = runner.streamer.meter
        rows = runner.new_cache(len(text))

        def note(k, n_rows, _):
            missing = {8 * k + expert for expert in n_rows} - cache._slot_of.keys()
            touched.append((set(n_rows), missing))

        before_calls(monkeypatch, cache, "arrive", note)
        for start, stop in ((0, 9), *((at, at + 1) for at in range(9, 17))):
            n_before, before = cache.n_fetched, meter.read()[0]
            touched.clear()
            expected.clear()
            feed(runner, rows, text[start:stop], Topology.chain(stop - start))
            runner.commit(rows, range(stop - start))

            def chosen(gate, x, part=slice(start, stop)):
                return set(gate(x[part])[2].flatten().tolist())

            assert [experts for experts, _ in touched] == [*map(chosen, gates, given)]
            likely = [*map(chosen, gates[1:], given), set()]
            assert expected == [((k + 1) % 3, experts) for k, experts in enumerate(likely)]
            blocks = [block for _, missing in touched for block in missing]
            assert meter.read()[0] - before == sum(map(cache.tier._source.nbytes, blocks))
            assert cache.n_fetched - n_before == len(blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pins", "more"), [(True, {"drafter": "recycle", "tree_size": 8}), (False, {})]
)
def test_cuda_computes_more_experts_than_the_host_holds(mixture_of, monkeypatch, pins, more):
    """Of 24 experts the device holds four, the host about eight, and the disk the rest."""
    monkeypatch.setattr(profile, "upload_gbps", lambda _: 1.0)  # the fake GPU has no clock
    model, folder = mixture_of("deepseek_v3")
    prompts = [prompt_of(seed, 15, 150) for seed in range(2)]
    with open_unloaded(folder, device="cpu", max_model_len=128, drafter="none") as whole:
        layer = max(whole.plan.layer_nbytes)
    with (
        fake_gpu(monkeypatch, pins=pins),
        open_touched(folder, 4, device="cuda", host_memory=READ_BUFFERS + 2 * layer, **more) as llm,
    ):
        experts = llm.plan.experts
        disk_experts = llm.plan.pass_bytes.disk_experts
        assert 2 < experts.n_on_host < 20
        assert disk_experts.n_resident == pytest.approx((4 + experts.n_on_host) / 3)
        assert isinstance(runner_of(llm).experts, TieredExperts)
        texts = [say(llm, prompt, 8) for prompt in prompts]
    assert texts == [generate(model, prompt, 8) for prompt in prompts]


def test_placement_prefers_whole_layers_then_experts(mixture_of):
    _, folder = mixture_of("qwen3_moe")
    settings = {"device": "cpu", "max_model_len": 128, "drafter": "none"}
    with open_unloaded(folder, **settings) as llm:
        assert llm.plan.experts is None and llm.plan.is_resident
        whole = llm.plan
    least = whole.reserved.total + 2 * whole.slot_nbytes
    with open_unloaded(folder, device_memory=least, **settings) as llm:
        plan = llm.plan
        assert plan.experts and not plan.is_resident and plan.device_nbytes <= least
        sizes = 4, 8, 2, plan.experts.nbytes, plan.n_expert_slots / 4
        assert plan.pass_bytes.experts == TouchedExperts("disk", *sizes, n_on_host=0.0)
        assert plan.pass_bytes.at(0, 1)["disk"] < sum(whole.layer_nbytes) - plan.reserved.experts
    # Less than two whole layers: rests are streamed as well, and three experts are the least.
    with pytest.raises(CapacityError) as refused:
        open_unloaded(folder, device_memory=whole.reserved.total, **settings)
    named = int(re.search(r"set device_memory to (\d+)", str(refused.value))[1])
    with pytest.raises(CapacityError):
        open_unloaded(folder, device_memory=named - 1, **settings)
    assert named < least - whole.slot_nbytes
    with LLM(str(folder), device_memory=named, **settings) as llm:
        assert "disk" in llm.plan.tiers
        prompt = prompt_of(0, 15, 150)
        text = say(llm, prompt, 8)
    assert text == generate(mixture_of("qwen3_moe")[0], prompt, 8)


def test_expert_bytes_are_learned_per_row_count():
    """All rows select the same experts; the formula predicts ten times more."""
    machine = MachineProfile((("disk", 1.0),), 100.0)
    n = np.array([1, 2, 16, 64])
    formula = TouchedExperts("disk", 48, 128, 8, 10**6, 32.0)
    same = 48 * 6 * 10**6 / 1e9

    def estimator(number, closes):
        moved = PassBytes((), 10**6, experts=formula)
        return CostEstimator(machine, moved, experts=profile.experts_bias("one", number, closes))

    def seconds(cost):
        return cost.fixed(0.0).seconds(n, 100) / cost._slack

    with ExitStack() as closes:
        cost = estimator(99, closes)
        before = seconds(cost)
        np.testing.assert_allclose(before, formula.pass_nbytes(n) / 1e9, rtol=0.01)
        cost.passed(16, 100, 0.0, 1.0, 0.0, n_experts=48 * 6)
        # one pass says little
        assert 0.5 < seconds(cost)[2] / before[2] < 0.6 and seconds(cost)[0] > 0.85 * before[0]
        for n_rows in (1, 16) * 200:
            cost.passed(n_rows, 100, 0.0, 1.0, 0.0, n_experts=48 * 6)
        np.testing.assert_allclose(seconds(cost)[[0, 2]], same, rtol=0.15)
        # of rows that were not seen, as of those next to them
        assert seconds(cost)[3] < 0.3 * before[3]
    with ExitStack() as later:
        np.testing.assert_allclose(seconds(estimator(99, later)), seconds(cost))
        np.testing.assert_allclose(seconds(estimator(9, later)), before)


def test_flops_count_the_experts_of_a_row():
    """Also where the config calls their number otherwise."""
    experts = {"enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 32}
    raw = config_of("gemma4_text").to_dict() | experts
    few, many = (parse_architecture(raw | {"num_experts": n}) for n in (4, 64))
    more = 2 * 60 * (few.hidden_size + 1)  # of the router and its scales, for a row
    assert many.flops(0, 1, 0) - few.flops(0, 1, 0) == more


CPU = torch.device("cpu")


def set_rates(host, seconds):
    host.copy_s = 1.0
    host.times = ComputeTimes((1,), (0,), ((seconds,),))
    host.is_on = True


@pytest.fixture
def computed(monkeypatch):
    """The blocks that hosts compute, by threads of their own."""
    blocks = []

    def note(host, work, first, block, rows):
        assert threading.current_thread() is not threading.main_thread()
        blocks.append(block)

    before_calls(monkeypatch, HostExperts, "_compute", note)
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
    view = lambda layout, block: LayerView(0, layout, block)  # noqa: E731
    cache.host = HostExperts(images.image, view, 1.0, CPU, 1)
    set_rates(cache.host, seconds)
    with closing(cache.host):
        yield


def nothing(x, *_):
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

            copied, came = request(cache, k, experts, compute, device.look)
            assert [seen for _, seen in device.seen()] == [
                wanted(3 * k + expert) for expert in came if expert in copied
            ]
            rest = set(experts) - copied
            assert contents == {expert: wanted(3 * k + expert) for expert in rest}
            n_computed += len(contents)
            assert not images._taken.any()
    assert n_computed


def request(cache, k, experts, compute, look=lambda view: None):
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
            times.append(request(cache, 0, [expert], nothing)[0])
            device.copies.synchronize()
        assert times == [set(), *[{0}] * 19, set(), *[{1}] * 19]
        n_copies = device.copies.n_copies
        assert request(cache, 1, [2], nothing)[0] == set()
        assert device.copies.n_copies == n_copies
        assert request(cache, 0, [0, 1], nothing)[0] == {0, 1}


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
        assert request(cache, 0, [1], nothing)[0] == {1}  # and block 3 is being read
        set_rates(cache.host, 0.5)
        assert request(cache, 1, [0], nothing)[0] == set()
        go.set()
        wait_until(lambda: not cache._coming)
        assert request(cache, 1, [0], nothing)[0] == {0}


def test_host_error_is_raised_in_the_caller():
    def fail(*_):
        raise MemoryError("no room")

    with cache_on(FakeGPU, None, 3) as (cache, tier, _), host_of(cache, tier, 0.6):
        with pytest.raises(MemoryError, match="no room"):
            request(cache, 0, [0, 1, 2], fail)
        request(cache, 1, [0, 1, 2], nothing)


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
