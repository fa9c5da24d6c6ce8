"""Does streaming a checkpoint four times larger than its memory cost more than reading it?

    python -m bench.stream [--size 3GB] [--rounds 9] [--sections SECTION...]

pass: a pass of a single token against its floor, the same direct reads without compute. memory:
peak resident memory against the budget. accelerate: seconds per token against Accelerate's disk
offload, both plain and cold. paced: overlap of compute with a link of equal duration. mirror:
sweeps over a checkpoint with its copy, or a part of each layer, on a second disk, at fixed rates.
"""

import time
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.common.checkpoints import (
    DRAFT,
    drop_from_page_cache,
    expanded_model,
    resident_layers,
)
from bench.common.measure import Benchmark, Spread, interleaved, timed
from bench.common.pacing import PacedTier, sweep
from bench.common.processes import run_json
from bench.compare.contract import Job
from bench.compare.outcome import run_peer
from bench.stream import mirrors
from offload_rt.config import format_size, parse_size
from offload_rt.executor.runner import Runner
from offload_rt.executor.step import Step
from offload_rt.llm import LLM
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources, Streamer
from offload_rt.sampling_params import SamplingParams
from offload_rt.system.trace import Trace
from offload_rt.tree.topology import Topology

# Per measurement. All slots are full before and after, so a pass moves exactly its bytes.
PASSES = 3
# Imports of a run; transformers loads a class at its first use.
IMPORTS = (
    "import torch; from transformers import AutoTokenizer, LlamaConfig; import offload_rt.llm,"
    " offload_rt.cli.format"
)
PROMPT = [0, 300, 17, 511, 42]
OURS = "offload_rt_plain"
THEIRS = "accelerate_disk"


@dataclass(frozen=True)
class Settings:
    """Model and draft, bytes of memory, rounds, and tokens per process of the comparison."""

    model: Path
    draft: str
    budget: int
    rounds: int
    tokens: int

    def open(self) -> LLM:
        """Open the streamed model without a drafter."""
        return LLM(str(self.model), device_memory=self.budget, drafter="none")


def sweep_seconds(streamer: Streamer) -> float:
    """Return the seconds of a sweep without compute."""
    return timed(partial(sweep, streamer, PASSES)) / PASSES


def pass_against_floor(settings: Settings) -> dict[str, object]:
    """Compare passes of a single token with sweeps."""
    params = SamplingParams(max_new_tokens=PASSES)
    busy = []
    with settings.open() as llm:
        streamer = llm.engine.runner.streamer
        plan = llm.plan

        def run() -> float:
            started = time.perf_counter()
            stats = llm.generate([PROMPT], params)[0].stats
            busy.append(stats.link_busy)
            return (time.perf_counter() - started) / stats.n_passes

        works = {"floor": partial(sweep_seconds, streamer), "pass": run}
        seconds = interleaved(works, settings.rounds)
    moved = plan.streamed_nbytes
    ratio = Spread.of_ratios(seconds["pass"], seconds["floor"])
    floor = Spread.of(seconds["floor"])
    passes = Spread.of(seconds["pass"])
    n_resident = plan.tiers.count("device")
    n_streamed = plan.tiers.count("disk")
    print(f"\n## A pass of one token: {moved / 1e9:.2f} GB from disk, {n_streamed} layers")
    print(f"{n_resident} layers are resident")
    print(
        f"floor, the same reads without compute   {floor} s, {moved / floor.median / 1e9:.2f} GB/s"
    )
    print(f"pass                                    {passes} s, link busy {Spread.of(busy)}")
    print(f"pass / floor, pair by pair              {ratio}")
    return {"moved_bytes": moved, "floor_s": floor, "pass_s": passes, "pass_over_floor": ratio}


def peak_memory(settings: Settings) -> dict[str, object]:
    """Measure peak resident memory of command-line runs beyond their imports, twice each.

    The first run on a machine compiles verification kernels, which needs more memory.
    """
    imports = run_json(["-c", IMPORTS]).peak_rss
    flags = ["--model", str(settings.model), "--device-memory", str(settings.budget)]
    flags += ["--prompt", "def main():", "--json"]
    trees = ["--draft-model", settings.draft, "--max-new-tokens", "32"]
    runs = {
        "plain": ["--drafter", "none", "--max-new-tokens", "3"],
        "trees, T = 0": trees,
        "trees, T = 0.6": [*trees, "--temperature", "0.6", "--seed", "1"],
    }
    print("\n## Peak resident memory of the process")
    budget = format_size(settings.budget)
    print(f"importing torch and transformers  {format_size(imports)}; budget {budget}")
    peaks = {}
    for name, more in runs.items():
        command = ["-m", "offload_rt.run", *flags, *more]
        peaks[name] = [run_json(command).peak_rss - imports for _ in range(2)]
        over = (peaks[name][-1] - settings.budget) / 2**20
        sizes = ", ".join(map(format_size, peaks[name]))
        print(f"{name:32}  {sizes} beyond imports: budget {over:+.0f} MiB")
    return {"imports_bytes": imports, "beyond_imports_bytes": peaks, "budget": settings.budget}


def against_accelerate(settings: Settings) -> dict[str, object] | None:
    """Compare seconds per token after the first, both cold, interleaved."""
    if find_spec("accelerate") is None:
        print('\n## Accelerate is not installed: pip install -e ".[compare]"')
        return None
    with settings.open() as llm:
        n_resident = llm.plan.tiers.count("device")
        max_len = llm.max_model_len
    model = settings.model
    with TemporaryDirectory() as scratch:
        job = Job(model, model, model, settings.budget, n_resident, max_len, Path(scratch))

        def answer(name: str) -> tuple[list[int], list[float]]:
            drop_from_page_cache(model)
            answer = run_peer(name, job, [PROMPT], PROMPT, settings.tokens).report.answers[0]
            times = [after - before for (before, _), (after, _) in pairwise(answer.arrivals)]
            return answer.token_ids, times

        works = {name: partial(answer, name) for name in (OURS, THEIRS)}
        answers = interleaved(works, max(settings.rounds // 3, 2), warm_up=0)
    seconds = {
        name: Spread.of([time for _, times in runs for time in times])
        for name, runs in answers.items()
    }
    tokens = [[ids for ids, _ in runs] for runs in answers.values()]
    is_equal = tokens[0] == tokens[1]
    ratio = seconds[THEIRS].median / seconds[OURS].median
    print(f"\n## Seconds per token, cold, {n_resident} layers resident in both")
    print(f"offload_rt               {seconds[OURS]}")
    print(f"Accelerate disk offload  {seconds[THEIRS]}")
    verdict = "yes" if is_equal else "no (bf16, different order of sums)"
    print(f"ratio of medians {ratio:.2f}; equal tokens: {verdict}")
    times = {"offload_rt_s": seconds[OURS], "accelerate_s": seconds[THEIRS]}
    return {**times, "ratio": ratio, "same_tokens": is_equal}


def paced_overlap(settings: Settings) -> dict[str, object]:
    """Compare a pass with the longer of compute and link, for a link as fast as compute."""
    n_layers = 8
    n_rows = 384
    # Resident layers are the source of the paced link, and measure compute alone.
    with LLM(str(settings.model)) as llm:
        runner = llm.engine.runner
        width = runner.spec.hidden_size
        source = resident_layers(llm)
        moved = sum(source.layout(i).nbytes for i in range(n_layers))
        resident = Passes(runner, LayerSources(source, (None,) * n_layers, 0), n_rows)
        compute = Spread.of([resident.seconds() for _ in range(5)][1:]).median
        gbps = moved / compute / 1e9
        tier = PacedTier(source, gbps)
        both = Passes(runner, LayerSources(MemoryTier(), (tier,) * n_layers, 3), n_rows)
        link = ThreadStreamer(LayerSources(MemoryTier(), (tier,) * n_layers, 3), Trace(on=False))
        works = {
            "link": partial(sweep_seconds, link),
            "compute": resident.seconds,
            "both": both.seconds,
        }
        seconds = interleaved(works, settings.rounds, warm_up=0)
        for streamer in (link, resident, both):
            streamer.close()
    longer = list(map(max, seconds["link"], seconds["compute"]))
    ratio = Spread.of_ratios(seconds["both"], longer)
    print(f"\n## Overlap: {width} wide, {n_layers} layers, {n_rows} tokens, link {gbps:.2f} GB/s")
    print(f"pass / the longer of link and compute  {ratio}")
    return {"compute_s": compute, "link_gbps": gbps, "pass_over_longer": ratio}


class Passes:
    """Passes of a fixed number of tokens."""

    def __init__(self, like: Runner, sources: LayerSources, n_rows: int) -> None:
        off = Trace(on=False)
        self._streamer = ThreadStreamer(sources, off)
        place = like.device, like.dtype
        self._runner = Runner(like.spec, self._streamer, like.non_layer, like.format, *place, off)
        self._n_rows = n_rows

    def seconds(self) -> float:
        """Return the mean time of a pass."""
        return timed(lambda: [self._forward() for _ in range(PASSES)]) / PASSES

    def _forward(self) -> None:
        n = self._n_rows
        cache = self._runner.new_cache(n)
        tokens = torch.arange(n) % self._runner.spec.vocab_size
        self._runner.forward([Step(cache, tokens, Topology.chain(n), 1, n)])
        self._runner.free_cache(cache)

    def close(self) -> None:
        """Join the threads."""
        self._streamer.close()


SECTIONS = {
    "pass": pass_against_floor,
    "memory": peak_memory,
    "accelerate": against_accelerate,
    "paced": paced_overlap,
    "mirror": lambda settings: mirrors.measure(settings.model, settings.rounds // 3),
}


def main() -> None:
    """Run the selected sections."""
    bench = Benchmark("stream", __doc__)
    bench.add("--model", type=Path, help="checkpoint; default: the demo target, expanded")
    bench.add("--draft-model", default=DRAFT, help="of the section memory")
    bench.add("--size", default="3GB", help="of the expanded demo target")
    bench.add("--budget", type=parse_size, help="default: a quarter of the weights")
    bench.add("--rounds", type=int, default=9)
    bench.add("--tokens", type=int, default=6, help="per process of the comparison")
    bench.add("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    flags = bench.start()
    model = flags.model or expanded_model(flags.size)
    nbytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    budget = flags.budget or nbytes // 4
    settings = Settings(model, flags.draft_model, budget, flags.rounds, flags.tokens)
    print(f"{model.name}: {format_size(nbytes)}, budget {format_size(settings.budget)}")
    results = {name: SECTIONS[name](settings) for name in flags.sections}
    bench.finish(model_bytes=nbytes, budget_bytes=settings.budget, **results)


if __name__ == "__main__":
    main()
