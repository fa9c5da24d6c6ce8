"""How close are forecasts and estimates to a run, for SmolLM2-135M-Instruct?

    python -m bench.compare.estimates [--models file dense streamed] [--tokens 96]

A model runs as a GGUF file, in bfloat16, and expanded and streamed; plainly, without a draft
model, and with its draft head. Each ratio is an estimate over a measurement of the same process:

    plain     the report's time of a plain pass / passes of `--baseline`
    token     seconds per token, predicted before each pass / measured
    plan      seconds per token of `offload-rt plan --gpu this` / measured
    doctor    the same by the rates of `offload-rt doctor`, which reads no weights
"""

from dataclasses import replace
from statistics import median

from bench.common.checkpoints import REAL, REAL_FILE, REAL_HEAD, expanded_model
from bench.common.measure import Benchmark
from bench.common.prompts import chat_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.cli.format import plain_seconds
from offload_rt.cli.plan_request import of_run, request_of, without_weights
from offload_rt.cli.plan_settings import PlanSettings
from offload_rt.config import EngineConfig
from offload_rt.planning.forecast import predict
from offload_rt.system.disk_rate import measure_disk_gbps
from offload_rt.system.files import cache_directory

MODELS = ("file", "dense", "streamed")
DRAFTING = {
    "none": {"drafter": "none"},
    "recycle": {"drafter": "recycle"},
    "EAGLE-3": {"draft_model": str(REAL_HEAD)},
}
_MAX_LEN = 512


def config_of(name: str, drafting: dict[str, str], size: str, budget: str) -> EngineConfig:
    """Return the settings of a model and a drafter; only the streamed model has a budget."""
    path = {"file": REAL_FILE, "dense": REAL}.get(name)
    memory = None if path else budget
    path = path or expanded_model(size, REAL, keep_width=True)
    return EngineConfig(str(path), device_memory=memory, max_model_len=_MAX_LEN, **drafting)


def ratios(
    llm: LLM, config: EngineConfig, n_tokens: int, disk: str
) -> tuple[dict[str, float | None], float]:
    """Answer a question; return estimates over measurements, and the measured tokens/s."""
    passes = {}
    params = SamplingParams(max_tokens=n_tokens, temperature=0.0)
    (prompt,) = chat_prompts(llm.tokenizer, 1)
    for piece in llm.stream(prompt, params):
        passes[piece.verified_in.times.started] = piece.verified_in.times, len(piece.token_ids)
        output = piece.output
    context = len(prompt)
    llm.engine.drafter.save()  # forecasts know the acceptance of earlier runs
    baseline = median(llm.time_plain(context))
    measured = output.stats.measured_seconds_per_token
    plain = plain_seconds(list(passes.values()))
    settings = PlanSettings(context=context, max_new_tokens=n_tokens, disk=disk)
    machine = without_weights(replace(settings, disk_source="disk: measured"), config)
    doctor = predict(request_of(settings, config, machine), machine)
    run = of_run(replace(settings, disk=None), config)
    return {
        "plain": plain and plain / baseline,
        "token": output.stats.predicted_seconds_per_token / measured,
        "plan": run.run.seconds_per_token / measured,
        "doctor": doctor.run.seconds_per_token / measured,
    }, 1 / measured


def main() -> None:
    """Print a line per model and drafter, and the JSON line."""
    benchmark = Benchmark("estimates", __doc__)
    benchmark.add("--models", nargs="+", choices=MODELS, default=MODELS)
    benchmark.add("--drafting", nargs="+", choices=DRAFTING, default=list(DRAFTING))
    benchmark.add("--tokens", type=int, default=96)
    benchmark.add("--size", default="1600MB", help="of the streamed model")
    benchmark.add("--budget", default="600MB", help="of the streamed model")
    flags = benchmark.start()
    results = {}
    print(f"\n| model, drafter | plain | token | plan | doctor | tokens/s |\n{'|---' * 6}|")
    for model in flags.models:
        for drafting in flags.drafting:
            config = config_of(model, DRAFTING[drafting], flags.size, flags.budget)
            with LLM.open(config) as llm:
                llm.load()
                disk = f"{measure_disk_gbps(cache_directory()) or 1.0}GB/s"
                entry, rate = ratios(llm, config, flags.tokens, disk)
            results[f"{model}, {drafting}"] = {**entry, "tokens_per_second": rate}
            cells = ["-" if value is None else f"{value:.2f}" for value in entry.values()]
            print(f"| {model}, {drafting} | {' | '.join(cells)} | {rate:.3g} |", flush=True)
    benchmark.finish(results=results)


if __name__ == "__main__":
    main()
