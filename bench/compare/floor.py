"""How fast weights can arrive on this machine: the floor of every figure.

`python -m bench.compare.floor --job JSON` prints GB/s for each source of a `Supply`, and how many
layers fit the budget.
"""

import argparse
import json
import time
from contextlib import closing
from statistics import median

import torch

from bench.common.peaks import read_gbps
from bench.compare.contract import Job
from offload_rt import LLM
from offload_rt.engine.profile import memory_gbps

_SWEEPS = 3


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=Job.of, required=True)
    job = parser.parse_args().job
    with LLM(
        str(job.plain), device_memory=job.budget, max_model_len=job.max_len, drafter="none"
    ) as llm:
        n_resident = llm.plan.tiers.count("device")
        dtype = llm.spec.target.dtype.torch
        device = llm.spec.device
        disk = _sweep_gbps(llm)
    is_cpu = device.type == "cpu"
    gbps = {"disk": disk, "memory": read_gbps() if is_cpu else memory_gbps(dtype, device)}
    if not is_cpu:
        gbps["host"] = _copy_gbps()
    print(json.dumps({"gbps": gbps, "n_resident": n_resident}))


def _sweep_gbps(llm: LLM) -> float:
    """The rate of the streamed layers when nothing is computed: the same direct reads and nothing
    else.
    """
    streamer = llm.engine.runner.streamer
    seconds = []
    moved = llm.plan.streamed_nbytes
    for _ in range(_SWEEPS + 1):
        started = time.perf_counter()
        with closing(streamer.sweep()) as sweep:
            for _ in sweep:
                pass
        seconds.append(time.perf_counter() - started)
    return moved / median(seconds[1:]) / 1e9  # the first one fills the slots


def _copy_gbps(nbytes: int = 1 << 30) -> float:
    """The rate of copies of one pinned block to the device."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(4):
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return nbytes / median(seconds[1:]) / 1e9


if __name__ == "__main__":
    main()
