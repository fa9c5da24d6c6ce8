"""How much faster is a pass whose layers stream over the links of two ranks than over that of one?

`python -m bench.ranks` starts one process and two by torchrun in turn, each with a link of its own of a set speed, and times
plain passes of the same model. The floor is the bytes of a rank over the rate of its link. The last line is one JSON object.
"""

import argparse
import json
import os
from dataclasses import asdict, replace
from statistics import median

from bench.measure import Spread, commit, expanded_model, flag_parser, machine, print_result, run_json
from bench.paced import pace
from offload_rt.config import EngineConfig
from offload_rt.llm import LLM

N_SLOTS, CONTEXT = 3, 20


def measure(model: str, gbps: float, n_passes: int) -> None:
    """Print what rank 0 sees: seconds of passes, and the bytes that its link moves in each."""
    config = EngineConfig(
        model, device="cpu", drafter="none", max_model_len=128, exact_parallel="RANK" in os.environ, link_format="raw"
    )
    with LLM.open(config) as unloaded:
        plan = unloaded.plan
    llm = LLM.open(replace(config, device_memory=plan.reserved.total + N_SLOTS * plan.slot_nbytes))
    pace(llm, gbps)
    assert set(llm.plan.tiers) == {"disk"}, llm.plan.tiers
    llm.load()
    with llm:
        seconds = llm.time_plain(CONTEXT, n_passes)
    print(json.dumps({"seconds": seconds, "nbytes": llm.plan.streamed_nbytes}))


def main() -> None:
    """Run both in turn and print one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--size", default="200MB", help="the demo target is expanded to it")
    parser.add_argument("--gbps", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        return measure(flags.measure, flags.gbps, flags.passes)
    own = ["-m", "bench.ranks", "--measure", str(expanded_model(flags.size)), "--gbps", str(flags.gbps)]
    own += ["--passes", str(flags.passes)]
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    found = [[run_json(command).result for command in (own, [*ranks, *own])] for _ in range(flags.rounds)]
    ratio = Spread.of([median(two["seconds"]) / median(one["seconds"]) for one, two in found])
    (one, two), floors = found[0], [found[0][i]["nbytes"] / flags.gbps / 1e9 for i in (0, 1)]
    over = [Spread.of([median(run[i]["seconds"]) / floors[i] for run in found]) for i in (0, 1)]
    print(f"{machine()}; commit {commit()}; links of {flags.gbps} GB/s")
    print(f"bytes of a rank / all           {two['nbytes'] / one['nbytes']:.4f}")
    print(f"pass / floor, one rank          {over[0]}")
    print(f"pass / floor, two ranks         {over[1]}")
    print(f"pass of two ranks / of one      {ratio}; floor {floors[1] / floors[0]:.4f}")
    found = {"ratio": asdict(ratio), "over_floor": [asdict(spread) for spread in over]}
    print_result("ranks", flags, bytes_ratio=two["nbytes"] / one["nbytes"], **found)


if __name__ == "__main__":
    main()
