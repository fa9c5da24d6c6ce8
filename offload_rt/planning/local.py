"""The machine that this runs on, measured, as one to plan for."""

from functools import cache
from pathlib import Path

import torch

from offload_rt.config import EngineConfig
from offload_rt.engine import profile
from offload_rt.engine.builder import memory_budget, pick_device
from offload_rt.errors import OffloadError, SettingsError
from offload_rt.executor.runner import Placing
from offload_rt.models.architecture import Architecture
from offload_rt.offload.disk import DiskTier
from offload_rt.planning.forecast import Machine
from offload_rt.system.machine import ComputeTimes
from offload_rt.weights.checkpoint import open_checkpoint

# Rows and context up to which passes are timed.
_N_ROWS, _CONTEXT = 1024, 2048


def this_machine(config: EngineConfig, disk_gbps: float | None) -> Machine:
    """What this machine does, by a layer of random numbers of each model that is asked for.

    disk_gbps  GB/s of the disk; None: measured, where the model is a directory with its weights
    Raises SettingsError where the disk's rate is neither given nor to be measured.
    """
    device = pick_device(config.device)
    if device.type == "cpu" and config.host_memory is not None:
        raise SettingsError("--ram is for memory beside a GPU", change="on a CPU, set --device-memory alone")
    told = "the disk: given"
    if disk_gbps is None:
        disk_gbps, told = _disk_gbps(config.model), "the disk: measured with the model's own files"
    host_gbps = profile.upload_gbps(device) if device.type == "cuda" else 1.0

    @cache
    def compute(spec: Architecture, dtype: torch.dtype) -> ComputeTimes:
        return profile.times_of_shape(spec, Placing(device, dtype), _N_ROWS, min(_CONTEXT, spec.max_positions))

    return Machine(
        title=f"this machine, {device.type}",
        budget=memory_budget(config, device),
        links=(("disk", disk_gbps), ("host", host_gbps)),
        compute=compute,
        sources=("computing: measured with layers of random numbers", told),
    )


def _disk_gbps(model: str) -> float:
    try:
        checkpoint = open_checkpoint(Path(model))
    except (OffloadError, OSError) as error:
        raise SettingsError(
            "the rate of the disk is not known", need="--disk, or a model whose weights are here to be read",
            change="give --disk, like 2GB/s",
        ) from error  # fmt: skip
    tier = DiskTier(checkpoint.layers)
    try:
        return profile.link_gbps(tier, checkpoint.spec.n_layers)
    finally:
        tier.close()
