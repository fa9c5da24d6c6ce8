"""How fast weights can arrive on this machine: the floor of every figure.

`python -m bench.compare.floor --job JSON` prints GB/s for each source of a `Supply`, and how many
layers fit the budget.
"""

import argparse
import json
from functools import partial
from statistics import median

from bench.common.measure import timed
from bench.common.pacing import sweep
from bench.common.peaks import read_gbps
from bench.compare.contract import Job
from offload_rt import LLM
from offload_rt.engine.profile import memory_gbps, upload_gbps

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
        gbps["host"] = upload_gbps(device, 1 << 30)
    print(json.dumps({"gbps": gbps, "n_resident": n_resident}))


def _sweep_gbps(llm: LLM) -> float:
    """The rate of the streamed layers when nothing is computed: the same direct reads and nothing
    else.
    """
    work = partial(sweep, llm.engine.runner.streamer)
    seconds = [timed(work) for _ in range(_SWEEPS + 1)]
    return llm.plan.streamed_nbytes / median(seconds[1:]) / 1e9  # the first one fills the slots


if __name__ == "__main__":
    main()
