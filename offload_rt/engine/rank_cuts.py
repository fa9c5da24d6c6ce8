"""Which way ranks divide weights that come from a disk: by what a pass takes, whose parts are measured for each way."""

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import torch

from offload_rt.engine import profile
from offload_rt.engine.link import convert_flags
from offload_rt.models.tensor_parallel import TensorParallelModel
from offload_rt.offload.disk import DiskTier
from offload_rt.system.machine import ComputeTimes, MachineProfile, PassBytes, pass_time

if TYPE_CHECKING:  # it asks what is here
    from offload_rt.engine.engine_plan import EnginePlan


def pass_seconds(plan: "EnginePlan", n_rows: int, product_gbps: float) -> float:
    """Seconds of a pass of so many rows on the slowest rank; all ranks ask together.

    The disk is timed as this rank reads it: what lies between parts of rows takes time, and so does decoding.

    product_gbps  at which weights in the dtype of the computation are multiplied by these
    """
    model, disk = plan.checkpoint.spec, plan.disk
    assert isinstance(model, TensorParallelModel), "a rank has a part of it"
    weights = sum(model.flops(i, n_rows, 0) for i in range(model.n_layers)) / 2 / n_rows * plan.dtype.itemsize
    compute = weights / product_gbps / 1e9
    for (adds, width), n in sorted(Counter(one for i in range(model.n_layers) for one in model.exchanges(i)).items()):
        x = torch.zeros(n_rows, width, dtype=plan.dtype, device=plan.device)
        exchange = model.ranks.all_reduce if adds else model.ranks.all_gather
        compute += n * min(profile.timed(plan.device, partial(exchange, x)))
    times = ComputeTimes((n_rows,), (0,), ((compute,),))
    links = (("disk", profile.link_gbps(disk, model.n_layers)),)
    nbytes = sum(disk.nbytes(i) for i, tier in enumerate(plan.plan.tiers) if tier == "disk")
    machine = MachineProfile("this machine", True, links, product_gbps, compute=times)
    return float(-model.ranks.least(-pass_time(machine, PassBytes((("disk", nbytes),), 0), n_rows))[0])


def reading_notice(plan: "EnginePlan", size: int, is_exact: bool) -> str:
    """Says so where much is read in vain, and what files have none of it; is_exact: for runs with --exact-parallel."""
    disk, layers = plan.disk, range(plan.checkpoint.spec.n_layers)
    own = sum(map(disk.nbytes, layers))
    read = sum(map(disk.read_nbytes, layers)) if isinstance(disk, DiskTier) else own
    if read < 1.1 * own:
        return ""
    what = f"layers are read from the disk with what lies between a rank's parts, in {read / own:.1f} times their bytes"
    change = f"offload-rt convert{convert_flags(size, is_exact)} writes files without it"
    return f"{what}; {change}"
