"""How much faster is streaming the touched experts than streaming whole layers?

    python -m bench.experts [--size 3GB] [--memory 0.75GB] [--gbps 1] [--host]

Write two mixtures of random weights, shaped as Mixtral (8 experts, 2 per token) and Qwen3-MoE (128
experts, 8 per token). Decode both ways over a paced link, interleaved; tokens must be equal.
Random routers use all experts equally often, the worst case for the expert cache. The floor is the
time of the transferred bytes on the link.

With --host, experts are in memory behind the link. Compare copying all missing experts with
computing some in place by a thread.
"""

import argparse
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from bench.common.measure import Benchmark, Spread, interleaved
from bench.experts.mixtures import BESIDE_HOST, STREAMED, configs, open_beside_host, open_paced
from offload_rt import LLM, SamplingParams
from offload_rt.config import format_size, parse_size


def decode(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[float, float, list[int]]:
    """Return seconds and link bytes per pass, and the tokens."""
    meter = llm.engine.runner.streamer.meter
    started = time.perf_counter()
    before = meter.read()[0]
    output = llm.generate(prompt, params)[0]
    n_passes = output.stats.n_passes
    seconds = (time.perf_counter() - started) / n_passes
    return seconds, (meter.read()[0] - before) / n_passes, output.token_ids


def measure(folder: Path, flags: argparse.Namespace) -> dict[str, object]:
    """Measure seconds per token and bytes per pass of both ways."""
    ways = BESIDE_HOST if flags.host else STREAMED
    open_way = open_beside_host if flags.host else open_paced
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1024, (flags.rounds + 1, 4), generator=generator).tolist()
    with ExitStack() as stack:
        llms = {
            way: stack.enter_context(open_way(folder, way, flags.memory, flags.gbps))
            for way in ways
        }
        runs: dict[str, list[tuple[float, float, list[int]]]] = {way: [] for way in ways}
        for seed, prompt in enumerate(prompts):
            params = SamplingParams(max_new_tokens=flags.tokens, temperature=1.0, seed=seed)
            works = {way: partial(decode, llm, prompt, params) for way, llm in llms.items()}
            for way, (run,) in interleaved(works, rounds=1, warm_up=0).items():
                runs[way].append(run)
        plan = llms[ways[1]].plan
        host = llms[ways[1]].engine.runner.experts.host
    result: dict[str, object] = {}
    if host is not None:
        result |= {"host_s": host.times.seconds[0], "copy_s": host.copy_s}
        print(
            f"an expert: {host.copy_s:.5f} s on the link, {host.times.seconds[0]} s on the host for"
            f" {host.times.widths} rows"
        )
    columns = {way: list(zip(*runs[way][1:], strict=True)) for way in ways}  # round 0 fills slots
    assert columns[ways[0]][2] == columns[ways[1]][2], "both ways generate the same tokens"
    for way, (seconds, nbytes, _) in columns.items():
        time_s = Spread.of(seconds)
        moved = Spread.of(nbytes).median
        over_floor = time_s.median / (moved / flags.gbps / 1e9)
        print(
            f"{way:16s} {time_s} s per token; {format_size(moved)} a pass, {over_floor:.2f} of"
            " the floor"
        )
        result[way] = {"seconds": time_s, "nbytes": moved, "over_floor": over_floor}
    ratio = Spread.of_ratios(columns[ways[1]][0], columns[ways[0]][0])
    kept = f"{plan.n_expert_slots} of {plan.experts.n_blocks}"
    print(f"{ways[1]} / {ways[0]}  {ratio}; {kept} experts cached")
    return result | {"ratio": ratio}


def main() -> None:
    """Measure both mixtures."""
    bench = Benchmark("experts", __doc__)
    bench.add("--size", type=parse_size, default=parse_size("3GB"))
    bench.add("--memory", type=parse_size, default=parse_size("0.75GB"))
    bench.add("--gbps", type=float, default=1.0, help="rate of the link")
    bench.add("--rounds", type=int, default=3)
    bench.add("--tokens", type=int, default=6)
    bench.add("--host", action="store_true", help="compare copying with computing on the host")
    bench.add("--kinds", default="qwen3_moe,mixtral")
    bench.add("--folder", help="folder of the models; default: temporary files")
    flags = bench.start()
    results: dict[str, object] = {}
    for kind in flags.kinds.split(","):
        config = configs(flags.size)[kind]
        with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
            memory = format_size(flags.memory)
            print(f"\n## {kind}: {config.num_hidden_layers} layers, {memory} of memory")
            results[kind] = measure(Path(folder), flags)
    bench.finish(**results)


if __name__ == "__main__":
    main()
