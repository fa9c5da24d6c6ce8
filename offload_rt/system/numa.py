"""Which processors lie near a card: memory lies near the one that touches it first, as long as there is room."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_DEVICES = Path("/sys/bus/pci/devices")

Cpus = frozenset[int]


def cpus_near(device: torch.device) -> Cpus:
    """Processors of the node that a card hangs on; empty where all are as near, or the system does not say."""
    if device.type != "cuda":
        return frozenset()
    card: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave these out
    name = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    try:
        ranges = (_DEVICES / name / "local_cpulist").read_text(encoding="ascii").strip().split(",")
    except OSError:
        return frozenset()
    bounds = [one.partition("-") for one in ranges if one]
    local = frozenset(cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1))
    allowed = os.sched_getaffinity(0)
    return frozenset() if local >= allowed else local & allowed


def stay_near(cpus: Cpus) -> None:
    """Let the calling thread run on these processors alone, if there are any."""
    if cpus:
        os.sched_setaffinity(0, cpus)


@contextmanager
def staying_near(cpus: Cpus) -> Iterator[None]:
    """The same for a while."""
    before = os.sched_getaffinity(0)
    stay_near(cpus)
    try:
        yield
    finally:
        stay_near(Cpus(before) if cpus else cpus)
