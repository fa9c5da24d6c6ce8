"""Does streaming a checkpoint four times larger than its memory cost more than reading it?

`python -m bench.stream` measures, interleaved: a pass of one token against its floor (the same
bytes by the same direct reads and nothing else); peak memory against the budget; seconds per token
against Accelerate's disk offload, both plain and cold; overlap over a link of a set speed; the time
to the first token of a small resident model. The last line is one JSON object.
"""

import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.compare.contract import Job
from bench.compare.outcome import run_peer
from bench.measure import (
    Spread,
    commit,
    drop_from_page_cache,
    expanded_model,
    flag_parser,
    machine,
    print_result,
    resident_layers,
    run_json,
)
from bench.methods import DRAFT
from bench.paced import PacedTier
from offload_rt.config import SamplingParams, format_size, parse_size
from offload_rt.executor.runner import Runner
from offload_rt.executor.step import Step
from offload_rt.llm import LLM
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources, Streamer
from offload_rt.system.trace import Trace
from offload_rt.tree.topology import Topology

# in each measurement; all slots are full before and after, so each moves exactly its own bytes
PASSES = 3
# What a run imports; transformers loads a class when it is named.
IMPORTS = (
    "import torch; from transformers import AutoTokenizer, LlamaConfig; import offload_rt.llm,"
    " offload_rt.cli.format"
)
PROMPT = [0, 300, 17, 511, 42]
_OURS = "offload_rt_plain"
_THEIRS = "accelerate_disk"


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    model: Path
    budget: int
    rounds: int
    tokens: int


def pass_against_floor(settings: Settings) -> dict[str, object]:
    """Seconds of a one-token pass, and of a sweep that computes nothing, in turn."""
    floors = []
    passes = []
    busy = []
    with LLM(str(settings.model), device_memory=settings.budget, drafter="none") as llm:
        streamer = llm.engine.runner.streamer
        plan = llm.plan
        params = SamplingParams(max_new_tokens=PASSES)
        for _ in range(settings.rounds + 1):
            floors.append(_timed_sweeps(streamer))
            started = time.perf_counter()
            output = llm.generate([PROMPT], params)[0]
            passes.append((time.perf_counter() - started) / output.stats.n_passes)
            busy.append(output.stats.link_busy)
        moved = plan.streamed_nbytes
        n_resident = plan.tiers.count("device")
        n_streamed = plan.tiers.count("disk")
    floors, passes, busy = floors[1:], passes[1:], busy[1:]  # the first round warms up
    ratio = Spread.of([one / floor for one, floor in zip(passes, floors, strict=True)])
    floor = Spread.of(floors)
    print(
        f"\n## A pass of one token: {moved / 1e9:.2f} GB from the disk, {n_streamed} layers;"
        f" {n_resident} resident"
    )
    print(
        f"floor, the same reads and nothing else   {floor} s, {moved / floor.median / 1e9:.2f} GB/s"
    )
    print(
        f"pass                                     {Spread.of(passes)} s, link busy"
        f" {Spread.of(busy).median:.1%}"
    )
    print(f"pass / floor, pair by pair               {ratio}")
    return {
        "moved_bytes": moved,
        "floor_s": asdict(floor),
        "pass_s": asdict(Spread.of(passes)),
        "pass_over_floor": asdict(ratio),
    }


def _timed_sweeps(streamer: Streamer) -> float:
    started = time.perf_counter()
    for _ in range(PASSES):
        with closing(streamer.sweep()) as sweep:
            for _ in sweep:
                pass
    return (time.perf_counter() - started) / PASSES


def peak_memory(settings: Settings) -> dict[str, object]:
    """Peak resident memory of runs on the command line, beyond what importing takes; those with
    trees run twice.

    The first run of a machine compiles the kernels of verification, which takes more.
    """
    imports = run_json(["-c", IMPORTS]).peak_rss
    flags = [
        "--model",
        str(settings.model),
        "--device-memory",
        str(settings.budget),
        "--prompt",
        "def main():",
        "--json",
    ]
    trees = ["--draft-model", DRAFT, "--max-new-tokens", "32"]
    runs = {
        "plain": ["--drafter", "none", "--max-new-tokens", "3"],
        "trees, T = 0": trees,
        "trees, T = 0.6": [*trees, "--temperature", "0.6", "--seed", "1"],
    }
    print("\n## Peak resident memory of the process")
    print(
        f"importing torch and transformers  {format_size(imports)}; budget"
        f" {format_size(settings.budget)}"
    )
    beyond = {}
    for name, more in runs.items():
        peaks = [
            run_json(["-m", "offload_rt.run", *flags, *more]).peak_rss - imports for _ in range(2)
        ]
        beyond[name] = peaks
        over = (peaks[-1] - settings.budget) / 2**20
        print(
            f"{name:32}  {', '.join(map(format_size, peaks))} beyond that: {over:+.0f} MiB of the"
            " budget"
        )
    return {
        "imports_bytes": imports,
        "beyond_imports_bytes": beyond,
        "budget_bytes": settings.budget,
    }


def against_accelerate(settings: Settings) -> dict[str, object] | None:
    """Seconds per token after the first, both cold, in turn."""
    if find_spec("accelerate") is None:
        print('\n## Accelerate is not installed: pip install -e ".[compare]"')
        return None
    with LLM(str(settings.model), device_memory=settings.budget, drafter="none") as llm:
        n_resident = llm.plan.tiers.count("device")
        max_len = llm.max_model_len
    seconds = {_OURS: [], _THEIRS: []}
    answers = {_OURS: [], _THEIRS: []}
    with TemporaryDirectory() as scratch:
        job = Job(
            settings.model,
            settings.model,
            settings.model,
            settings.budget,
            n_resident,
            max_len,
            Path(scratch),
        )
        for _ in range(max(settings.rounds // 3, 2)):
            for name in seconds:
                drop_from_page_cache(settings.model)
                answer = run_peer(name, job, [PROMPT], PROMPT, settings.tokens).report.answers[0]
                seconds[name] += [
                    after - before for (before, _), (after, _) in pairwise(answer.arrivals)
                ]
                answers[name].append(answer.token_ids)
    ours, theirs = (Spread.of(seconds[name]) for name in (_OURS, _THEIRS))
    same = answers[_OURS] == answers[_THEIRS]
    print(f"\n## Seconds per token, cold, {n_resident} layers resident in both")
    print(f"offload_rt               {ours}")
    print(f"Accelerate disk offload  {theirs}")
    ratio = theirs.median / ours.median
    print(
        f"ratio of medians {ratio:.2f}; the same tokens:"
        f" {'yes' if same else 'no (bf16, sums in another order)'}"
    )
    return {
        "offload_rt_s": asdict(ours),
        "accelerate_s": asdict(theirs),
        "ratio": ratio,
        "same_tokens": same,
    }


def paced_overlap(settings: Settings) -> dict[str, object]:
    """A pass whose compute and link take equally long, over a link of a set speed."""
    n_layers = 8
    n_rows = 384
    # all resident: the source of the paced link, and the compute to be hidden
    with LLM(str(settings.model)) as llm:
        spec = llm.engine.runner.spec
        runner = llm.engine.runner
        source = resident_layers(llm)
        moved = sum(source.layout(i).nbytes for i in range(n_layers))
        resident = Passes(runner, LayerSources(source, (None,) * n_layers, 0), n_rows)
        compute = Spread.of([resident.seconds() for _ in range(5)][1:]).median
        tier = PacedTier(source, moved / compute / 1e9)
        both = Passes(runner, LayerSources(MemoryTier(), (tier,) * n_layers, 3), n_rows)
        link_only = ThreadStreamer(
            LayerSources(MemoryTier(), (tier,) * n_layers, 3), Trace(on=False)
        )
        ratios = []
        for _ in range(settings.rounds):
            longer = max(_timed_sweeps(link_only), resident.seconds())
            ratios.append(both.seconds() / longer)
        link_only.close()
        resident.close()
        both.close()
    gbps = moved / compute / 1e9
    print(
        f"\n## Overlap: {spec.hidden_size} wide, {n_layers} layers, {n_rows} tokens a pass, link"
        f" paced to {gbps:.2f} GB/s"
    )
    print(f"pass / the longer of link and compute  {Spread.of(ratios)}")
    return {"compute_s": compute, "link_gbps": gbps, "pass_over_longer": asdict(Spread.of(ratios))}


class Passes:
    """Passes of a fixed number of tokens over some layers."""

    def __init__(self, like: Runner, sources: LayerSources, n_rows: int) -> None:
        self._streamer = ThreadStreamer(sources, Trace(on=False))
        place = like.device, like.dtype
        self._runner = Runner(
            like.spec, self._streamer, like.non_layer, like.format, *place, Trace(on=False)
        )
        self._n_rows = n_rows

    def seconds(self) -> float:
        """Mean time of a pass."""
        tokens = torch.arange(self._n_rows) % self._runner.spec.vocab_size
        started = time.perf_counter()
        for _ in range(PASSES):
            cache = self._runner.new_cache(self._n_rows)
            self._runner.forward(
                [Step(cache, tokens, Topology.chain(self._n_rows), 1, self._n_rows)]
            )
            self._runner.free_cache(cache)
        return (time.perf_counter() - started) / PASSES

    def close(self) -> None:
        """Join the threads."""
        self._streamer.close()


def first_token() -> dict[str, object]:
    """From the start of a process to the first token of a small resident model, beyond its
    imports.
    """
    imports = []
    runs = []
    for _ in range(5):
        imports.append(run_json(["-c", IMPORTS]).seconds)
        flags = [
            "--model",
            "models/demo-target",
            "--prompt",
            "import",
            "--max-new-tokens",
            "1",
            "--json",
        ]
        runs.append(run_json(["-m", "offload_rt.run", *flags]).seconds)
    beyond = Spread.of([run - base for run, base in zip(runs, imports, strict=True)])
    print("\n## Start to first token, small resident model")
    print(f"imports {Spread.of(imports)} s; beyond imports {beyond} s")
    return {"imports_s": asdict(Spread.of(imports)), "beyond_imports_s": asdict(beyond)}


def main() -> None:
    """Run the sections and print one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, help="a checkpoint; default: the demo target expanded to --size"
    )
    parser.add_argument("--size", default="3GB")
    parser.add_argument("--budget", type=parse_size, help="default: a quarter of the weights")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=6, help="for each process of the comparison")
    parser.add_argument(
        "--sections", default="pass,memory,accelerate,paced,first", help="some of these"
    )
    flags = parser.parse_args()
    model = flags.model or expanded_model(flags.size)
    nbytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    settings = Settings(model, flags.budget or nbytes // 4, flags.rounds, flags.tokens)
    print(
        f"{machine()}\n{model.name}: {format_size(nbytes)}, budget {format_size(settings.budget)};"
        f" commit {commit()}"
    )
    results: dict[str, object] = {"model_bytes": nbytes, "budget_bytes": settings.budget}
    sections = {
        "pass": lambda: pass_against_floor(settings),
        "memory": lambda: peak_memory(settings),
        "accelerate": lambda: against_accelerate(settings),
        "paced": lambda: paced_overlap(settings),
        "first": first_token,
    }
    for name in flags.sections.split(","):
        if name not in sections:
            sys.exit(f"no section {name!r}; there are {', '.join(sections)}")
        results[name] = sections[name]()
    print_result("stream", flags, **results)


if __name__ == "__main__":
    main()
