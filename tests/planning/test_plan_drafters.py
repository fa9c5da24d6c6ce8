"""Published drafters in plans: sizes, fitted acceptance, and their order."""

import json
from functools import cache

import numpy as np
import pytest

from offload_rt.cli import plan
from offload_rt.config import EngineConfig
from offload_rt.dtypes import DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.models.families import parse_architecture
from offload_rt.planning.acceptance import Assumed, power_law
from offload_rt.planning.drafters import compare, fitted_power, published
from offload_rt.planning.forecast import Machine, PlanRequest
from offload_rt.planning.hardware import find_card
from offload_rt.planning.known_models import KNOWN
from offload_rt.tree.search import expected_tokens, search

TARGETS = ("llama3.3-70b", "qwen3-32b", "qwen3.5-27b", "gpt-oss-120b")


@cache
def target_of(name: str) -> Sizes:
    return Sizes.of_spec(parse_architecture(dict(KNOWN[name])), DType.BFLOAT16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name", "gib"),
    [
        ("qwen3.5-27b", "z-lab/Qwen3.5-27B-DFlash", 3.96),
        ("gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash", 1.46),
        ("gpt-oss-120b", "gpt-oss-20b", 12.82),
    ],
)
def test_sizes_equal_the_published_files(target, name, gib):
    entry = next(entry for entry in published(target) if entry.name == name)
    sizes = entry.sizes(target_of(target))
    assert sizes is not None and sizes.nbytes / 2**30 == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize("target", TARGETS)
def test_fitted_acceptance_reaches_the_published_tokens(target):
    figures = [figure for entry in published(target) for figure in entry.figures]
    assert figures and all(figure["source"] for figure in figures)
    for figure in (figure for figure in figures if "preset" not in figure):
        sizes = figure["tokens_per_pass"], figure["n_nodes"], figure["n_levels"]
        law = power_law(fitted_power(*sizes))
        if figure["n_nodes"] == figure["n_levels"]:
            tokens = float((law[0] ** np.arange(figure["n_levels"])).sum())
        else:
            topology = search(law, *sizes[1:]).topology(*sizes[1:])
            tokens = expected_tokens(topology, law)
        assert tokens == pytest.approx(figure["tokens_per_pass"], abs=1e-3)


def test_drafters_are_ranked_with_their_sources(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine.with_card(find_card("rtx4090"), 192 << 30, 7.0)
    for target in ("qwen3-32b", "qwen3.5-27b"):
        config = EngineConfig(target, drafter="none")
        nothing = Assumed(power_law(1.0), "")
        request = PlanRequest(config, (target_of(target), None), nothing, 128, 128)
        choices = compare(request, machine, 0.0)
        names = {choice.drafter for choice in choices}
        assert {"none", "recycle", "self", "adaptive_tree", "mtp"} & names
        assert all(choice.source for choice in choices)
        forecasts = [choice.forecast for choice in choices if choice.forecast]
        seconds = [forecast.run.seconds_per_token for forecast in forecasts]
        assert seconds == sorted(seconds) and len(seconds) > 1
        for choice, entry in ((a, b) for a in choices for b in published(target)):
            if choice.name == entry.name and choice.forecast:
                deepest = max(figure["n_levels"] for figure in entry.figures)
                is_head = bool(choice.forecast.request.models[1].spec.taps)
                assert choice.forecast.topology.n_levels <= deepest or not is_head
            if choice.name == entry.name and not entry.figures:
                assert choice.forecast is None and "no published acceptance" in choice.source


@pytest.mark.slow
def test_plan_prints_the_comparison(capsys):
    flags = ["qwen3-32b", "--gpu", "rtx4090", "--compare-drafters"]
    assert plan.main(flags) == 0
    text = capsys.readouterr().out
    assert "forecast by drafter" in text and "github.com/Tencent/AngelSlim" in text
    assert plan.main([*flags, "--json"]) == 0
    drafters = json.loads(capsys.readouterr().out)["drafters"]
    assert {"eagle", "recycle"} <= {row["drafter"] for row in drafters}
    forecasts = [row for row in drafters if "predicted_tokens_per_second" in row]
    fastest = max(forecasts, key=lambda row: row["predicted_tokens_per_second"])
    verdict = text.splitlines()[-1]
    assert f"; with {fastest['drafter']}" in verdict
    assert f"{fastest['predicted_tokens_per_second']:.2f} tokens/s" in verdict
