"""Pass times against hand-computed limits and an event loop over links, slots and layers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_rt.cost.pass_times import (
    ComputeTimes,
    MachineProfile,
    PassBytes,
    TouchedExperts,
    lossless_gain,
    pass_time,
    pass_times,
)
from offload_rt.offload.placement import MemoryBudget, Plan, ReservedMemory, place_layers

GB = 10**9
LINKS = (("disk", 2.0), ("host", 20.0))


def event_loop_s(plan: Plan, compute_s: float, draft_s: float, more: float = 0.0) -> float:
    """Mean seconds of a pass by events, after the slots have settled.

    A link carries layers in order and enters the next pass early. A layer starts once a slot of the
    next stage is free; compute of a layer frees its slot. Disk layers cross both links of a GPU.

    more  bytes that cross the last link with each streamed layer
    """
    has_card = plan.budget.has_card
    paths = {"device": (), "host": ("host",), "disk": ("disk", "host") if has_card else ("disk",)}
    names = [name for name, _ in LINKS if any(name in paths[tier] for tier in plan.tiers)]
    # Per stage: when each layer left the stage, in order. The device is the last stage.
    ends = {name: [] for name in (*names, "device")}
    marks = [0.0]
    now = 0.0
    computed = []
    crossed = {}  # by layer, when it left the last link
    carried = {name: [] for name in names}
    for _ in range(14):
        now += draft_s
        for tier in plan.tiers:
            arrived = 0.0
            path = paths[tier]
            at = len(computed)
            for name in path:
                j = len(carried[name])
                start = max(arrived, ends[name][-1] if j else 0.0)
                if j >= plan.n_slots:
                    before = carried[name][j - plan.n_slots]
                    freed = computed[before] if name == names[-1] else crossed[before]
                    start = max(start, freed)
                nbytes = GB + (more if name == names[-1] else 0.0)
                arrived = start + nbytes / (dict(LINKS)[name] * 1e9)
                ends[name].append(arrived)
                if name == names[-1]:
                    crossed[at] = arrived
                carried[name].append(at)
            now = max(now, arrived) + compute_s / len(plan.tiers)
            computed.append(now)
        marks.append(now)
    return float(np.diff(marks)[2:].mean())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(24, 80), st.floats(0, 0.7), st.none() | st.floats(0, 1),
    st.floats(0.05, 20), st.floats(0, 4), st.integers(0, 3 * GB),
)  # fmt: skip
def test_pass_time_equals_an_event_loop(n, device, host, compute_s, draft_s, exchanged):
    """Within 3 % and a few layers of 1 GB, or 10 % where link and device are about equal."""
    on_device = min(2 + device * (n - 2), n - 1)
    on_host = 0 if host is None else 3 + host * n
    budget = MemoryBudget(int(on_device * GB), int(on_host * GB), has_card=host is not None)
    plan = place_layers([GB] * n, ReservedMemory(0, 0, 0), budget)
    n_rows = 64
    exchanged = exchanged if plan.budget.has_card else 0
    n_streamed = plan.tiers.count("host") + plan.tiers.count("disk")
    moved = replace(plan.pass_bytes, exchanged=exchanged)
    times = ComputeTimes((1,), (0,), ((compute_s,),))
    predicted = pass_time(MachineProfile(LINKS, 1.0, 0.0, times), moved, n_rows, draft_s)
    more = n_rows * exchanged / n_streamed
    actual = event_loop_s(plan, compute_s, draft_s, more)
    # The closed form ignores uneven turns of slow and fast layers, the first layer after a long
    # draft, and the last layers of a pass.
    uneven = 2 * GB / 2e9 if 0 < plan.tiers.count("host") < n_streamed else 0.0
    layers = 3 * compute_s / len(plan.tiers) + (GB + more) / 20e9
    # It counts the slots behind a single link; disk slots also fill while drafting.
    of_disk = plan.n_slots * GB / 2e9 if plan.budget.has_card and plan.on("disk") else 0.0
    assert predicted / 1.10 - of_disk - 1e-9 <= actual <= 1.03 * predicted + uneven + layers


@pytest.mark.parametrize(("ahead", "between", "seconds"), [
    (0, 0.0, 4.0),  # the link is the limit
    (GB, 0.5, 4.0),  # the link continues during drafting
    (GB, 1.5, 4.5),  # until the slots are full
    (GB, 9.0, 12.0),  # drafting alone takes longer than the link
    (10 * GB, 9.0, 9.5),  # with slots for a whole pass, only the device counts
])  # fmt: skip
def test_slots_hide_drafting_behind_the_link(ahead, between, seconds):
    moved = PassBytes((("disk", 4 * GB),), GB, ahead)
    links = (("disk", 1.0), ("host", 1.0))
    drafting = pass_time(MachineProfile(links, 2.0), moved, between_s=between)
    assert drafting == pytest.approx(seconds, rel=1e-3)
    assert pass_time(MachineProfile(links, 2.0, fixed_s=between), moved) == drafting


def test_touched_experts_grow_with_the_rows_of_a_pass():
    profile = MachineProfile((("disk", 2.0),), 100.0)  # an unused tier needs no rate
    experts = TouchedExperts("disk", 10, 4, 1, 10**8, n_resident=2)
    moved = PassBytes((("disk", GB), ("host", 0)), 10**6, experts=experts)
    for n_rows, share in ((1, 1 / 4), (2, 7 / 16), (500, 1.0)):
        assert pass_time(profile, moved, n_rows) == pytest.approx(0.5 + share, rel=1e-3)
        assert moved.at(0, n_rows) == {"disk": pytest.approx(GB + share * 2 * GB, rel=1e-6)}
    alone = replace(moved, streamed=())
    seconds = pass_times(profile, alone, np.array([1, 2]), 0)
    assert seconds == pytest.approx([1 / 4, 7 / 16], rel=1e-3)


def test_extrapolated_compute_time_stays_above_the_fastest_measured_pass():
    """Times of a busy machine may fall with the row count; extrapolation would reach zero."""
    falling = ComputeTimes((1, 8), (64, 128), ((2.0, 1.0), (2.5, 1.5)))
    assert falling.at(np.array([4, 100, 10_000]), 64) == pytest.approx([2 - 3 / 7, 1.0, 1.0])
    assert (falling.at(np.array([100, 10_000]), 1000) > 0).all()


def test_host_computes_only_experts_of_host_memory():
    """Of 60 missing experts a layer, a fast host computes at most those in host memory."""
    host = ComputeTimes((1,), (0,), ((1e-9,),))
    rows = np.array([1, 8, 64])
    experts = TouchedExperts("host", 5, 64, 8, 10**6, n_resident=4, host=host)
    all_copied = experts.pass_nbytes(rows)
    for n_on_host, share in ((0.0, 1.0), (15.0, 0.75), (60.0, 0.0)):
        copied = replace(experts, n_on_host=n_on_host).pass_nbytes(rows, 1.0)
        np.testing.assert_allclose(copied, share * all_copied, rtol=1e-5, atol=1e3)


@pytest.mark.parametrize(("streamed_gb", "memory", "gain"), [
    (100, 1e6, 1 / 0.7),  # the link alone
    (0, 1e3, 1.0),
    (1, 100, 1.0),  # reading resident layers takes most of the time
])  # fmt: skip
def test_lossless_gain_follows_the_slower_of_link_and_device(streamed_gb, memory, gain):
    moved = PassBytes((("host", streamed_gb * GB),), 100 * GB)
    assert lossless_gain(moved, 25.0, memory, 0.7) == pytest.approx(gain, rel=0.02)
