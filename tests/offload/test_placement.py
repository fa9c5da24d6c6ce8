"""Which layer lives where: never over the budget, never refused without need, spread evenly."""

import itertools
import re
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from offload_rt.errors import CapacityError
from offload_rt.offload.placement import (
    LinkSizes,
    MemoryBudget,
    Plan,
    ReservedMemory,
    least_budget,
    place_layers,
    with_host_slots,
)


def check(plan: Plan, layers: list[int], need: ReservedMemory, budget: MemoryBudget) -> None:
    """Assert that a plan is within its budget and predicts the bytes of a pass."""
    assert plan.layer_nbytes == tuple(layers) and len(plan.tiers) == len(layers)
    of = dict.fromkeys(("device", "host", "disk"), 0)
    for tier, n, encoded in zip(plan.tiers, layers, plan.link.layer_nbytes, strict=True):
        of[tier] += n if tier == "device" else encoded
    reserved = need.non_layer + need.cache + need.scratch
    moving = plan.n_slots * max(layers) + (plan.link.buffer if plan.n_slots else 0)
    used = reserved + of["device"] + moving
    assert used == plan.device_nbytes <= budget.device and of["host"] <= budget.host
    assert plan.streamed_nbytes == of["host"] + of["disk"]
    on_link = plan.streamed_nbytes if budget.has_card else of["host"]
    assert dict(plan.pass_bytes.streamed) == {"host": on_link, "disk": of["disk"]}
    assert plan.pass_bytes.computed == sum(layers) + need.non_layer


LAYERS = st.one_of(
    st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    st.builds(lambda n, nbytes: [nbytes] * n, st.integers(1, 90), st.integers(1, 10**9)),
)
NEED = st.builds(ReservedMemory, *[st.integers(0, 5000)] * 3)


@given(layers=LAYERS, need=NEED, share=st.floats(0, 1.5), host=st.integers(0, 10**10))
def test_plan_stays_within_its_budgets(layers, need, share, host):
    """All layers are resident if they fit; with unified memory none is on the host."""
    device = max(least_budget(layers, need), int((sum(layers) + need.total) * share))
    budget = MemoryBudget(device, host)
    plan = place_layers(layers, need, budget)
    check(plan, layers, need, budget)
    if sum(layers) + need.total <= device:
        assert (set(plan.tiers), plan.n_slots) == ({"device"}, 0)
    budget = replace(budget, has_card=True, is_unified=True, host=host + 2 * max(layers))
    unified = place_layers(layers, need, budget)
    check(unified, layers, need, budget)
    assert "host" not in unified.tiers
    assert unified.n_host_slots == (min(unified.n_slots, 2) if "disk" in unified.tiers else 0)
    assert unified.tiers.count("device") == plan.tiers.count("device")


SHARE, HOST, BUFFERS = st.floats(0, 1), st.floats(0, 1.2), st.integers(0, 1000)


@given(layers=LAYERS, need=NEED, share=SHARE, host=HOST, buffers=BUFFERS, n_saved=st.integers(0, 9))
def test_host_layers_and_disk_slots_stay_within_the_host_budget(
    layers, need, share, host, buffers, n_saved
):
    """Also of encoded layers, which are smaller on the host, beside a buffer for decoding."""
    link = LinkSizes(tuple(max(n - n_saved, 1) for n in layers), max(layers), n_saved)
    budget = least_budget(layers, need, link) + int(share * sum(layers))
    beside = MemoryBudget(budget, int(host * sum(layers)), has_card=True, buffers=buffers)
    place = partial(place_layers, layers, need, link=link)
    try:
        plan = place(beside)
    except CapacityError as error:
        least = int(re.search(r"\((\d+) bytes\)", error.need).group(1))
        assert "--host-memory" in error.change and least > beside.host
        beside = replace(beside, host=least)
        plan = place(beside)
        with pytest.raises(CapacityError):
            place(replace(beside, host=least - 1))
    check(plan, layers, need, beside)
    for now in (plan, with_host_slots(plan)) if "host" in plan.tiers else (plan,):
        assert now.host_nbytes + buffers <= now.budget.host or set(now.tiers) == {"device"}
        has_disk = "disk" in now.tiers
        assert has_disk <= now.n_host_slots <= (min(now.n_slots, 2) if has_disk else now.n_slots)
        # What gives way to slots goes to the disk.
        assert [tier == "device" for tier in now.tiers] == [tier == "device" for tier in plan.tiers]


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


@given(
    n=st.integers(3, 90), need=NEED, fits=st.integers(2, 88), hosted=st.integers(0, 90),
    encoded=st.sampled_from([100, 70]),
)  # fmt: skip
def test_spare_memory_holds_layers_spread_evenly(n, need, fits, hosted, encoded):
    """Of equal layers `fits` fit, two or three as slots; encoded layers need a buffer."""
    assume(fits < n)
    buffer = 100 - encoded
    budget = MemoryBudget(need.total + fits * 100 + 50 + buffer, hosted * encoded)
    link = LinkSizes((encoded,) * n, 100, buffer)
    plan = place_layers([100] * n, need, budget, link)
    assert plan.device_nbytes == need.total + fits * 100 + buffer
    assert plan.streamed_nbytes == encoded * (n - plan.tiers.count("device"))
    assert plan.n_slots == min(3, fits)
    assert plan.tiers.count("device") == fits - plan.n_slots
    streamed = tuple(tier for tier in plan.tiers if tier != "device")
    assert streamed.count("host") == min(hosted, len(streamed))
    for tiers, tier in ((plan.tiers, "device"), (streamed, "host")):
        if picked := [i for i, name in enumerate(tiers) if name == tier]:
            # Passes follow each other, so the last gap goes on over the end.
            gaps = [b - a for a, b in itertools.pairwise([*picked, picked[0] + len(tiers)])]
            assert max(gaps) - min(gaps) <= 1
            assert abs(picked[0] - (len(tiers) - 1 - picked[-1])) <= 1


def test_small_layers_fill_the_room_beside_a_large_one():
    layers = [1000] + [100] * 30
    plan = place_layers(layers, ReservedMemory(0, 0, 0), MemoryBudget(3500, 350))
    assert plan.n_slots == 3 and plan.tiers.count("device") == 5
    assert plan.tiers.count("host") == 3 and plan.tiers[0] == "disk"
