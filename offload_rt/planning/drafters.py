"""Drafters that are published for a target: their shapes, acceptance and forecasts."""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offload_rt.config import EngineConfig
from offload_rt.engine.model_sizes import Sizes
from offload_rt.models.architecture import Architecture
from offload_rt.models.head_configs import parse_head
from offload_rt.planning.acceptance import (
    PRESETS,
    RECYCLE,
    SELF,
    Assumed,
    Preset,
    assume,
    power_law,
)
from offload_rt.planning.forecast import Forecast, PlanRequest, predict_if_it_fits, without_draft
from offload_rt.planning.known_models import KNOWN, known_name
from offload_rt.planning.machine import Machine
from offload_rt.planning.sizes import copies, is_plain, sizes_of
from offload_rt.tree.search import expected_tokens, search
from offload_rt.tree.topology import Topology

_FILE = Path(__file__).with_name("drafters.json")
_ARCHITECTURES = {"eagle": "LlamaForCausalLMEagle3", "block": "DFlashDraftModel"}
_NO_FIGURE = "no published acceptance for this target"
_NO_SHAPE = "no published shape"
_FIGURE_KEYS = ("tokens_per_pass", "n_nodes", "n_levels")
# Halvings of the interval of exponents: to four digits.
_N_HALVINGS = 20


@dataclass(frozen=True)
class RankedDrafter:
    """A drafter for a target.

    name      checkpoint of the drafter; empty if it needs none
    nbytes    weight bytes of the drafter in the compute dtype; 0 if unknown
    forecast  None without published acceptance or shape, or if the models do not fit
    source    source of the acceptance, or the reason for a missing forecast
    """

    drafter: str
    name: str
    nbytes: int
    forecast: Forecast | None
    source: str

    @property
    def title(self) -> str:
        """The drafter and its checkpoint."""
        return f"{self.drafter} {self.name}".strip()


@dataclass(frozen=True)
class PublishedDrafter:
    """A drafter of `drafters.json`.

    shape    keys of config.json beyond those of the target; empty if unknown
    figures  published tokens per pass by keys of `Preset`, or the name of a preset
    """

    target: str
    drafter: str
    name: str
    shape: dict[str, Any] = field(default_factory=dict)
    figures: tuple[dict[str, Any], ...] = ()

    def sizes(self, target: Sizes) -> Sizes | None:
        """Return the sizes of the drafter; None without a published shape."""
        if self.name in KNOWN:
            return sizes_of(self.name, None, EngineConfig(self.name))
        if self.drafter == "mtp":
            head = parse_head(None, target.spec)
        else:
            head = parse_head(self._config(target.spec), target.spec) if self.shape else None
        return None if head is None else Sizes.of_spec(head, target.dtype)

    def figure(self, temperature: float) -> dict[str, Any] | None:
        """Return the figure at the nearest temperature; None without figures."""
        return min(
            self.figures, default=None, key=lambda figure: abs(figure["temperature"] - temperature)
        )

    def acceptance(self, temperature: float) -> Assumed | None:
        """Return the published acceptance at the nearest temperature; None without."""
        nearest = self.figure(temperature)
        if nearest is None:
            return None
        if "preset" in nearest:
            preset = next(preset for preset in PRESETS if preset.name == nearest["preset"])
            preset = replace(preset, source=f"{preset.source}, {nearest['source']}")
        else:
            power = fitted_power(*(nearest[key] for key in _FIGURE_KEYS))
            pair = (self.target, self.name)
            preset = Preset(self.name, pair, power=round(power, 3), is_static=False, **nearest)
            if nearest["n_nodes"] == nearest["n_levels"]:
                return preset.assumed.extrapolated()
        is_at_zero = temperature == nearest["temperature"] == 0
        return preset.assumed.with_dynamic_trees() if is_at_zero else preset.assumed

    def _config(self, target: Architecture) -> dict[str, Any]:
        shape = dict(self.shape)
        raw: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.drafter]],
            "model_type": "qwen3" if self.drafter == "block" else "llama",
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "max_position_embeddings": target.max_positions,
            "rms_norm_eps": 1e-6,
        }
        if self.drafter == "block":
            taps = shape.pop("target_layer_ids")
            raw["dflash_config"] = {"mask_token_id": 0, "target_layer_ids": taps}
        return raw | shape


def fitted_power(tokens_per_pass: float, n_nodes: int, n_levels: int) -> float:
    """Return the exponent b with which the best tree (or a chain) reaches the published tokens."""
    low, high = 0.01, 20.0
    for _ in range(_N_HALVINGS):
        middle = (low + high) / 2
        law = power_law(middle)
        if n_nodes == n_levels:
            tokens = expected_tokens(Topology.chain(n_nodes), law)
        else:
            tokens = float(search(law, n_nodes, n_levels).values[n_nodes, n_levels])
        low, high = (middle, high) if tokens < tokens_per_pass else (low, middle)
    return (low + high) / 2


def published(target: str) -> list[PublishedDrafter]:
    """Return the published drafters of a target, a built-in name or hub id."""
    name = known_name(target) or target.lower()
    entries = json.loads(_FILE.read_text(encoding="utf-8"))
    return [PublishedDrafter(**entry) for entry in entries if entry["target"] == name]


def compare(
    request: PlanRequest, machine: Machine, temperature: float
) -> tuple[RankedDrafter, ...]:
    """Predict all drafters, fastest first; without a draft model, by published or related ones."""
    plain = without_draft(request)
    target, draft = request.models
    name = known_name(plain.config.model) or plain.config.model.lower()
    recycle, own = (assume("auto", ("", ""), (name, kind), temperature) for kind in (RECYCLE, SELF))
    choices = [
        RankedDrafter("none", "", 0, predict_if_it_fits(plain, machine), "plain decoding"),
        _choice(plain, machine, (RECYCLE, ""), None, recycle),
    ]
    if target.spec.supports_self_draft and is_plain(target):
        choices.append(_choice(plain, machine, (SELF, ""), copies(target), own))
    else:
        reason = "needs unquantised weights of a native family"
        choices.append(RankedDrafter(SELF, "", 0, None, reason))
    for entry in published(request.config.model):
        acceptance = entry.acceptance(temperature)
        sizes = entry.sizes(target)
        nbytes = 0 if sizes is None else sizes.nbytes
        reason = _NO_FIGURE if acceptance is None else f"{acceptance.source}; {_NO_SHAPE}"
        if acceptance is None or sizes is None:
            choices.append(RankedDrafter(entry.drafter, entry.name, nbytes, None, reason))
            continue
        names = (entry.drafter, entry.name)
        figure = entry.figure(temperature)
        # Publications say nothing about heads beyond the depth of their trees.
        depth = figure["n_levels"] if figure and sizes.spec.taps else None
        choices.append(_choice(plain, machine, names, sizes, acceptance, depth))
    if draft is not None and not draft.stand_in and not draft.spec.taps:
        names = (request.config.drafter, request.config.draft_model or "")
        choices.append(_choice(plain, machine, names, draft, request.acceptance))
    return tuple(sorted(choices, key=_seconds))


def _choice(
    plain: PlanRequest,
    machine: Machine,
    names: tuple[str, str],
    sizes: Sizes | None,
    acceptance: Assumed,
    depth: int | None = None,
) -> RankedDrafter:
    """Predict a drafter and its checkpoint; None for absent weights and the default depth."""
    drafter, name = names
    draft_model = None if drafter in ("mtp", SELF, RECYCLE) else name
    config = replace(plain.config, drafter=drafter, draft_model=draft_model)
    models = (plain.models[0], sizes)
    request = replace(plain, config=config, models=models, acceptance=acceptance, most_levels=depth)
    forecast = predict_if_it_fits(request, machine)
    source = acceptance.source if forecast else f"does not fit; {acceptance.source}"
    return RankedDrafter(drafter, name, 0 if sizes is None else sizes.nbytes, forecast, source)


def _seconds(choice: RankedDrafter) -> float:
    return choice.forecast.run.seconds_per_token if choice.forecast else math.inf
