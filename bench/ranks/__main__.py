"""How much faster is a streamed pass over the links of two ranks than over a single link?

    python -m bench.ranks [--size 200MB] [--gbps 0.1] [--rounds 3]

Start a single process, and two by torchrun, in turn. Each rank has a paced link. The floor is the
bytes of a rank over the rate of its link.
"""

import json
import os
from functools import partial
from statistics import median

from bench.common.checkpoints import expanded_model
from bench.common.measure import Benchmark, Spread, interleaved
from bench.common.pacing import open_streamed
from bench.common.processes import run_json
from offload_rt.config import EngineConfig

N_SLOTS = 3
CONTEXT = 20


def measure(model: str, gbps: float, n_passes: int) -> None:
    """Print the seconds of passes and the link bytes of a pass on rank 0."""
    settings = {"device": "cpu", "drafter": "none", "max_model_len": 128, "link_format": "raw"}
    config = EngineConfig(model, exact_parallel="RANK" in os.environ, **settings)
    with open_streamed(config, gbps, N_SLOTS) as llm:
        assert set(llm.plan.tiers) == {"disk"}, llm.plan.tiers
        seconds = llm.time_plain(CONTEXT, n_passes)
    print(json.dumps({"seconds": seconds, "nbytes": llm.plan.streamed_nbytes}))


def main() -> None:
    """Compare ranks, or measure as a rank."""
    bench = Benchmark("ranks", __doc__)
    bench.add("--size", default="200MB", help="of the expanded demo target")
    bench.add("--gbps", type=float, default=0.1, help="rate of each link")
    bench.add("--rounds", type=int, default=3)
    bench.add("--passes", type=int, default=3)
    bench.add("--measure", help="checkpoint; print measurements of this rank")
    flags = bench.parse()
    if flags.measure:
        return measure(flags.measure, flags.gbps, flags.passes)
    bench.print_header()
    model = str(expanded_model(flags.size))
    rank = ["-m", "bench.ranks", "--measure", model, "--gbps", str(flags.gbps)]
    rank += ["--passes", str(flags.passes)]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    commands = {"1 rank": rank, "2 ranks": [*torchrun, *rank]}
    works = {name: partial(run_json, command) for name, command in commands.items()}
    runs = interleaved(works, flags.rounds, warm_up=0)
    nbytes = {name: run[0].result["nbytes"] for name, run in runs.items()}
    seconds = {name: [median(r.result["seconds"]) for r in run] for name, run in runs.items()}
    share = nbytes["2 ranks"] / nbytes["1 rank"]
    over_floor = {}
    print(f"bytes of a rank / all   {share:.4f}")
    for name, times in seconds.items():
        floor = nbytes[name] / flags.gbps / 1e9
        over_floor[name] = Spread.of([time / floor for time in times])
        print(f"pass / floor, {name:9} {over_floor[name]}")
    ratio = Spread.of_ratios(seconds["2 ranks"], seconds["1 rank"])
    print(f"2 ranks / 1 rank        {ratio}; floor {share:.4f}")
    bench.finish(bytes_ratio=share, ratio=ratio, over_floor=over_floor)


if __name__ == "__main__":
    main()
