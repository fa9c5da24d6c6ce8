"""Measures what the machine can do: how its disk likes to be read, and how fast the device reads weights."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from offload_rt.files import read_cached, write_cached
from offload_rt.machine import MachineProfile
from offload_rt.tiers._tier import Tier, read_parallel
from offload_rt.tiers.disk import DiskTier, ReadSettings
from offload_rt.weights._header import TensorRecord
from offload_rt.weights._image import host_block

_CACHE, _VERSION = "disk.json", 1
_CANDIDATES = (ReadSettings(1 << 20, 4), ReadSettings(4 << 20, 2), ReadSettings(512 << 10, 8), ReadSettings(2 << 20, 4))
_ROUNDS = 3
# A setting must win by this much before it displaces the first: less is noise on a shared disk.
_MARGIN = 1.05


def read_settings(layers: Sequence[Sequence[TensorRecord]], names: Sequence[str]) -> ReadSettings:
    """The best way to read these blocks, measured once for each disk and remembered.

    layers, names  as `DiskTier` takes them
    """
    disk = _disk_of(layers[0][0].path)
    known = read_cached(_CACHE, _VERSION)
    try:
        return ReadSettings(*known[disk])
    except (KeyError, TypeError):
        best = _measure_settings(layers[: min(len(layers), 2)], names)
        write_cached(_CACHE, _VERSION, {**known, disk: [best.request_nbytes, best.n_parallel]})
        return best


def link_gbps(tier: Tier, n_layers: int, seconds: float = 0.5) -> float:
    """GB/s at which a tier delivers, reading whole blocks one after the other for about so long."""
    block = host_block(max(tier.layout(i).nbytes for i in range(n_layers)))
    started, nbytes, i = time.perf_counter(), 0, 0
    while (elapsed := time.perf_counter() - started) < seconds or nbytes == 0:
        nbytes += read_parallel(tier.reads(i % n_layers, block), tier.n_parallel)
        i += 1
    return nbytes / elapsed / 1e9 if elapsed else nbytes / (time.perf_counter() - started) / 1e9


def memory_gbps(dtype: torch.dtype, device: torch.device, nbytes: int = 64 << 20) -> float:
    """GB/s at which the device reads a matrix in a product with one vector."""
    width = 4096
    matrix = torch.ones(nbytes // dtype.itemsize // width, width, dtype=dtype, device=device)
    vector = torch.ones(1, width, dtype=dtype, device=device)
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        torch.nn.functional.linear(vector, matrix).sum().item()
        seconds.append(time.perf_counter() - started)
    return nbytes / median(seconds[1:]) / 1e9


def profile(tier: Tier, n_layers: int, dtype: torch.dtype, device: torch.device) -> MachineProfile:
    """Measure this machine with the layers of a tier on the disk."""
    disk = link_gbps(tier, n_layers)
    # Without a GPU host and device are the same memory.
    memory = memory_gbps(dtype, device)
    return MachineProfile(f"this machine, {device.type}", True, (("disk", disk), ("host", memory)), memory)


def _measure_settings(layers: Sequence[Sequence[TensorRecord]], names: Sequence[str]) -> ReadSettings:
    tiers = [(settings, DiskTier(layers, names, settings)) for settings in _CANDIDATES]
    block = host_block(max(tier.layout(i).nbytes for _, tier in tiers for i in range(len(layers))))
    rates: dict[ReadSettings, list[float]] = {settings: [] for settings in _CANDIDATES}
    try:
        for _ in range(_ROUNDS):
            for settings, tier in tiers:
                rates[settings].append(_rate(tier, len(layers), block))
    finally:
        for _, tier in tiers:
            tier.close()
    best = max(rates, key=lambda settings: median(rates[settings]))
    return best if median(rates[best]) > _MARGIN * median(rates[_CANDIDATES[0]]) else _CANDIDATES[0]


def _rate(tier: DiskTier, n_layers: int, block: Tensor) -> float:
    started = time.perf_counter()
    nbytes = sum(read_parallel(tier.reads(i, block), tier.n_parallel) for i in range(n_layers))
    return nbytes / (time.perf_counter() - started)


def _disk_of(path: Path) -> str:
    return str(os.stat(path).st_dev)
