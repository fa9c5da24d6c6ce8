"""`offload-rt plan`: forecast placement and speed of a model on a machine, from its config.

The forecast uses the engine's placement, tree choice and cost model. Only the headers of local
weights are read. With `--gpu this` and without `--disk`, a few layers are also read, to measure the
disk. Without a draft model or self-drafting, the forecast is of plain decoding.
"""

import gc
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from offload_rt.cli.flags import Parser, engine_config, from_flags
from offload_rt.cli.plan_settings import PlanSettings
from offload_rt.cli.process import command
from offload_rt.config import EngineConfig
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.planning.hardware import CARDS, find_card
from offload_rt.planning.known_models import KNOWN, has_no_weights
from offload_rt.system.disk_rate import measure_disk_gbps
from offload_rt.system.machine import cards
from offload_rt.weights.locate import is_here

if TYPE_CHECKING:
    from offload_rt.planning.forecast import Forecast

# Drafters with a forecast; with a draft model, trees of a fixed shape stand for all tree drafters.
_SELF = "self"
_DRAFTERS = ("auto", "none", "recycle", _SELF)
_MODEL_DRAFTERS = ("adaptive_tree", "dynamic_tree", "static_tree")


class _List(Action):
    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        print("\n".join(self.const))
        parser.exit()


def new_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(
        "offload-rt plan",
        "Forecast memory placement and speed of a model from its config.json, its files, or a"
        " built-in shape.",
        EngineConfig,
        PlanSettings,
        without=("device", "host_memory", "rule"),  # the plan chooses them
        examples=(
            "offload-rt plan llama2-70b --draft-model llama2-7b --gpu rtx4090 --ram 160GiB",
            "offload-rt plan Qwen/Qwen3-8B --gpu this --ram 16GiB --disk 3GB/s",
        ),
    )
    for flag, names, text in (
        ("--list", [*KNOWN], "print the built-in shapes and exit"),
        ("--list-gpus", [card.name for card in CARDS], "print the GPUs and exit"),
    ):
        parser.add_argument(flag, action=_List, nargs=0, const=names, help=text)
    return parser


@command(new_parser)
def main(flags: Namespace) -> None:
    """Run the command."""
    # Garbage collection is an eighth of the import time of torch and transformers, and finds nearly
    # no garbage.
    gc.disable()
    try:
        print_plan(flags)
    except CapacityError as error:
        # A run has a budget of host memory, a plan the memory of the machine.
        texts = (error.problem, error.change)
        problem, change = (text.replace("--host-memory", "--ram") for text in texts)
        raise CapacityError(problem, need=error.need, have=error.have, change=change) from error
    finally:
        gc.enable()


def print_plan(flags: Namespace) -> None:
    """Print the plan for flags of this command. Raises CapacityError if the model is too large."""
    settings = from_flags(PlanSettings, flags)
    config = engine_config(flags)
    settings.check(config)
    try:
        is_this = settings.gpu == "this"
        # On a CPU, --ram describes another machine.
        is_run = is_this and (settings.ram is None or bool(cards()))
        if not is_this:
            find_card(settings.gpu)  # wrong flags are reported before torch loads
        if is_run and _is_here(config):
            from offload_rt.cli.plan_request import of_run

            _show(settings, of_run(settings, config), {})
            return
        if config.drafter not in (("auto", *_MODEL_DRAFTERS) if config.draft_model else _DRAFTERS):
            is_known = config.drafter in _MODEL_DRAFTERS
            need = "a draft model" if is_known else "a drafter with a forecast of tokens per pass"
            change = f"use {' or '.join(_DRAFTERS)} without --draft-model, or omit --drafter"
            raise SettingsError(f"--drafter={config.drafter}", need=need, change=change)
        from offload_rt.cli.plan_request import by_place, request_of, with_card, without_weights
        from offload_rt.planning.forecast import predict

        machine = (without_weights if is_this else with_card)(settings, config)
        request = request_of(settings, config, machine)
        places = by_place(config.split_draft, request, machine)
        _show(settings, next(iter(places.values()), None) or predict(request, machine), places)
    except CapacityError as error:
        raise error.prefixed("does not fit") from error


def print_run_plan(config: EngineConfig, flags: Namespace) -> None:
    """Print the plan of a run with these flags, for `offload-rt run --plan`."""
    if config.offline or _is_here(config):  # an offline run reports missing weights
        from offload_rt.cli.plan_request import of_run

        settings = from_flags(PlanSettings, flags)
        _show(settings, of_run(settings, config, is_clipped=True), {})
        return
    from huggingface_hub.constants import HF_HUB_CACHE

    text = "some weights are not downloaded: planning from configs and the measured disk rate"
    print(text, file=sys.stderr)
    folder = Path(HF_HUB_CACHE)
    folder.mkdir(parents=True, exist_ok=True)
    rate = measure_disk_gbps(folder)
    if rate is not None:
        source = "disk: measured in the hub cache"
        flags = Namespace(**vars(flags), disk=f"{rate:.2f}GB/s", disk_source=source)
    print_plan(flags)


def _is_here(config: EngineConfig) -> bool:
    draft = config.draft_model
    if has_no_weights(config.model, draft) or not is_here(config.model, config.revision):
        return False
    return draft is None or is_here(draft, None)


def _show(settings: PlanSettings, forecast: "Forecast", places: "Mapping[str, Forecast]") -> None:
    """Print a forecast with its alternatives; `places` are draft placements, fastest first."""
    from offload_rt.cli.plan_request import assumed
    from offload_rt.cli.plan_tables import show, show_json
    from offload_rt.planning import drafters
    from offload_rt.planning.alternatives import Alternatives, by_format, expert_ways, sweep

    request = forecast.request
    machine = forecast.machine
    temperature = settings.temperature
    self_acceptance = request.acceptance
    if request.config.drafter != _SELF:
        self_acceptance = assumed("auto", temperature, request.config, _SELF)
    compared = settings.compare_drafters and drafters.compare(request, machine, temperature)
    others = Alternatives(
        formats=by_format(request, self_acceptance, machine),
        experts=expert_ways(forecast),
        sweep=None if settings.sweep is None else sweep(settings.sweep, request, machine),
        places=places,
        drafters=compared or (),
    )
    (show_json if settings.json else show)(forecast, others)
