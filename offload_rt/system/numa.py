"""CPU affinity near a GPU: memory is allocated on the NUMA node of the first touch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_DEVICES = Path("/sys/bus/pci/devices")

Cpus = frozenset[int]


def cpus_near(device: torch.device) -> Cpus:
    """Return the CPUs of the GPU's NUMA node; empty for a single node or if unknown."""
    if device.type != "cuda":
        return frozenset()
    card: Any = torch.cuda.get_device_properties(device)  # incomplete in torch's stubs
    name = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    try:
        ranges = (_DEVICES / name / "local_cpulist").read_text(encoding="ascii").strip().split(",")
    except OSError:
        return frozenset()
    bounds = [part.partition("-") for part in ranges if part]
    local = frozenset(
        cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1)
    )
    allowed = os.sched_getaffinity(0)
    return frozenset() if local >= allowed else local & allowed


def stay_near(cpus: Cpus) -> None:
    """Restrict the calling thread to these CPUs, unless empty."""
    if cpus:
        os.sched_setaffinity(0, cpus)


@contextmanager
def staying_near(cpus: Cpus) -> Iterator[None]:
    """Restrict the calling thread to these CPUs within a `with` block."""
    before = os.sched_getaffinity(0)
    stay_near(cpus)
    try:
        yield
    finally:
        stay_near(Cpus(before) if cpus else cpus)
