"""Memory limits of this process: machine, control groups and resource limits."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload_rt.system import machine
from offload_rt.system.machine import memory_free, memory_limit

GIB = 2**30
TOTAL = 64 * GIB
AVAILABLE = 40 * GIB
RSS = 2 * GIB
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class Cgroups:
    """A fake machine of 64 GiB whose control groups are folders of the test."""

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
        places = {Path("/proc/self/cgroup"): self._list}
        monkeypatch.setattr(machine, "_lines", lambda path: lines(places.get(path, path)))
        memory = SimpleNamespace(total=TOTAL, available=AVAILABLE)
        process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=RSS, vms=3 * RSS))
        psutil = SimpleNamespace(virtual_memory=lambda: memory, Process=lambda: process)
        monkeypatch.setattr(machine, "psutil", psutil)
        monkeypatch.setattr(resource, "getrlimit", lambda kind: self.limits[kind])

    def belong_to(self, text: str) -> None:
        self._list.write_text(text + "\n" * bool(text))

    def write(self, folder: Path, **files: str | int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cgroups:
    return Cgroups(tmp_path, monkeypatch)


def _v2(limit: int | str, current: int, inactive: int = 0, active: int = 0) -> dict[str, Any]:
    stat = f"anon 5\ninactive_file {inactive}\nactive_file {active}\nunevictable 0"
    return {"memory__max": limit, "memory__current": current, "memory__stat": stat}


def _v1(limit: int, usage: int, inactive: int = 0) -> dict[str, Any]:
    files = {"limit_in_bytes": limit, "usage_in_bytes": usage, "stat": f"inactive_file {inactive}"}
    return {f"memory__{name}": content for name, content in files.items()}


def _nested(tight: str) -> dict[str, Any]:
    folders = {"root": "", "outer": "/outer", "inner": "/outer/inner"}
    return {at: _v2((4 if name == tight else 9) * GIB, 3 * GIB) for name, at in folders.items()}


@pytest.mark.parametrize(("group", "files", "limit", "free"), [
    ("", {}, TOTAL, AVAILABLE),
    # the page cache is free
    ("0::/box", {"/box": _v2(8 * GIB, 5 * GIB, GIB, 2 * GIB)}, 8 * GIB, 6 * GIB),
    *(("0::/outer/inner", _nested(box), 4 * GIB, GIB) for box in ("outer", "inner", "root")),
    ("11:cpu,cpuacct:/a\n9:memory:/docker/x\n1:name=systemd:/a",
     {"v1/docker/x": _v1(6 * GIB, 4 * GIB, GIB)}, 6 * GIB, 3 * GIB),
    # the path in /proc names host folders, which the container cannot see
    ("0::/host/only/path", {"": _v2(5 * GIB, GIB)}, 5 * GIB, 3 * GIB),
    *(("0::/box", {"/box": _v2(limit, GIB)}, TOTAL, AVAILABLE) for limit in ("max", "", "x")),
    ("9:memory:/", {"v1": _v1(9223372036854771712, GIB)}, TOTAL, AVAILABLE),
    ("0::/box", {"/box": _v2(GIB, 2 * GIB)}, GIB, 0),
])  # fmt: skip
def test_tightest_enclosing_group_limits_memory(cgroups, group, files, limit, free):
    cgroups.belong_to(group)
    for at, content in files.items():
        root = cgroups.v1 if at.startswith("v1") else cgroups.v2
        cgroups.write(root / at.removeprefix("v1").strip("/"), **content)
    assert (memory_limit(), memory_free()) == (limit, free)


def test_resource_limit_of_the_process_is_the_limit(cgroups):
    for kind in cgroups.limits:
        cgroups.limits |= dict.fromkeys(cgroups.limits, UNLIMITED)
        cgroups.limits[kind] = (7 * GIB, resource.RLIM_INFINITY)
        assert memory_limit() == 7 * GIB
        assert memory_free() <= 7 * GIB - RSS


def test_free_memory_is_at_most_the_limit():
    assert 0 <= memory_free() <= memory_limit()
