"""Experts of mixtures that come as rows need them: none is left out, none is read that is there,
the output is the same.
"""

import random
import threading
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from support.experts import FarGPU, cache_on, open_touched
from support.pretended_card import pretended_card
from support.streams import Host, PretendedGPU, wanted
from support.tiny import feed, generate, keep_steady, prompt_of, runner_of

from bench.models import config_of
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import MachineProfile, PassBytes, TouchedExperts
from offload_rt.cost.tree_size import best_prefix
from offload_rt.engine import profile
from offload_rt.engine.memory_plan import READ_BUFFERS
from offload_rt.errors import CapacityError, LinkError
from offload_rt.models.families import spec_of
from offload_rt.models.stand_ins import Touched
from offload_rt.offload import expert_cache
from offload_rt.offload.expert_cache import ExpertCache
from offload_rt.offload.tiered_experts import TieredExperts
from offload_rt.tree.topology import Topology

READING = pytest.mark.parametrize("make", [Host, FarGPU])
DEVICES = pytest.mark.parametrize("make", [Host, PretendedGPU, FarGPU])


def visit(cache, device, k, experts):
    """Ask for experts of the k-th layer, and hold each against its bytes when it comes and before
    the next one comes.
    """
    came = []
    asked = dict.fromkeys(experts, 1)
    for expert, view in cache.arrive(k, asked):
        device.look(view)
        device.look(view)
        came.append(expert)
    assert sorted(came) == sorted(experts)
    looks = device.seen()
    assert [found for _, found in looks] == [wanted(3 * k + one) for one in came for _ in range(2)]


@DEVICES
@pytest.mark.parametrize("n_slots", [2, 3, 5, 6])
@pytest.mark.parametrize("late_s", [0.0, 0.002])
def test_every_expert_comes_with_its_own_bytes(make, files, n_slots, late_s):
    """Whatever is asked for and expected, in whatever time it is read, computed and copied."""
    chance = random.Random(n_slots)
    with cache_on(make, files, n_slots, late_s=late_s, seed=n_slots) as (cache, _, device):
        for _ in range(30):
            for k in range(2):
                cache.expect(1 - k, chance.sample(range(3), chance.randrange(4)))
                visit(cache, device, k, chance.sample(range(3), chance.randrange(1, 4)))


def n_reads(tier):
    """How often each block was read as a whole, so far."""
    return {
        i: n // len(tier._source.reads(i, torch.empty(tier.layout(i).nbytes, dtype=torch.uint8)))
        for i, n in tier.n_done.items()
    }


def test_what_is_there_is_not_read_and_the_most_used_stay(files):
    with cache_on(Host, files, 3) as (cache, tier, device):
        # experts 0 of both layers are always needed, of the others one after the other
        for _ in range(6):
            for k in range(2):
                visit(cache, device, k, [0])
        for other in (1, 2, 1, 2):
            for k in range(2):
                visit(cache, device, k, [0, other])
    assert n_reads(tier) == {0: 1, 3: 1, 1: 2, 2: 2, 4: 2, 5: 2}


def test_what_was_used_long_ago_makes_room(files):
    with cache_on(Host, files, 2) as (cache, tier, device):
        for one in [0] * 60 + [1] * 30 + [2] + [1]:
            visit(cache, device, 0, [one])
    assert n_reads(tier) == {0: 1, 1: 1, 2: 1}


def test_expected_experts_are_read_while_others_are_computed(files, monkeypatch):
    """Behind those that are needed, and what is unlikely by now is given up if it has not begun."""
    order = []
    with cache_on(Host, files, 4, n_parallel=1, trap=lambda i, n: order.append(i)) as (
        cache,
        tier,
        device,
    ):
        monkeypatch.setattr(expert_cache, "_AHEAD", 1.0)
        cache.expect(1, [2, 0])
        for _, view in cache.arrive(0, {1: 1, 2: 1}):
            device.look(view)
        deadline = threading.Event()
        while n_reads(tier).get(3) != 1:
            assert not deadline.wait(0.001)
        device.seen()
        visit(cache, device, 1, [0, 2])
    assert list(dict.fromkeys(order)) == [1, 2, 5, 3] and set(n_reads(tier).values()) == {1}


@READING
def test_a_read_that_fails_raises_in_the_caller_and_leaves_nothing_behind(make, files):
    def fail(i, n):
        if i == 2 and n == 1:
            raise LinkError("the disk is gone")

    with cache_on(make, files, 4, trap=fail) as (cache, tier, device):
        reads = cache if make is Host else cache._host
        visit(cache, device, 0, [0])
        with pytest.raises(LinkError, match="gone"):
            visit(cache, device, 0, [0, 1, 2])
        assert (
            not reads._n_reading
            and not reads._coming
            and not cache._taken.any()
            and not reads._taken.any()
        )
        device.seen()
        visit(cache, device, 0, [0, 1, 2])
        assert n_reads(tier)[0] == 1
        ahead = cache.arrive(1, {0: 1, 1: 1, 2: 1})
        next(ahead)
        ahead.close()  # whoever computed has failed
        assert (
            not reads._n_reading
            and not reads._coming
            and not cache._taken.any()
            and not reads._taken.any()
        )
        visit(cache, device, 1, [0, 1, 2])


def test_what_is_on_the_host_is_read_once(files):
    """Beside a card that has room for two."""
    with cache_on(FarGPU, files, 2, n_on_host=6) as (cache, tier, device):
        for _ in range(5):
            for k in range(2):
                visit(cache, device, k, [0, 1, 2])
    assert n_reads(tier) == dict.fromkeys(range(6), 1)


@READING
def test_closing_wakes_who_waits(make, files):
    waiting = threading.Event()
    with cache_on(make, files, 2, trap=lambda *_: waiting.wait(0.2)) as (cache, _, device):
        closing_it = threading.Timer(0.02, cache.close)
        closing_it.start()
        with pytest.raises(LinkError, match="released"):
            visit(cache, device, 0, [0, 1])
        waiting.set()
        closing_it.join()


# Whole models. One by one; with shared experts; dense first, with shared experts; in one tensor,
# transposed, with biases.
KINDS = ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_transformers(mixture_of, kind, monkeypatch):
    """Plainly and by trees, one and several, prompts longer than a chunk: with three slots, and
    with a third of all.
    """
    keep_steady(monkeypatch)
    model, folder = mixture_of(kind)
    prompts = [prompt_of(seed, n, 150) for seed, n in enumerate((15, 70, 3))]
    texts = [generate(model, one, 12) for one in prompts]
    params = SamplingParams(max_new_tokens=12, temperature=0.0)
    for n_slots, more in (
        (3, {}),
        (11, {"drafter": "recycle", "tree_size": 16}),
        (3, {"max_num_seqs": 3}),
    ):
        with open_touched(folder, n_slots, **more) as llm:
            runner_of(llm)._chunk_rows = 32
            together = (
                llm.generate(prompts, params)
                if "max_num_seqs" in more
                else [llm.generate(one, params)[0] for one in prompts]
            )
            assert [one.token_ids for one in together] == texts


def test_a_pass_reads_the_experts_that_it_touches_and_no_others(mixture_of, monkeypatch):
    """By transformers' routers, less what was there; expected ones, which are read besides, are
    left out here.
    """
    model, folder = mixture_of("qwen3_moe")
    monkeypatch.setattr(ExpertCache, "expect", lambda *_: None)
    chosen = []
    prompt = prompt_of(4, 9, 150)
    text = [*prompt, *generate(model, prompt, 8)]
    hooks = [
        one.mlp.gate.register_forward_hook(lambda *io: chosen.append(io[2][2]))
        for one in model.model.layers
    ]
    model(torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    with open_touched(folder, 7, watch=True) as llm:
        runner = runner_of(llm)
        cache = runner_of(llm).experts
        tier = cache.tier
        rows = runner_of(llm).new_cache(len(text))
        of_block = Counter({i: tier._source.nbytes(i) for i in range(32)})
        arrive = cache.arrive
        missing = []
        n_before = 0

        def watched(k, n_rows, work):
            missing.extend(8 * k + one for one in n_rows if 8 * k + one not in cache._slot_of)
            touched.append(set(n_rows))
            return arrive(k, n_rows, work)

        monkeypatch.setattr(cache, "arrive", watched)
        for start, stop in ((0, 9), *((at, at + 1) for at in range(9, 17))):
            touched = []
            before = runner.streamer.meter.read()[0]
            missing.clear()
            feed(runner, rows, text[start:stop], Topology.chain(stop - start))
            runner.commit(rows, range(stop - start))
            assert touched == [set(one[start:stop].flatten().tolist()) for one in chosen]
            assert runner.streamer.meter.read()[0] - before == sum(of_block[one] for one in missing)
            n_fetched = cache.n_fetched - n_before
            n_before = cache.n_fetched
            assert n_fetched == len(missing)


def test_the_next_router_says_what_is_likely(mixture_of, monkeypatch):
    """What is expected is what the router of the next layer makes of what the experts of this one
    get.
    """
    model, folder = mixture_of("deepseek_v3")
    expected = []
    given = []
    mix = Touched.mix

    def watched(self, module, hidden, *choice):
        given.append(hidden.clone())
        return mix(self, module, hidden, *choice)

    monkeypatch.setattr(Touched, "mix", watched)
    monkeypatch.setattr(
        ExpertCache, "expect", lambda self, k, experts: expected.append((k, set(experts)))
    )
    with open_touched(folder, 6) as llm, torch.no_grad():
        feed(runner_of(llm), runner_of(llm).new_cache(5), prompt_of(1, 5, 150), Topology.chain(5))
        gates = [model.model.layers[i].mlp.gate for i in (2, 3)]
        likely = [set(gate(x)[2].flatten().tolist()) for gate, x in zip(gates, given, strict=False)]
    assert expected == [(1, likely[0]), (2, likely[1]), (0, set())]


def test_a_card_waits_once_for_each_layer(mixture_of, monkeypatch):
    """Experts lie on the host; two of three are evicted in each layer."""
    model, folder = mixture_of("deepseek_v3")
    prompt = prompt_of(0, 15, 150)
    with pretended_card(monkeypatch) as counts, open_touched(folder, 4, device="cuda") as llm:
        runner = runner_of(llm)
        cache = runner.new_cache(40)
        feed(runner, cache, prompt, Topology.chain(15))  # brings frequencies to the card
        runner.discard(cache)
        before = counts.n_waits
        got = feed(runner, cache, prompt, Topology.chain(15))
        assert counts.n_waits - before == 3  # of four layers the first is dense
        with torch.no_grad():
            expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
        torch.testing.assert_close(
            got.cpu(), expected, atol=2e-4 * float(expected.abs().max()), rtol=0
        )
        text = llm.generate(prompt, SamplingParams(max_new_tokens=8, temperature=0.0))[0].token_ids
    assert text == generate(model, prompt, 8)


@pytest.mark.parametrize(
    ("pins", "more"), [(True, {"drafter": "recycle", "tree_size": 8}), (False, {})]
)
def test_a_card_computes_with_more_experts_than_its_host_holds(mixture_of, monkeypatch, pins, more):
    """Of 24 it holds four and the host some eight; a disk brings the others."""
    monkeypatch.setattr(profile, "upload_gbps", lambda _: 1.0)  # the pretended card has no clock
    model, folder = mixture_of("deepseek_v3")
    prompts = [prompt_of(seed, 15, 150) for seed in range(2)]
    params = SamplingParams(max_new_tokens=8, temperature=0.0)
    with LLM.open(
        EngineConfig(str(folder), device="cpu", max_model_len=128, drafter="none")
    ) as whole:
        layer = max(whole.plan.layer_nbytes)
    with (
        pretended_card(monkeypatch, pins=pins),
        open_touched(folder, 4, device="cuda", host_memory=READ_BUFFERS + 2 * layer, **more) as llm,
    ):
        experts = llm.plan.experts
        disk_experts = llm.plan.pass_bytes.disk_experts
        assert 2 < experts.n_on_host < 20 and disk_experts.n_resident == pytest.approx(
            (4 + experts.n_on_host) / 3
        )
        assert isinstance(runner_of(llm).experts, TieredExperts)
        texts = [llm.generate(one, params)[0].token_ids for one in prompts]
    assert texts == [generate(model, one, 8) for one in prompts]


def test_placement_takes_whole_layers_where_they_fit_and_experts_where_they_move_less(mixture_of):
    _, folder = mixture_of("qwen3_moe")
    settings = {"device": "cpu", "max_model_len": 128, "drafter": "none"}
    with LLM.open(EngineConfig(str(folder), **settings)) as llm:
        assert llm.plan.experts is None and llm.plan.is_resident
        whole = llm.plan
    least = whole.reserved.total + 2 * whole.slot_nbytes
    with LLM.open(EngineConfig(str(folder), device_memory=least, **settings)) as llm:
        plan = llm.plan
        touched = plan.pass_bytes.experts
        assert plan.experts and not plan.is_resident and plan.device_nbytes <= least
        assert touched == TouchedExperts(
            "disk", 4, 8, 2, plan.experts.nbytes, plan.n_expert_slots / 4
        )
        assert plan.pass_bytes.at(0, 1)["disk"] < sum(whole.layer_nbytes) - plan.reserved.experts
    # Less than two whole layers: rests are streamed as well, and three experts are the least.
    with pytest.raises(CapacityError, match="set --device-memory to"):
        LLM.open(EngineConfig(str(folder), device_memory=whole.reserved.total, **settings))
    with LLM(str(folder), device_memory=least - whole.slot_nbytes, **settings) as llm:
        assert "disk" in llm.plan.tiers
        prompt = prompt_of(0, 15, 150)
        text = llm.generate(prompt, SamplingParams(max_new_tokens=8, temperature=0.0))[0].token_ids
    assert text == generate(mixture_of("qwen3_moe")[0], prompt, 8)


def test_trees_are_small_where_breadth_costs_bytes():
    """Of 128 experts a row more brings nearly eight more; of whole layers it brings nothing."""
    machine = MachineProfile("some", True, (("disk", 1.0),), 100.0)
    fine = PassBytes((), 10**8, experts=TouchedExperts("disk", 48, 128, 8, 10**7))
    whole = PassBytes((("disk", 48 * 128 * 10**7),), 10**8)
    chances = 0.7 ** np.arange(1, 65)
    rows = np.arange(1, 66)
    n_fine, n_whole = (
        best_prefix(chances, CostEstimator(machine, one).seconds(rows, 100))
        for one in (fine, whole)
    )
    assert n_fine <= 2 and n_whole >= 8


def test_what_passes_really_bring_is_learned_by_their_rows_and_kept():
    """Routers that take the same for all rows of a pass; by formula one of 16 rows brings ten times
    as much as one of 1.
    """
    machine = MachineProfile("some", True, (("disk", 1.0),), 100.0)
    n = np.array([1, 2, 16, 64])
    formula = TouchedExperts("disk", 48, 128, 8, 10**6, 32.0)
    same = 48 * 6 * 10**6 / 1e9
    closes = ExitStack()
    cost = CostEstimator(
        machine,
        PassBytes((), 10**6, experts=formula),
        experts=profile.experts_bias("one", 99, closes),
    )

    def seconds(one):
        return one.fixed(0.0).seconds(n, 100) / one._slack

    before = seconds(cost)
    np.testing.assert_allclose(before, formula.of_pass(n) / 1e9, rtol=0.01)
    cost.passed(16, 100, 0.0, 1.0, 0.0, n_experts=48 * 6)
    # one pass says little
    assert 0.5 < seconds(cost)[2] / before[2] < 0.6 and seconds(cost)[0] > 0.85 * before[0]
    for _ in range(200):
        for n_rows in (1, 16):
            cost.passed(n_rows, 100, 0.0, 1.0, 0.0, n_experts=48 * 6)
    np.testing.assert_allclose(seconds(cost)[[0, 2]], same, rtol=0.15)
    # of rows that were not seen, as of those next to them
    assert seconds(cost)[3] < 0.3 * before[3]
    closes.close()
    with ExitStack() as later:
        kept = profile.experts_bias("one", 99, later)
        again = CostEstimator(machine, PassBytes((), 10**6, experts=formula), experts=kept)
        other = CostEstimator(
            machine,
            PassBytes((), 10**6, experts=formula),
            experts=profile.experts_bias("one", 9, later),
        )
        np.testing.assert_allclose(seconds(again), seconds(cost))
        np.testing.assert_allclose(seconds(other), before)


def test_layers_of_each_kind_are_timed(mixture_of, monkeypatch):
    """The first one of deepseek is dense; the others have experts."""
    monkeypatch.setattr(
        profile, "_seconds_of_parts", lambda runner, block, step: [10.0 if block.i else 1.0, 0.5]
    )
    with open_touched(mixture_of("deepseek_v3")[1], 4) as llm:
        assert set(profile.compute_times(runner_of(llm), 8, 64).seconds[0]) == {
            1.0 + 3 * 10.0 + 0.5
        }


def test_operations_are_of_the_experts_that_a_row_takes():
    """Also where the config calls their number otherwise."""
    raw = config_of("gemma4_text").to_dict() | {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
    }
    few, many = (spec_of(raw | {"num_experts": n, "moe_intermediate_size": 32}) for n in (4, 64))
    more = 2 * 60 * (few.hidden_size + 1)  # of the router and its scales, for a row
    assert many.flops(0, 1, 0) - few.flops(0, 1, 0) == more
