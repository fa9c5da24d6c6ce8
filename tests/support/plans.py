"""Configs, requests and printed plans for tests of planning."""

import json
from typing import Any

import pytest

from offload_rt.cli import plan
from offload_rt.config import EngineConfig
from offload_rt.dtypes import DType
from offload_rt.engine.model_sizes import Sizes
from offload_rt.models.families import parse_architecture
from offload_rt.planning.acceptance import assume
from offload_rt.planning.forecast import PlanRequest
from offload_rt.planning.known_models import KNOWN


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert plan.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def known_sizes(name: str) -> Sizes:
    return Sizes.of_spec(parse_architecture(KNOWN[name]), DType.BFLOAT16)


def request(
    target: Sizes, draft: Sizes | None = None, names: tuple[str, str] = ("m", ""), **settings: Any
) -> PlanRequest:
    settings = {"drafter": "static_tree" if draft else "none", "draft_quantize": "none"} | settings
    config = EngineConfig(names[0], names[1] or None, **settings)
    return PlanRequest(config, (target, draft), assume("auto", ("", ""), names, 0.0), 128, 16)


def known_request(
    target: str = "llama2-70b", draft: str | None = "llama2-7b", **settings: Any
) -> PlanRequest:
    models = known_sizes(target), known_sizes(draft) if draft else None
    return request(*models, (target, draft or ""), **settings)
