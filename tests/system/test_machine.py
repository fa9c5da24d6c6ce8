"""Memory limits of this process: machine, control groups and resource limits."""

import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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


def test_machine_memory_is_the_limit_without_control_groups(cgroups):
    assert memory_limit() == TOTAL
    assert memory_free() == AVAILABLE


def test_v2_group_limits_memory_and_its_page_cache_is_free(cgroups):
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
def test_tightest_enclosing_group_is_the_limit(tight, cgroups):
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


def test_v1_group_limits_memory(cgroups):
    cgroups.belong_to("11:cpu,cpuacct:/a", "9:memory:/docker/x", "1:name=systemd:/a")
    cgroups.write(
        cgroups.v1 / "docker" / "x",
        memory__limit_in_bytes=6 * GIB, memory__usage_in_bytes=4 * GIB, memory__stat=_stat(GIB, 0),
    )  # fmt: skip
    assert memory_limit() == 6 * GIB
    assert memory_free() == min(6 * GIB - RSS, 6 * GIB - 4 * GIB + GIB)


def test_group_inside_a_container_limits_at_the_root(cgroups):
    """The path in /proc names host folders, which the container cannot see."""
    cgroups.belong_to("0::/host/only/path")
    cgroups.write(cgroups.v2, memory__max=5 * GIB, memory__current=GIB, memory__stat=_stat(0, 0))
    assert memory_limit() == 5 * GIB


@pytest.mark.parametrize("text", ["max", "", "garbage"])
def test_unlimited_v2_group_is_ignored(text, cgroups):
    cgroups.belong_to("0::/box")
    cgroups.write(
        cgroups.v2 / "box", memory__max=text, memory__current=GIB, memory__stat=_stat(0, 0)
    )
    assert memory_limit() == TOTAL
    assert memory_free() == AVAILABLE


def test_huge_limit_of_a_v1_group_means_unlimited(cgroups):
    cgroups.belong_to("9:memory:/")
    cgroups.write(
        cgroups.v1, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB
    )
    assert memory_limit() == TOTAL
    assert memory_free() == AVAILABLE


@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_resource_limit_of_the_process_is_the_limit(kind, cgroups):
    cgroups.limits[kind] = (7 * GIB, resource.RLIM_INFINITY)
    assert memory_limit() == 7 * GIB
    assert memory_free() <= 7 * GIB - RSS


def test_free_memory_is_not_negative(cgroups):
    cgroups.belong_to("0::/box")
    cgroups.write(
        cgroups.v2 / "box", memory__max=GIB, memory__current=2 * GIB, memory__stat=_stat(0, 0)
    )
    assert memory_free() == 0


def test_free_memory_is_at_most_the_limit():
    assert 0 <= memory_free() <= memory_limit()
