"""What does tracing cost?

    python -m bench.stream.trace [--size 2100MB] [--rounds 9]

Generate the same greedy text with and without tracing, interleaved: resident, where all overhead is
visible, and streamed in a quarter of its size. Ratios are taken pair by pair. The spans of a pass
times the duration of a span is independent of disk noise.
"""

from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from transformers import AutoTokenizer

from bench.common.checkpoints import DRAFT, TARGET, expanded_model
from bench.common.measure import Benchmark, Spread, interleaved
from bench.common.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.cli import report
from offload_rt.config import EngineConfig, parse_size
from offload_rt.system.trace import COMPUTE, Trace

# A resident pass takes a hundredth of a streamed pass, so measure more of them.
_RESIDENT_ROUNDS = 5


def cost(config: EngineConfig, prompt: list[int], n_new: int, rounds: int) -> dict[str, object]:
    """Measure passes with and without tracing, spans per pass, and their share of its time."""
    trace = Trace(on=True)
    n_traced = 0
    params = SamplingParams(max_new_tokens=n_new)

    def run(llm: LLM, is_on: bool) -> float:
        nonlocal n_traced
        trace.on = is_on
        started = perf_counter()
        n_passes = llm.generate([prompt], params)[0].stats.n_passes
        n_traced += n_passes * is_on
        return (perf_counter() - started) / n_passes

    with LLM.from_config(config, trace) as llm:
        works = {"on": partial(run, llm, True), "off": partial(run, llm, False)}
        seconds = interleaved(works, rounds)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.write(path)
        n_spans = len(report.read(path)) / n_traced
    spreads = {f"{name}_s": Spread.of(times) for name, times in seconds.items()}
    ratio = Spread.of_ratios(seconds["on"], seconds["off"])
    share = n_spans * span_s() / spreads["off_s"].median
    return {**spreads, "ratio": ratio, "spans_per_pass": n_spans, "share": share}


def span_s(n: int = 4_000, n_times: int = 9) -> float:
    """Return the seconds of a span: the median of `n_times` measurements of `n` spans."""
    trace = Trace()
    moments = [perf_counter()]
    for _ in range(n_times):
        for i in range(n):
            with trace.span(COMPUTE, f"layer {i}"):
                pass
        moments.append(perf_counter())
    return median(after - before for before, after in pairwise(moments)) / n


def main() -> None:
    """Measure resident and streamed, plain and drafted decoding."""
    bench = Benchmark("trace", __doc__)
    bench.add("--size", default="2100MB", help="of the streamed model")
    bench.add("--rounds", type=int, default=9)
    flags = bench.start()
    prompt = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), 1)[0]
    streamed = str(expanded_model(flags.size))
    memory = parse_size(flags.size) // 4
    limits = {"device_memory": memory, "max_model_len": 256}
    cases = {
        "resident, plain": (EngineConfig(TARGET, max_model_len=512, drafter="none"), 64),
        "resident, drafted": (EngineConfig(TARGET, draft_model=DRAFT, max_model_len=512), 64),
        "streamed, plain": (EngineConfig(streamed, drafter="none", **limits), 4),
        "streamed, drafted": (EngineConfig(streamed, draft_model=DRAFT, **limits), 24),
    }
    results = {}
    for name, (config, n_new) in cases.items():
        rounds = flags.rounds * (_RESIDENT_ROUNDS if "resident" in name else 1)
        results[name] = result = cost(config, prompt, n_new, rounds)
        print(
            f"{name:18} pass {result['off_s'].median:.4f} s, traced {result['on_s'].median:.4f} s:"
            f" ratio {result['ratio']}; {result['spans_per_pass']:.0f} spans a pass,"
            f" {result['share']:.2%} of it",
            flush=True,
        )
    bench.finish(cases=results)


if __name__ == "__main__":
    main()
