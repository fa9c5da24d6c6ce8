"""Forecasts beside the one of a plan: weight formats, drafters, experts, memory sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from offload_rt.config import format_size
from offload_rt.dtypes import DType
from offload_rt.engine.memory_plan import less_margin, reserved_memory
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.offload.placement import least_budget
from offload_rt.planning.acceptance import SELF, Assumed
from offload_rt.planning.forecast import (
    ON_CPU,
    ON_DEMAND,
    WHOLE_LAYERS,
    Forecast,
    PlanRequest,
    predict,
    predict_if_it_fits,
    without_draft,
)
from offload_rt.planning.machine import Machine
from offload_rt.planning.sizes import copies, formats, is_plain

if TYPE_CHECKING:
    from offload_rt.planning.drafters import RankedDrafter

# Number of points of a curve over device memory; first point of a curve over host memory.
_N_POINTS = 12
_FIRST_RAM = 16 << 30
# Tokens below which a context is called short.
_SHORT_CONTEXT = 2048


@dataclass(frozen=True)
class Sweep:
    """A curve of forecasts by ascending x, called `over`; None where the model does not fit."""

    over: str
    points: tuple[tuple[float, Forecast | None], ...]


@dataclass(frozen=True)
class Alternatives:
    """Forecasts beside the one of the plan; None for what does not fit.

    formats  by weight format and drafter, the format of the plan and "none" first
    places   by placement of the draft model, fastest first
    """

    formats: Mapping[str, Mapping[str, Forecast | None]]
    experts: Mapping[str, Forecast | None]
    sweep: Sweep | None
    places: Mapping[str, Forecast]
    drafters: "tuple[RankedDrafter, ...]" = ()


def expert_ways(forecast: Forecast) -> dict[str, Forecast | None]:
    """Predict plain decoding by layers, by experts, and with the CPU; empty without experts."""
    if forecast.memory_plan.plan.experts is None:
        return {}
    request = without_draft(forecast.request)
    target, _ = request.models
    machine = forecast.machine
    whole = replace(request, models=(replace(target, divided=lambda: None), None))
    ways = {
        WHOLE_LAYERS: predict_if_it_fits(whole, machine),
        ON_DEMAND: predict_if_it_fits(request, replace(machine, ram_gbps=0.0)),
    }
    if forecast.mode == ON_CPU:
        ways[ON_CPU] = predict_if_it_fits(request, machine)
    return ways


def short_context(forecast: Forecast) -> str:
    """Return advice for a short context, with the cost of a longer one; else empty."""
    request = forecast.request
    target = request.models[0]
    required = min(_SHORT_CONTEXT, target.spec.max_positions)
    current = forecast.memory_plan.max_model_len
    if request.config.max_model_len is not None or current >= required:
        return ""
    short = f"the context is short, {current} tokens"
    try:
        config = replace(request.config, max_model_len=required)
        longer = predict(replace(request, config=config), forecast.machine)
    except CapacityError as error:
        return f"{short}; with --max-model-len {required} {error.for_command_line}"
    more = format_size((required - current) * target.spec.kv_nbytes(target.dtype.itemsize))
    seconds = longer.run.seconds_per_token
    return f"{short}: --max-model-len {required} needs {more} more, at {seconds:.3f} s per token"


def sweep(over: str, request: PlanRequest, machine: Machine) -> Sweep:
    """Predict over host memory, "ram", or device memory; SettingsError for "ram" on a CPU."""
    target, draft = request.models
    config = request.config
    budget = machine.budget
    if over == "ram":
        if not budget.has_card:
            change = "use --sweep memory"
            raise SettingsError("--sweep ram", need="a GPU", have=machine.title, change=change)
        unit = "GiB of host memory"
        sizes = [_FIRST_RAM]
        while less_margin(sizes[-1]) < sum((target.link or target).layer_nbytes):
            sizes.append(2 * sizes[-1])
        n_parts = machine.ranks.n_parts
        budgets = [replace(budget, host=less_margin(n) // n_parts) for n in sizes]
    else:
        context = config.max_model_len or request.context + request.tokens
        fixed = reserved_memory(
            target, draft, target.dtype, budget.has_card, context, config.tree_size or 8,
            config.max_num_seqs,
        )  # fmt: skip
        least = least_budget(target.layer_nbytes, fixed)
        resident = fixed.total + sum(target.layer_nbytes)
        unit = "GiB of device memory"
        sizes = np.linspace(1.02 * least, 1.1 * resident, _N_POINTS).tolist()
        budgets = [replace(budget, device=int(nbytes)) for nbytes in sizes]
    forecasts = (predict_if_it_fits(request, replace(machine, budget=point)) for point in budgets)
    return Sweep(unit, tuple(zip((n / 2**30 for n in sizes), forecasts, strict=True)))


def by_format(
    request: PlanRequest, self_acceptance: Assumed, machine: Machine
) -> dict[str, dict[str, Forecast | None]]:
    """Predict other weight formats and drafters, the request's format and "none" first.

    self_acceptance  acceptance of self-drafting, which needs unquantised weights and a native
                     decoder
    Returns forecasts by format and drafter, None if the model does not fit. Empty unless the
    weights have 16 bits.
    """
    target, draft = request.models
    if target.dtype not in (DType.BFLOAT16, DType.FLOAT16) or not is_plain(target):
        return {}
    forecasts: dict[str, dict[str, Forecast | None]] = {}
    for name, sizes in formats(target, machine.budget.has_card).items():
        requests = {"none": without_draft(replace(request, models=(sizes, draft)))}
        if draft is not None and not draft.stand_in:
            requests["draft model"] = replace(request, models=(sizes, draft))
        if is_plain(sizes) and sizes.spec.supports_self_draft:
            config = replace(request.config, drafter=SELF, draft_model=None, draft_quantize="auto")
            drafted = replace(request, config=config, models=(sizes, copies(sizes)))
            requests[SELF] = replace(drafted, acceptance=self_acceptance)
        forecasts[name] = {
            drafter: predict_if_it_fits(variant, machine) for drafter, variant in requests.items()
        }
    return forecasts
