"""Forecasts of well-known models on a machine, each with the fastest draft model."""

from dataclasses import dataclass

from offload_rt.config import EngineConfig
from offload_rt.planning.acceptance import assume
from offload_rt.planning.forecast import Forecast, PlanRequest, predict_if_it_fits
from offload_rt.planning.machine import Machine
from offload_rt.planning.sizes import find_models

# Draft models of the target's tokenizer, by target; mixtures read more experts for more rows.
PAIRS = {
    "qwen3-4b": "qwen3-0.6b",
    "qwen3-8b": "qwen3-0.6b",
    "qwen3-14b": "qwen3-0.6b",
    "qwen3-32b": "qwen3-0.6b",
    "llama3.3-70b": "llama3.2-1b",
    "qwen3-30b-a3b": None,
    "gpt-oss-20b": None,
    "gpt-oss-120b": None,
}
_MAX_LEN = 2048
_TOKENS = 128


@dataclass(frozen=True)
class Prospect:
    """Tokens per second of a model, or None; `draft` is None where plain decoding is faster."""

    model: str
    draft: str | None
    plain: float | None
    rate: float | None
    verdict: str


def survey(machine: Machine) -> list[Prospect]:
    """Predict the models of `PAIRS`; weights as published, 2048 tokens of context."""
    prospects = []
    for model, draft in PAIRS.items():
        drafts = (None, draft) if draft else (None,)
        forecasts = {name: _predict(model, name, machine) for name in drafts}
        rates = {name: 1 / f.run.seconds_per_token for name, f in forecasts.items() if f}
        best = max(rates, key=rates.__getitem__, default=None)
        forecast = forecasts[best]
        verdict = forecast.verdict if forecast else "does not fit"
        prospects.append(Prospect(model, best, rates.get(None), rates.get(best), verdict))
    return prospects


def _predict(model: str, draft: str | None, machine: Machine) -> Forecast | None:
    drafter = "none" if draft is None else "adaptive_tree"
    config = EngineConfig(model, draft, drafter=drafter, max_model_len=_MAX_LEN)
    acceptance = assume("auto", ("", ""), (model, draft or ""), 0.0).with_dynamic_trees()
    request = PlanRequest(config, find_models(config), acceptance, _TOKENS, _TOKENS)
    return predict_if_it_fits(request, machine)
