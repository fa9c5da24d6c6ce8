"""JSON output of `offload-rt plan`."""

import json
from dataclasses import asdict
from typing import Any

from offload_rt.planning.alternatives import Alternatives
from offload_rt.planning.forecast import Forecast


def show(forecast: Forecast, others: Alternatives) -> None:
    """Print a forecast with its alternatives as one JSON object."""
    print(json.dumps(_as_json(forecast, others), default=str))  # dtypes


def _as_json(forecast: Forecast, others: Alternatives) -> dict[str, Any]:
    request = forecast.request
    machine = forecast.machine
    fitted = forecast.memory_plan
    curve = others.sweep
    return {
        "model": request.config.model,
        "draft_model": request.config.draft_model,
        "draft_quantize": request.models[1].rounding if request.models[1] else None,
        "machine": machine.title,
        "links": dict(machine.links),
        "sources": machine.sources,
        "acceptance": {
            "by_rank": request.acceptance.by_rank.tolist(),
            "source": forecast.acceptance_source,
        },
        "plan": asdict(fitted.plan),
        "max_model_len": fitted.max_model_len,
        "max_tree_nodes": fitted.limits.n_nodes,
        **_figures(forecast),
        "predicted_plain_seconds_per_token": forecast.plain.seconds_per_token,
        "formats": {
            name: {drafter: _figures(variant) for drafter, variant in row.items()}
            for name, row in others.formats.items()
        },
        "ranks": asdict(machine.ranks),
        "mode": forecast.mode,
        "experts": {name: _figures(way) for name, way in others.experts.items()},
        "drafters": [
            {
                "drafter": choice.drafter,
                "name": choice.name,
                "nbytes": choice.nbytes,
                "source": choice.source,
                **_figures(choice.forecast),
            }
            for choice in others.drafters
        ],
        "sweep": (
            curve
            and {
                "over": curve.over,
                "points": [{"x": x, **_figures(point)} for x, point in curve.points],
            }
        ),
    }


def _figures(forecast: Forecast | None) -> dict[str, Any]:
    if forecast is None:
        return {}
    return {
        "predicted_tokens_per_second": 1 / forecast.run.seconds_per_token,
        "predicted_seconds_per_token": forecast.run.seconds_per_token,
        "verdict": forecast.verdict,
        "tokens_per_pass": forecast.run.tokens_per_pass,
        "tree_nodes": len(forecast.topology),
        "tree_levels": forecast.topology.n_levels,
        "pass_seconds": forecast.run.pass_s,
        "draft_seconds": forecast.draft_s,
        "compute_seconds": forecast.compute_s,
        "exchange_seconds": forecast.exchange_s,
        "link_bytes": forecast.moved,
        "link_seconds": forecast.link_s,
        "link_busy": forecast.busy,
        "pass_over_link": {name: 1 / share for name, share in forecast.busy.items()},
        "draft_level": forecast.level and forecast.level._asdict(),
        "bound": forecast.bound,
    }
