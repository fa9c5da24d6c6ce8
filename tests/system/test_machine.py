"""Memory limits of this process, memory and threads near a simulated card, and progress bars."""

import io
import itertools
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from support.layers import on_disk, some_layers

from offload_rt.engine import profile
from offload_rt.offload import memory, stream_threads
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources
from offload_rt.offload.tier import read_parallel
from offload_rt.system import machine, numa, progress
from offload_rt.system.machine import memory_free, memory_limit
from offload_rt.system.numa import Cpus, cpus_near
from offload_rt.system.progress import loading_bar
from offload_rt.system.trace import DISK, Trace

GIB = 2**30
TOTAL, AVAILABLE, RSS = 64 * GIB, 40 * GIB, 2 * GIB
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[int, int]]:
    """A machine of 64 GiB with control groups below `v1` and `v2`; yields its resource limits."""
    roots = {"": tmp_path / "v2", "memory": tmp_path / "v1"}
    groups = {key: (roots[key], *names) for key, (_, *names) in machine._CGROUPS.items()}
    monkeypatch.setattr(machine, "_CGROUPS", groups)
    lines = machine._lines
    places = {Path("/proc/self/cgroup"): tmp_path / "cgroup"}
    monkeypatch.setattr(machine, "_lines", lambda path: lines(places.get(path, path)))
    memory = SimpleNamespace(total=TOTAL, available=AVAILABLE)
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=RSS, vms=3 * RSS))
    psutil = SimpleNamespace(virtual_memory=lambda: memory, Process=lambda: process)
    monkeypatch.setattr(machine, "psutil", psutil)
    limits = {resource.RLIMIT_AS: UNLIMITED, resource.RLIMIT_DATA: UNLIMITED}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    return limits


def _v2(limit: int | str, current: int, inactive: int = 0, active: int = 0) -> dict[str, Any]:
    stat = f"anon 5\ninactive_file {inactive}\nactive_file {active}\nunevictable 0"
    return {"max": limit, "current": current, "stat": stat}


def _v1(limit: int, usage: int, inactive: int = 0) -> dict[str, Any]:
    stat = f"inactive_file {inactive}"
    return {"limit_in_bytes": limit, "usage_in_bytes": usage, "stat": stat}


NESTED = ("v2", "v2/outer", "v2/outer/inner")


@pytest.mark.parametrize(("group", "files", "limit", "free"), [
    ("", {}, TOTAL, AVAILABLE),
    # the page cache is free
    ("0::/box", {"v2/box": _v2(8 * GIB, 5 * GIB, GIB, 2 * GIB)}, 8 * GIB, 6 * GIB),
    *(("0::/outer/inner", {each: _v2((9, 4)[each == tight] * GIB, 3 * GIB) for each in NESTED},
       4 * GIB, GIB) for tight in NESTED),
    ("11:cpu,cpuacct:/a\n9:memory:/docker/x\n1:name=systemd:/a",
     {"v1/docker/x": _v1(6 * GIB, 4 * GIB, GIB)}, 6 * GIB, 3 * GIB),
    # the path in /proc names host folders, which the container cannot see
    ("0::/host/only/path", {"v2": _v2(5 * GIB, GIB)}, 5 * GIB, 3 * GIB),
    *(("0::/box", {"v2/box": _v2(limit, GIB)}, TOTAL, AVAILABLE) for limit in ("max", "", "x")),
    ("9:memory:/", {"v1": _v1(9223372036854771712, GIB)}, TOTAL, AVAILABLE),
    ("0::/box", {"v2/box": _v2(GIB, 2 * GIB)}, GIB, 0),
])  # fmt: skip
@pytest.mark.usefixtures("limits")
def test_tightest_enclosing_group_limits_memory(tmp_path, group, files, limit, free):
    (tmp_path / "cgroup").write_text(group and f"{group}\n")
    for folder, contents in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (tmp_path / folder / f"memory.{name}").write_text(f"{content}\n")
    assert (memory_limit(), memory_free()) == (limit, free)


def test_resource_limit_of_the_process_is_the_limit(limits):
    for kind in list(limits):
        limits |= dict.fromkeys(limits, UNLIMITED)
        limits[kind] = (7 * GIB, resource.RLIM_INFINITY)
        assert memory_limit() == 7 * GIB and memory_free() <= 7 * GIB - RSS


CARD = torch.device("cuda", 0)
ALL = {0, 1, 2, 3, 8, 9, 10, 11}


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Simulate two sockets and a GPU near CPUs 8 to 11; yields the CPUs set by each thread."""
    cpus_seen: list[object] = []
    card = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(numa, "_DEVICES", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ALL))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: cpus_seen.append(set(cpus)))
    (tmp_path / "0001:c1:00.0").mkdir()
    (tmp_path / "0001:c1:00.0/local_cpulist").write_text("8-11")
    return cpus_seen


@pytest.mark.parametrize(("local", "expected"), [
    ("0-3\n", {0, 1, 2, 3}),
    ("2,8-10,40-47\n", {2, 8, 9, 10}),  # only those that this process may use
    ("0-63\n", set()),  # one node, or a node that the system does not know
    ("64-127\n", set()),  # this process may use none of them
    ("\n", set()),
    (None, set()),  # no sysfs
])  # fmt: skip
@pytest.mark.usefixtures("seen")
def test_cpus_near_a_device(tmp_path, local, expected):
    path = tmp_path / "0001:c1:00.0/local_cpulist"
    path.unlink() if local is None else path.write_text(local)
    assert cpus_near(CARD) == expected
    assert cpus_near(torch.device("cpu")) == set()


@pytest.mark.parametrize("cpus", [Cpus({8, 9}), Cpus()])
def test_readers_and_slots_stay_near_the_device(seen, cpus, tmp_path, monkeypatch):
    near = [set(cpus)] if cpus else []
    tier = DiskTier(on_disk(tmp_path, some_layers(2)))
    read_parallel(tier.reads(0, torch.empty(1 << 20, dtype=torch.uint8)), 1, cpus=cpus)
    assert seen == near
    seen.clear()
    monkeypatch.setattr(stream_threads, "pin", lambda block: seen.append("pinned"))
    sources = LayerSources(MemoryTier(), (tier, tier), 1, cpus=cpus)
    streamer = ThreadStreamer(sources, Trace(on=False), lane=DISK)
    list(streamer.sweep())
    streamer.close()
    tier.close()
    back = [ALL] if cpus else []
    assert seen == near + ["pinned"] + back + near * tier.n_parallel


def test_link_rate_is_measured_from_memory_near_the_device(seen, monkeypatch):
    empty = torch.empty
    on_cpu = lambda *sizes, **how: empty(*sizes, **how | {"device": "cpu"})  # noqa: E731
    monkeypatch.setattr(torch, "empty", on_cpu)
    monkeypatch.setattr(profile, "timed", lambda device, work: [1.0])
    monkeypatch.setattr(memory, "pin", lambda block: seen.append("pinned"))
    assert profile.upload_gbps(CARD, 1 << 20) > 0
    assert seen == [{8, 9, 10, 11}, "pinned", ALL]


@pytest.mark.parametrize("width", [40, 60, 100])
def test_loading_bar_stays_on_a_line(width, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=clock.__next__))
    terminal = io.StringIO()
    console = Console(file=terminal, width=width, force_terminal=True, color_system=None)
    with loading_bar(console) as draw:
        for nbytes in (0, 61_700_000_000, 123_400_000_000, 138_000_000_000):
            draw(nbytes, 138_000_000_000)
        drawn = terminal.getvalue()
    assert "\n" not in drawn and "B/s" in drawn and "meas" in drawn
    assert all(len(line) <= width for line in drawn.split("\r\x1b[2K")[1:])
