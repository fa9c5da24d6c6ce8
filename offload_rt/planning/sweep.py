"""How a forecast changes with one thing: the machine's memory, the card's, the tree, or the context."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from offload_rt.engine.memory_plan import reserved_memory
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.offload.placement import least_budget
from offload_rt.planning.forecast import Forecast, Machine, PlanRequest, predict

_N_POINTS = 12
_TREES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024)


@dataclass(frozen=True)
class Point:
    """One machine or question of a sweep.

    forecast  None where the model does not fit
    """

    x: float
    forecast: Forecast | None


@dataclass(frozen=True)
class Sweep:
    """A curve: what x is, and its points in ascending order."""

    what: str
    points: tuple[Point, ...]


def sweep(over: str, request: PlanRequest, machine: Machine) -> Sweep:
    """Foretell along "ram", "memory", "tree" or "context". Raises SettingsError for "ram" where there is no card beside it."""
    if over == "ram" and not machine.budget.has_card:
        raise SettingsError(
            "--sweep ram", need="a card beside that memory", have=machine.title, change="use --sweep memory"
        )
    return {"ram": _ram, "memory": _memory, "tree": _tree, "context": _context}[over](request, machine)


def _ram(request: PlanRequest, machine: Machine) -> Sweep:
    most = 1.2 * sum(request.models[0].layer_nbytes)

    def at(x: float) -> tuple[PlanRequest, Machine]:
        return request, replace(machine, budget=replace(machine.budget, host=int(x * 2**30)))

    return _along("GiB of memory for weights beside the card", np.linspace(0, most / 2**30, _N_POINTS), at)


def _memory(request: PlanRequest, machine: Machine) -> Sweep:
    target, draft = request.models
    context = request.config.max_model_len or request.context + request.tokens
    fixed = reserved_memory(target, draft, request.dtype, context, request.config.tree_size or 8)
    least, most = least_budget(target.layer_nbytes, fixed), 1.1 * (fixed.total + sum(target.layer_nbytes))

    def at(x: float) -> tuple[PlanRequest, Machine]:
        return request, replace(machine, budget=replace(machine.budget, device=int(x * 2**30)))

    return _along("GiB of memory on the device", np.linspace(1.02 * least / 2**30, most / 2**30, _N_POINTS), at)


def _tree(request: PlanRequest, machine: Machine) -> Sweep:
    def at(x: float) -> tuple[PlanRequest, Machine]:
        return replace(request, config=replace(request.config, tree_size=int(x))), machine

    return _along("nodes of the tree", np.array(_TREES, dtype=np.float64), at)


def _context(request: PlanRequest, machine: Machine) -> Sweep:
    limit = request.models[0].spec.max_positions - request.tokens
    contexts = [64.0]
    while contexts[-1] < limit:
        contexts.append(min(2 * contexts[-1], limit))

    def at(x: float) -> tuple[PlanRequest, Machine]:
        config = replace(request.config, max_model_len=int(x) + request.tokens)
        return replace(request, config=config, context=int(x)), machine

    return _along("tokens of context", np.array(contexts), at)


def _along(what: str, xs: np.ndarray, at: Callable[[float], tuple[PlanRequest, Machine]]) -> Sweep:
    return Sweep(what, tuple(Point(float(x), _or_none(*at(float(x)))) for x in xs))


def _or_none(request: PlanRequest, machine: Machine) -> Forecast | None:
    try:
        return predict(request, machine)
    except CapacityError:
        return None
