"""What does tracing cost?

    python -m bench.trace [--size 2100MB] [--rounds 9]

One loaded model generates the same greedy text with tracing on and off in turn: resident, where
nothing hides the cost, and streamed in a quarter of its size. The ratio is taken pair by pair. The
spans of a pass times the duration of one, as a share of the pass, is free of the disk's noise. The
last line is one JSON object.
"""

import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer

from bench.measure import Spread, commit, expanded_model, flag_parser, machine, print_result
from bench.methods import DRAFT, TARGET
from bench.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.cli import report
from offload_rt.config import EngineConfig, parse_size
from offload_rt.system.trace import COMPUTE, Trace

# A resident pass takes a hundredth of a streamed one: more of them are timed.
_RESIDENT_ROUNDS = 5


def cost(config: EngineConfig, prompt: list[int], n_new: int, rounds: int) -> dict[str, object]:
    """Seconds of a pass with and without tracing, their ratio pair by pair, spans of a pass, and
    their share of it.
    """
    trace = Trace(on=True)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with LLM.from_config(config, trace) as llm:
        params = SamplingParams(max_new_tokens=n_new)
        n_passes = llm.generate([prompt], params)[0].stats.n_passes  # warms up
        for i in range(rounds):
            for on in (True, False) if i % 2 else (False, True):
                trace.on = on
                started = time.perf_counter()
                passes = llm.generate([prompt], params)[0].stats.n_passes
                seconds[on].append((time.perf_counter() - started) / passes)
                n_passes += passes * on
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.write(path)
        n_spans = len(report.read(path)) / n_passes
    pairs = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    on = Spread.of(seconds[True])
    off = Spread.of(seconds[False])
    times = {"with_s": asdict(on), "without_s": asdict(off), "pairs": asdict(Spread.of(pairs))}
    return times | {"spans_per_pass": n_spans, "share": n_spans * span_s() / off.median}


def span_s(n: int = 4_000, n_times: int = 9) -> float:
    """Seconds of one span: the median of `n_times` measurements of `n` spans."""
    trace = Trace()
    moments = [time.perf_counter()]
    for _ in range(n_times):
        for i in range(n):
            with trace.span(COMPUTE, f"layer {i}"):
                pass
        moments.append(time.perf_counter())
    return median(after - before for before, after in pairwise(moments)) / n


def main() -> None:
    """Print a line for each and one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--size", default="2100MB")
    parser.add_argument("--rounds", type=int, default=9)
    flags = parser.parse_args()
    print(f"{machine()}; commit {commit()}")
    prompt = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), 1)[0]
    streamed = str(expanded_model(flags.size))
    cases = {
        "resident, plain": (EngineConfig(TARGET, max_model_len=512, drafter="none"), 64),
        "resident, drafted": (EngineConfig(TARGET, draft_model=DRAFT, max_model_len=512), 64),
        "streamed, plain": (_within(streamed, flags.size, None), 4),
        "streamed, drafted": (_within(streamed, flags.size, DRAFT), 24),
    }
    found = {}
    for name, (config, n_new) in cases.items():
        rounds = flags.rounds * (_RESIDENT_ROUNDS if "resident" in name else 1)
        found[name] = one = cost(config, prompt, n_new, rounds)
        print(
            f"{name:18} a pass takes {one['without_s']['median']:.4f} s, with tracing"
            f" {one['with_s']['median']:.4f} s: ratio {Spread(**one['pairs'])};"
            f" {one['spans_per_pass']:.0f} spans a pass, {one['share']:.2%} of it",
            flush=True,
        )
    print_result("trace", flags, cases=found)


def _within(model: str, size: str, draft: str | None) -> EngineConfig:
    budget = parse_size(size) // 4
    drafter = "auto" if draft else "none"
    return EngineConfig(
        model, draft_model=draft, device_memory=budget, max_model_len=256, drafter=drafter
    )


if __name__ == "__main__":
    main()
