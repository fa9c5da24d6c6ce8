"""How much faster are two machines that together hold a model than a machine that streams it?

    OMP_NUM_THREADS=1 python -m bench.ranks.pipeline [--size 256MB] [--gbps 1] [--rounds 5]

Two processes represent the machines, connected by gloo, each with memory for 6 of 10 layers. A
process with the same budget streams over a paced link. The floor is a process with memory for all
layers. A prompt of 1,000 tokens consists of two chunks, so two ranks in parallel need 3/4 of its
time.
"""

import json
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from bench.common.checkpoints import expanded_model
from bench.common.measure import Benchmark, Spread, interleaved
from bench.common.pacing import open_paced
from bench.common.processes import run_json
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig, parse_size
from offload_rt.tree.topology import Topology

WIDTHS = (1, 64, 256)
CONTEXT = 256
N_PROMPT = 1000
CASES = (*(f"pass of {n} rows" for n in WIDTHS), f"prompt of {N_PROMPT} tokens")


def config(model: Path, nbytes: int, **more: int) -> EngineConfig:
    """Return settings with this memory budget."""
    more |= {"tree_size": WIDTHS[-1], "max_model_len": 1024}
    return EngineConfig(str(model), device="cpu", device_memory=nbytes, drafter="recycle", **more)


def seconds(llm: LLM, generator: torch.Generator) -> list[float]:
    """Time a pass of each width, and a new prompt."""
    passes = [min(llm.time_passes(Topology.chain(n), CONTEXT)) for n in WIDTHS]
    n_vocab = llm.spec.target.checkpoint.spec.vocab_size
    prompt = torch.randint(n_vocab, (N_PROMPT,), generator=generator).tolist()
    started = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    return [*passes, time.perf_counter() - started]


def main() -> None:
    """Compare the machines, or measure as a rank."""
    bench = Benchmark("pipeline", __doc__)
    bench.add("--size", default="256MB")
    bench.add("--gbps", type=float, default=1.0, help="rate of the streaming machine's link")
    bench.add("--rounds", type=int, default=5)
    bench.add("--rank-of", type=Path, help="checkpoint; print measurements as a rank")
    bench.add("--budget", type=int, help="bytes of memory of the rank")
    flags = bench.parse()
    generator = torch.Generator().manual_seed(time.time_ns())
    if flags.rank_of:
        with LLM.from_config(config(flags.rank_of, flags.budget, pipeline=2)) as llm:
            assert llm.plan.is_resident, "each rank holds its layers"
            return print(json.dumps(seconds(llm, generator)))
    bench.print_header()
    model = expanded_model(flags.size)
    with ExitStack() as closes:
        memory = 3 * parse_size(flags.size) + (1 << 29)
        whole = closes.enter_context(LLM.from_config(config(model, memory)))
        budget = whole.plan.reserved.total + int(0.6 * sum(whole.plan.layer_nbytes))
        streaming = closes.enter_context(open_paced(config(model, budget), flags.gbps))
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        rank = ["-m", "bench.ranks.pipeline", "--rank-of", str(model), "--budget", str(budget)]
        works = {
            "floor": partial(seconds, whole, generator),
            "streaming": partial(seconds, streaming, generator),
            "ranks": lambda: run_json([*ranks, *rank]).result,
        }
        runs = interleaved(works, flags.rounds, warm_up=0)
        print(f"{sum(whole.plan.layer_nbytes) / 1e6:.0f} MB of layers, link {flags.gbps} GB/s")
    print(f"{'':28}{'2 ranks / streaming':>32}{'2 ranks / floor':>32}")
    table = {}
    for i, case in enumerate(CASES):
        times = {name: [run[i] for run in results] for name, results in runs.items()}
        over_streaming = Spread.of_ratios(times["ranks"], times["streaming"])
        over_floor = Spread.of_ratios(times["ranks"], times["floor"])
        table[case] = {"over_streaming": over_streaming, "over_floor": over_floor}
        print(f"{case:28}{over_streaming!s:>32}{over_floor!s:>32}")
    bench.finish(**table)


if __name__ == "__main__":
    main()
