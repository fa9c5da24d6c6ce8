"""How a forecast changes with one thing: the machine's memory, the card's, or the context."""

from dataclasses import dataclass, replace

import numpy as np

from offload_rt.engine.memory_plan import reserved_memory
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.offload.placement import least_budget
from offload_rt.planning.forecast import Forecast, Machine, PlanRequest, predict

_N_POINTS = 12
_WHAT = {
    "ram": "GiB of memory for weights beside the card",
    "memory": "GiB of memory on the device",
    "context": "tokens of context",
}


@dataclass(frozen=True)
class Sweep:
    """A curve: what x is, and for each x, ascending, what would happen; None where the model does not fit."""

    what: str
    points: tuple[tuple[float, Forecast | None], ...]


def sweep(over: str, request: PlanRequest, machine: Machine) -> Sweep:
    """Predict along "ram", "memory" or "context". Raises SettingsError for "ram" where there is no card beside it."""
    if over == "ram" and not machine.budget.has_card:
        need = "a card beside that memory"
        raise SettingsError("--sweep ram", need=need, have=machine.title, change="use --sweep memory")
    return Sweep(_WHAT[over], tuple((x, _at(over, x, request, machine)) for x in _range(over, request)))


def _range(over: str, request: PlanRequest) -> list[float]:
    """From where it begins to fit, or from nothing, to a little more than is of use."""
    target, draft = request.models
    if over == "context":
        limit = target.spec.max_positions - request.tokens
        return [float(n) for n in 2 ** np.arange(6, 24) if n < limit] + [float(limit)]
    most = sum(target.layer_nbytes)
    if over == "ram":
        found = np.linspace(0, 1.2 * most, _N_POINTS)
    else:
        context = request.config.max_model_len or request.context + request.tokens
        fixed = reserved_memory(target, draft, target.dtype, context, request.config.tree_size or 8)
        found = np.linspace(1.02 * least_budget(target.layer_nbytes, fixed), 1.1 * (fixed.total + most), _N_POINTS)
    return [float(x) for x in found / 2**30]


def _at(over: str, x: float, request: PlanRequest, machine: Machine) -> Forecast | None:
    if over == "context":
        config = replace(request.config, max_model_len=int(x) + request.tokens)
        request = replace(request, config=config, context=int(x))
    elif over == "ram":
        machine = replace(machine, budget=replace(machine.budget, host=int(x * 2**30)))
    else:
        machine = replace(machine, budget=replace(machine.budget, device=int(x * 2**30)))
    try:
        return predict(request, machine)
    except CapacityError:
        return None
