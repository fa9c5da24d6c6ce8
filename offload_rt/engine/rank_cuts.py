"""Which way ranks divide weights that come from a disk: by what a token takes, whose parts are
measured for each way.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from offload_rt.cost.pass_times import (
    ComputeTimes,
    MachineProfile,
    PassBytes,
    pass_times,
    transfer_s,
)
from offload_rt.cost.tree_size import Acceptance, select_tree
from offload_rt.engine import profile
from offload_rt.engine.link import convert_flags
from offload_rt.offload.disk import DiskTier
from offload_rt.parallel.tensor_parallel import TensorParallelModel
from offload_rt.tree.search import search

if TYPE_CHECKING:  # it asks what is here
    from offload_rt.engine.engine_plan import EnginePlan


def token_seconds(plan: "EnginePlan", product_gbps: Sequence[float]) -> float:
    """Seconds for a token on the slowest rank, with the best tree for a fair draft; all ranks ask
    together.

    The disk is timed as this rank reads it: what lies between parts of rows takes time, and so does
    decoding.

    product_gbps  at which weights in the dtype of the computation are multiplied by one row, and by
                  those of the largest tree
    """
    model = plan.checkpoint.spec
    disk = plan.disk
    limits = plan.limits
    assert isinstance(model, TensorParallelModel), "a rank has a part of it"
    exchanges = Counter(one for i in range(model.n_layers) for one in model.exchanges(i))
    widths = sorted({1, limits.n_nodes})
    compute = list[float]()
    for n_rows, gbps in zip(widths, product_gbps, strict=False):
        weights = (
            sum(model.flops(i, n_rows, 0) for i in range(model.n_layers))
            / 2
            / n_rows
            * plan.dtype.itemsize
        )
        compute.append(transfer_s(weights, gbps))
        for (adds, width), n in sorted(exchanges.items()):
            x = torch.zeros(n_rows, width, dtype=plan.dtype, device=plan.device)
            exchange = model.ranks.all_reduce if adds else model.ranks.all_gather
            compute[-1] += n * min(profile.timed(plan.device, partial(exchange, x)))
    times = ComputeTimes(tuple(widths), (0,), (tuple(compute),))
    links = (("disk", profile.link_gbps(disk, model.n_layers)),)
    nbytes = sum(disk.nbytes(i) for i, tier in enumerate(plan.plan.tiers) if tier == "disk")
    machine = MachineProfile("this machine", True, links, product_gbps[0], compute=times)

    def slowest_s(sizes: np.ndarray) -> np.ndarray:
        seconds = pass_times(machine, PassBytes((("disk", nbytes),), 0), sizes, 0)
        return -np.array(model.ranks.least(*(-seconds).tolist()))[:, None]

    trees = search(Acceptance().by_rank(), limits.n_nodes, limits.n_levels)
    return select_tree(trees.values, limits, slowest_s).token_s


def reading_notice(plan: "EnginePlan", size: int, is_exact: bool) -> str:
    """Says so where much is read in vain, and what files have none of it; is_exact: for runs with
    --exact-parallel.
    """
    disk = plan.disk
    layers = range(plan.checkpoint.spec.n_layers)
    own = sum(map(disk.nbytes, layers))
    read = sum(map(disk.read_nbytes, layers)) if isinstance(disk, DiskTier) else own
    if read < 1.1 * own:
        return ""
    what = (
        f"layers are read from the disk with what lies between a rank's parts, in {read / own:.1f}"
        " times their bytes"
    )
    change = f"offload-rt convert{convert_flags(size, is_exact)} writes files without it"
    return f"{what}; {change}"
