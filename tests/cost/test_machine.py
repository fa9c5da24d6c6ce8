"""What this process may use: the machine's memory, its container's, its own limits; and the cost of
a pass.
"""

import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fake_gpu import fake_gpu

from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import (
    ComputeTimes,
    MachineProfile,
    PassBytes,
    TouchedExperts,
    pass_time,
    pass_times,
)
from offload_rt.engine import profile
from offload_rt.system import machine
from offload_rt.system.machine import memory_free, memory_limit

GIB = 2**30
TOTAL = 64 * GIB
AVAILABLE = 40 * GIB
RSS = 2 * GIB
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class Cgroups:
    """A pretended machine of 64 GiB whose control groups are folders of a test."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.v2 = root / "unified"
        self.v1 = root / "memory"
        self._list = root / "cgroup"
        self._list.write_text("")
        self.limits = {resource.RLIMIT_AS: UNLIMITED, resource.RLIMIT_DATA: UNLIMITED}
        lines = machine._lines
        roots = {"": self.v2, "memory": self.v1}
        groups = {key: (roots[key], *names) for key, (_, *names) in machine._CGROUPS.items()}
        monkeypatch.setattr(machine, "_CGROUPS", groups)
        monkeypatch.setattr(
            machine,
            "_lines",
            lambda path: lines(self._list if path == Path("/proc/self/cgroup") else path),
        )
        memory = SimpleNamespace(total=TOTAL, available=AVAILABLE)
        process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=RSS, vms=3 * RSS))
        psutil = SimpleNamespace(virtual_memory=lambda: memory, Process=lambda: process)
        monkeypatch.setattr(machine, "psutil", psutil)
        monkeypatch.setattr(resource, "getrlimit", lambda kind: self.limits[kind])

    def belong_to(self, *lines: str) -> None:
        self._list.write_text("\n".join(lines) + "\n")

    def write(self, folder: Path, **files: str | int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cgroups]:
    yield Cgroups(tmp_path, monkeypatch)


def test_memory_without_a_control_group(cgroups: Cgroups) -> None:
    assert memory_limit() == TOTAL
    assert memory_free() == AVAILABLE


def test_memory_v2_group_limit_excludes_page_cache(cgroups: Cgroups) -> None:
    cgroups.belong_to("0::/box")
    cgroups.write(
        cgroups.v2 / "box",
        memory__max=8 * GIB,
        memory__current=5 * GIB,
        memory__stat=_stat(GIB, 2 * GIB),
    )
    assert memory_limit() == 8 * GIB
    assert memory_free() == min(8 * GIB - RSS, 8 * GIB - 5 * GIB + 3 * GIB)


def _stat(inactive: int, active: int) -> str:
    return f"anon 5\ninactive_file {inactive}\nactive_file {active}\nunevictable 0"


@pytest.mark.parametrize("tight", ["outer", "inner", "root"])
def test_memory_uses_the_tightest_parent_group(tight: str, cgroups: Cgroups) -> None:
    cgroups.belong_to("0::/outer/inner")
    folders = {
        "root": cgroups.v2,
        "outer": cgroups.v2 / "outer",
        "inner": cgroups.v2 / "outer" / "inner",
    }
    for name, folder in folders.items():
        limit = 4 * GIB if name == tight else 9 * GIB
        cgroups.write(folder, memory__max=limit, memory__current=3 * GIB, memory__stat=_stat(0, 0))
    assert memory_limit() == 4 * GIB
    assert memory_free() == GIB


def test_memory_v1_group_limit(cgroups: Cgroups) -> None:
    cgroups.belong_to("11:cpu,cpuacct:/a", "9:memory:/docker/x", "1:name=systemd:/a")
    cgroups.write(
        cgroups.v1 / "docker" / "x",
        memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=4 * GIB, memory__stat=_stat(GIB, 0),
    )  # fmt: skip
    assert memory_limit() == 6 * GIB
    assert memory_free() == min(6 * GIB - RSS, 6 * GIB - 4 * GIB + GIB)


def test_memory_group_at_the_root_of_a_container(cgroups: Cgroups) -> None:
    """Inside a container the path in /proc names folders of the host that are not there."""
    cgroups.belong_to("0::/host/only/path")
    cgroups.write(cgroups.v2, memory__max=5 * GIB, memory__current=GIB, memory__stat=_stat(0, 0))
    assert memory_limit() == 5 * GIB


@pytest.mark.parametrize("text", ["max", "", "garbage"])
def test_memory_group_without_limit(text: str, cgroups: Cgroups) -> None:
    cgroups.belong_to("0::/box")
    cgroups.write(
        cgroups.v2 / "box", memory__max=text, memory__current=GIB, memory__stat=_stat(0, 0)
    )
    assert memory_limit() == TOTAL
    assert memory_free() == AVAILABLE


def test_memory_v1_group_without_limit_is_a_huge_number(cgroups: Cgroups) -> None:
    cgroups.belong_to("9:memory:/")
    cgroups.write(
        cgroups.v1, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB
    )
    assert memory_limit() == TOTAL
    assert memory_free() == AVAILABLE


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_memory_respects_the_process_limit(kind: int, cgroups: Cgroups) -> None:
    cgroups.limits[kind] = (7 * GIB, resource.RLIM_INFINITY)
    assert memory_limit() == 7 * GIB
    assert memory_free() <= 7 * GIB - RSS


def test_free_memory_is_never_negative(cgroups: Cgroups) -> None:
    cgroups.belong_to("0::/box")
    cgroups.write(
        cgroups.v2 / "box", memory__max=GIB, memory__current=2 * GIB, memory__stat=_stat(0, 0)
    )
    assert memory_free() == 0


def test_memory_of_this_machine_is_positive() -> None:
    assert 0 <= memory_free() <= memory_limit()


# The cost of a pass


def _profile(disk: float, host: float, memory: float, fixed: float = 0.0) -> MachineProfile:
    return MachineProfile("simulated", False, (("disk", disk), ("host", host)), memory, fixed)


@given(
    rates=st.tuples(*[st.floats(0.1, 100)] * 3),
    moved=st.tuples(*[st.integers(0, 10**12)] * 3),
    fixed=st.floats(0, 1),
)
def test_pass_time_is_the_slowest_part(
    rates: tuple[float, float, float], moved: tuple[int, int, int], fixed: float
) -> None:
    disk, host, computed = moved
    seconds = pass_time(
        _profile(*rates, fixed), PassBytes((("disk", disk), ("host", host)), computed)
    )
    parts = [nbytes / (rate * 1e9) for nbytes, rate in zip(moved, rates, strict=True)]
    # A little more where link and compute are about equal, and nothing more where one is half the
    # other.
    assert seconds == pytest.approx(max(parts) + fixed, rel=0.1)
    assert seconds >= (max(parts) + fixed) * (1 - 1e-9)
    if min(max(parts[:2]), parts[2]) < max(parts) / 2:
        assert seconds == pytest.approx(max(parts) + fixed, rel=1e-3)


def test_pass_time_of_equal_link_and_compute_overlaps_partially() -> None:
    seconds = pass_time(_profile(1.0, 1.0, 1.0), PassBytes((("disk", 10**9),), 10**9))
    assert seconds == pytest.approx(2 ** (1 / 8))


def test_tier_without_bytes_needs_no_rate() -> None:
    profile = MachineProfile("simulated", False, (("disk", 2.0),), 10.0)
    assert pass_time(
        profile, PassBytes((("host", 0), ("disk", 4 * 10**9)), 10**9)
    ) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("ahead", "between", "seconds"),
    [
        (0, 0.0, 4.0),  # the link's pass
        (10**9, 0.5, 4.0),  # the link goes on while the draft works
        (10**9, 1.5, 4.5),  # until the slots are full
        (10**9, 9.0, 12.0),  # the draft alone takes longer than the link
        (10**10, 9.0, 9.5),  # and with slots for all of it, only the device counts
    ],
)
def test_drafting_overlaps_with_filled_slots(ahead: int, between: float, seconds: float) -> None:
    moved = PassBytes((("disk", 4 * 10**9),), 10**9, ahead)
    assert pass_time(_profile(1.0, 1.0, 2.0), moved, between_s=between) == pytest.approx(
        seconds, rel=1e-3
    )


def test_every_depth_is_combined_with_every_width() -> None:
    compute = ComputeTimes((1, 101), (0, 1), ((1.0, 2.0),) * 2)
    profile = MachineProfile("simulated", False, (), 1.0, 0.0, compute)
    moved = PassBytes((), 10**9)
    seconds = pass_times(profile, moved, np.array([[1], [51]]), 0, np.array([0.0, 0.25, 0.5]))
    assert seconds == pytest.approx(np.array([[1.0, 1.25, 1.5], [1.5, 1.75, 2.0]]))


# Rates.


def test_memory_rate_exceeds_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = profile.linear
    read = []
    monkeypatch.setattr(
        profile, "linear", lambda x, matrix: read.append(matrix.nbytes) or linear(x, matrix)
    )
    monkeypatch.setattr(profile, "cache_nbytes", lambda: 100 << 20)
    assert profile.memory_gbps(torch.bfloat16, torch.device("cpu")) > 0 and set(read) == {400 << 20}
    monkeypatch.setattr(profile, "memory_free", lambda: 64 << 20)
    profile.memory_gbps(torch.bfloat16, torch.device("cpu"))
    assert read[-1] == 16 << 20, "never more than a part of what is free"


class Clock:
    """An event of a card on which each piece of work takes 10 ms."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Clock") -> float:
        return 10.0


def test_device_rates_use_the_device_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch, nbytes=256 << 20):
        monkeypatch.setattr(torch.cuda, "Event", Clock)
        card = torch.device("cuda", 0)
        assert profile.memory_gbps(torch.float16, card) == pytest.approx((64 << 20) / 0.01 / 1e9)
        assert profile.upload_gbps(card, 32 << 20) == pytest.approx((32 << 20) / 0.01 / 1e9)


def test_draft_level_time_is_its_read_time_until_measured() -> None:
    cost = CostEstimator(_profile(1.0, 1.0, memory=500.0), PassBytes((), 10**9), 13 * 10**9)
    assert cost.level_s == pytest.approx(0.026)
    cost.drafted(4, 4 * 0.05)
    assert 0.026 < cost.level_s < 0.05


def test_expert_bytes_grow_with_rows():
    profile = MachineProfile("imagined", False, (("disk", 2.0), ("host", 1.0)), 100.0)
    experts = TouchedExperts("disk", 10, 4, 1, 10**8, n_resident=2)
    moved = PassBytes((("disk", 10**9), ("host", 0)), 10**6, experts=experts)
    for n_rows, share in ((1, 1 / 4), (2, 7 / 16), (500, 1.0)):
        assert pass_time(profile, moved, n_rows) == pytest.approx(0.5 + share, rel=1e-3)
        assert moved.at(0, n_rows) == {"disk": pytest.approx(10**9 + share * 2 * 10**9, rel=1e-6)}
    alone = replace(moved, streamed=())
    assert pass_times(profile, alone, np.array([1, 2]), 0) == pytest.approx(
        [1 / 4, 7 / 16], rel=1e-3
    )


def test_extrapolated_pass_is_not_faster_than_the_fastest_measured_pass() -> None:
    """Times measured on a busy machine may fall with the width; a line through them reaches
    zero.
    """
    falling = ComputeTimes((1, 8), (64, 128), ((2.0, 1.0), (2.5, 1.5)))
    assert falling.at(np.array([4, 100, 10_000]), 64).tolist() == [
        pytest.approx(2 - 3 / 7),
        1.0,
        1.0,
    ]
    assert (falling.at(np.array([100, 10_000]), 1000) > 0).all()
