"""Which layer lives where: never over the budget, never refused without need, spread evenly."""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from offload_rt.errors import CapacityError
from offload_rt.offload.placement import (
    MemoryBudget,
    Plan,
    ReservedMemory,
    least_budget,
    place_layers,
    spread,
    with_host_slots,
)

LAYERS = st.one_of(
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    st.builds(lambda n, nbytes: [nbytes] * n, st.integers(1, 90), st.integers(1, 10**9)),
)
NEED = st.builds(
    ReservedMemory,
    non_layer=st.integers(0, 5000),
    cache=st.integers(0, 5000),
    scratch=st.integers(0, 5000),
)


def used(plan: Plan) -> int:
    """Bytes on the device, added up anew."""
    resident = sum(
        n for tier, n in zip(plan.tiers, plan.layer_nbytes, strict=True) if tier == "device"
    )
    reserved = plan.reserved.non_layer + plan.reserved.cache + plan.reserved.scratch
    return reserved + resident + plan.n_slots * max(plan.layer_nbytes)


@given(layers=LAYERS, need=NEED, share=st.floats(0, 1.5), host=st.integers(0, 10**10))
def test_plan_stays_within_its_budgets(layers, need, share, host):
    budget = int((sum(layers) + need.total) * share)
    assume(budget >= least_budget(layers, need))
    plan = place_layers(layers, need, MemoryBudget(budget, host))
    assert used(plan) == plan.device_nbytes <= budget
    assert plan.on("host") <= host
    assert len(plan.tiers) == len(layers)
    assert set(plan.tiers) <= {"device", "host", "disk"}
    assert plan.layer_nbytes == tuple(layers)


def test_small_layers_fill_the_room_beside_a_large_one():
    layers = [1000] + [100] * 30
    plan = place_layers(layers, ReservedMemory(0, 0, 0), MemoryBudget(3500, 350))
    assert plan.n_slots == 3 and plan.tiers.count("device") == 5
    assert plan.tiers.count("host") == 3 and plan.tiers[0] == "disk"


@given(
    layers=LAYERS,
    need=NEED,
    share=st.floats(0, 1),
    host=st.floats(0, 1.2),
    buffers=st.integers(0, 1000),
)
def test_host_layers_and_disk_slots_stay_within_the_host_budget(layers, need, share, host, buffers):
    budget = least_budget(layers, need) + int(share * sum(layers))
    beside = MemoryBudget(budget, int(host * sum(layers)), has_card=True, buffers=buffers)
    try:
        plan = place_layers(layers, need, beside)
    except CapacityError as error:
        least = int(re.search(r"\((\d+) bytes\)", error.need).group(1))
        assert "--host-memory" in error.change and least > beside.host
        plan = place_layers(layers, need, replace(beside, host=least))
        with pytest.raises(CapacityError):
            place_layers(layers, need, replace(beside, host=least - 1))
    for now in (plan, with_host_slots(plan)) if "host" in plan.tiers else (plan,):
        assert now.host_nbytes + buffers <= now.budget.host or set(now.tiers) == {"device"}
        assert (
            0 < now.n_host_slots <= min(now.n_slots, 2)
            if "disk" in now.tiers
            else now.n_host_slots <= now.n_slots
        )
        # What gives way to slots goes to the disk.
        assert [("disk", "host").count(tier) for tier in now.tiers] == [
            ("disk", "host").count(tier) for tier in plan.tiers
        ]


@given(layers=LAYERS, need=NEED, share=st.floats(0, 1), host=st.integers(10**4, 10**10))
def test_layers_of_unified_memory_are_on_the_device_or_on_disk(layers, need, share, host):
    budget = least_budget(layers, need) + int(share * sum(layers))
    host += 2 * max(layers)
    unified = MemoryBudget(budget, host, has_card=True, is_unified=True)
    plan = place_layers(layers, need, unified)
    assert "host" not in plan.tiers
    assert plan.n_host_slots == (min(plan.n_slots, 2) if "disk" in plan.tiers else 0)
    beside = place_layers(layers, need, replace(unified, is_unified=False))
    assert plan.tiers.count("device") == beside.tiers.count("device")


@given(layers=LAYERS, need=NEED)
def test_budget_named_by_the_error_is_the_smallest(layers, need):
    with pytest.raises(CapacityError) as caught:
        place_layers(layers, need, MemoryBudget(0 if need.total + max(layers) else -1))
    named = int(re.search(r"\((\d+) bytes\)", caught.value.need).group(1))
    assert str(named) in caught.value.change
    place_layers(layers, need, MemoryBudget(named))
    for most, advice in ((named, f"set --device-memory to {named} "), (named - 1, "use a larger")):
        with pytest.raises(CapacityError) as caught:
            place_layers(layers, need, MemoryBudget(named - 1, most=most))
        assert caught.value.change.startswith(advice)


@given(layers=LAYERS, need=NEED, more=st.integers(0, 1000), host=st.integers(0, 10**6))
def test_all_layers_are_resident_if_they_fit(layers, need, more, host):
    plan = place_layers(layers, need, MemoryBudget(sum(layers) + need.total + more, host))
    assert plan.tiers == ("device",) * len(layers)
    assert plan.n_slots == 0
    assert plan.pass_bytes.streamed == (("host", 0), ("disk", 0))


@given(n=st.integers(3, 90), nbytes=st.integers(1, 10**6), need=NEED, fits=st.integers(2, 88))
def test_spare_memory_holds_layers(n, nbytes, need, fits):
    """Of equal layers `fits` fit: two or three are slots, and the others are resident."""
    assume(fits < n)
    plan = place_layers([nbytes] * n, need, MemoryBudget(need.total + fits * nbytes + nbytes // 2))
    assert plan.n_slots == min(3, fits)
    assert plan.tiers.count("device") == fits - plan.n_slots


@given(layers=LAYERS, need=NEED, share=st.floats(0, 1), host=st.floats(0, 1.2))
def test_pass_moves_streamed_layers_and_computes_all(layers, need, share, host):
    budget = least_budget(layers, need) + int(share * sum(layers))
    card = host > 0
    plan = place_layers(
        layers,
        need,
        MemoryBudget(budget, card * max(layers) + int(host * sum(layers)), has_card=card),
    )
    disk = plan.on("disk")
    streamed = sum(layers) - plan.on("device")
    assert plan.streamed_nbytes == streamed
    assert dict(plan.pass_bytes.streamed) == {"host": streamed if host else 0, "disk": disk}
    assert plan.pass_bytes.computed == sum(layers) + need.non_layer


@given(n=st.integers(1, 100), k=st.integers(0, 100))
def test_spread_is_as_even_as_possible(n, k):
    assume(k <= n)
    picked = sorted(spread(n, k))
    assert len(picked) == k
    assert all(0 <= i < n for i in picked)
    # Passes follow each other, so the gap goes on over the end.
    gaps = [b - a for a, b in itertools.pairwise([*picked, *(i + n for i in picked[:1])])]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert not picked or abs(picked[0] - (n - 1 - picked[-1])) <= 1, (
        "each stands in the middle of its part"
    )


@given(n=st.integers(3, 90), fits=st.integers(2, 88), hosted=st.integers(0, 90))
def test_resident_and_host_layers_are_spread_evenly(n, fits, hosted):
    assume(fits < n)
    plan = place_layers([100] * n, ReservedMemory(0, 0, 0), MemoryBudget(fits * 100, hosted * 100))
    for tiers, tier in (
        (plan.tiers, "device"),
        (tuple(layer_tier for layer_tier in plan.tiers if layer_tier != "device"), "host"),
    ):
        picked = [i for i, layer_tier in enumerate(tiers) if layer_tier == tier]
        gaps = [
            b - a for a, b in itertools.pairwise([*picked, *(i + len(tiers) for i in picked[:1])])
        ]
        assert not gaps or max(gaps) - min(gaps) <= 1
