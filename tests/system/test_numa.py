"""Memory and threads near a card, by a pretended sysfs."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.layers import on_disk, some_layers

from offload_rt.engine import profile
from offload_rt.offload import memory, stream_threads
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources
from offload_rt.offload.tier import read_parallel
from offload_rt.system import numa
from offload_rt.system.numa import Cpus, cpus_near
from offload_rt.system.trace import Trace

CARD = torch.device("cuda", 0)
ALL = {0, 1, 2, 3, 8, 9, 10, 11}


class TwoSockets:
    """A simulated machine with a GPU; records the CPUs of each thread."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._card = folder / "0001:c1:00.0"
        self.seen: list[object] = []
        card = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xC1, pci_device_id=0)
        monkeypatch.setattr(numa, "_DEVICES", folder)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ALL))
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: self.seen.append(set(cpus)))

    def local(self, text: str) -> None:
        self._card.mkdir(exist_ok=True)
        (self._card / "local_cpulist").write_text(text)


@pytest.fixture
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TwoSockets:
    return TwoSockets(tmp_path, monkeypatch)


@pytest.mark.parametrize(("local", "expected"), [
    ("0-3\n", {0, 1, 2, 3}),
    ("2,8-10,40-47\n", {2, 8, 9, 10}),  # only those that this process may use
    ("0-63\n", set()),  # one node, or a node that the system does not know
    ("64-127\n", set()),  # this process may use none of them
    ("\n", set()),
    (None, set()),  # no sysfs
])  # fmt: skip
def test_cpus_near_a_device(sockets, local, expected):
    if local is not None:
        sockets.local(local)
    assert cpus_near(CARD) == expected
    assert cpus_near(torch.device("cpu")) == set()


@pytest.mark.parametrize("cpus", [Cpus({8, 9}), Cpus()])
def test_readers_stay_near_the_device_and_slots_are_touched_there(
    sockets, cpus, tmp_path, monkeypatch
):
    near = [set(cpus)] if cpus else []
    tier = DiskTier(on_disk(tmp_path, some_layers(2)))
    read_parallel(tier.reads(0, torch.empty(1 << 20, dtype=torch.uint8)), 1, cpus=cpus)
    assert sockets.seen == near
    sockets.seen.clear()
    monkeypatch.setattr(stream_threads, "pin", lambda block: sockets.seen.append("pinned"))
    streamer = ThreadStreamer(
        LayerSources(MemoryTier(), (tier, tier), 1, cpus=cpus), Trace(on=False), pinned=True
    )
    list(streamer.sweep())
    streamer.close()
    tier.close()
    back = [ALL] if cpus else []
    assert sockets.seen == near + ["pinned"] + back + near * tier.n_parallel


def test_link_rate_is_measured_from_memory_near_the_device(sockets, monkeypatch):
    sockets.local("8-11")
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *sizes, **how: empty(*sizes, **how | {"device": "cpu"})
    )
    monkeypatch.setattr(profile, "timed", lambda device, work: [1.0])
    monkeypatch.setattr(memory, "pin", lambda block: sockets.seen.append("pinned"))
    assert profile.upload_gbps(CARD, 1 << 20) > 0
    assert sockets.seen == [{8, 9, 10, 11}, "pinned", ALL]
