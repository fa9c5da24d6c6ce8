"""`offload-rt plan`: what a model would take on a machine, from its config alone.

The engine's own placement and choice of tree run on a virtual clock. No weight is read, except that with `--gpu this` a few
layers give the rate of the disk where `--disk` does not. Without a draft model plain decoding is planned.
"""

import gc
import json
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.picture import check_picture, panels, save
from offload_rt.cli.process import exit_code
from offload_rt.config import EngineConfig, SamplingParams, check_positive, format_size, parse_size, setting
from offload_rt.errors import OffloadError, SettingsError
from offload_rt.planning.hardware import CARDS, find_card
from offload_rt.planning.known_models import KNOWN

if TYPE_CHECKING:
    from offload_rt.engine.memory_plan import Sizes
    from offload_rt.models.architecture import Architecture
    from offload_rt.planning.forecast import Forecast, Machine, PlanRequest, Sweep

_SWEEPS = ("ram", "memory")
# Of a machine of which nothing else was said.
_RAM, _DISK = "64GiB", "7GB/s"
_BAR = 40
# Settings of an engine that a plan decides itself.
_NO_FLAGS = ("device", "host_memory", "drafter", "rule")


@dataclass(frozen=True)
class PlanSettings:
    """What to plan for, beside the engine."""

    gpu: str = setting("this", "the card, " + ", ".join(card.name for card in CARDS) + "; this: this machine, measured")
    ram: str | None = setting(None, f"memory beside the card, default {_RAM}; with --gpu this: what is free")
    disk: str | None = setting(None, f"rate of the disk, default {_DISK}; with --gpu this: measured")
    link: str | None = setting(None, "rate of the link to the card, default: what its PCIe reaches")
    temperature: float = setting(0.0, "at which tokens are sampled", parse=float)
    acceptance: str = setting(
        "auto", "how often the draft is right: a preset's name, or probabilities by rank; "
        "auto: as measured on this machine, else a preset of this pair, else a guess",
    )  # fmt: skip
    context: int = setting(128, "tokens before the first pass", parse=int)
    max_new_tokens: int = setting(128, "tokens that are generated", parse=int)
    sweep: str | None = setting(None, "draw the curve over this", choices=_SWEEPS)
    plot: str | None = setting(None, "file for a picture of the curve, PNG; needs matplotlib")
    json: bool = setting(False, "print one JSON object instead of tables")

    def __post_init__(self) -> None:
        SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens)
        check_positive("context", self.context)
        if self.plot is not None and self.sweep is None:
            raise SettingsError("--plot", need="a curve to draw", change=f"give --sweep {' or '.join(_SWEEPS)}")
        if self.link is not None and self.gpu == "this":
            raise SettingsError("--link", need="a card that is not here", have="--gpu this", change="name a card")


def parse_rate(text: str, flag: str) -> float:
    """GB/s from `"7GB/s"`. Raises SettingsError."""
    amount, _, per = text.partition("/")
    try:
        rate = parse_size(amount) / 1e9 if per.strip().lower() == "s" else 0.0
    except SettingsError:
        rate = 0.0
    if rate <= 0:
        raise SettingsError(f"{flag} is {text!r}", need="a rate", change='write it like "7GB/s" or "800MB/s"')
    return rate


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    text = f"What a model would take on a machine, from its config.json alone; built in are {', '.join(KNOWN)}."
    parser = Parser("offload-rt plan", text, EngineConfig, PlanSettings, without=_NO_FLAGS)
    # Nearly all that torch and transformers make while they load stays: looking for garbage among it is an eighth of loading.
    gc.disable()
    try:
        return exit_code(lambda: _plan(parser.parse_args(arguments)))
    finally:
        gc.enable()


def _plan(flags: Namespace) -> None:
    settings, config = from_flags(PlanSettings, flags), from_flags(EngineConfig, flags)
    if settings.plot is not None:
        check_picture("--plot", settings.plot)
    machine = None if settings.gpu == "this" else _with_card(settings, config)
    # Not at the top: a wrong flag is told before the seconds that torch takes to load.
    from offload_rt.planning.forecast import predict, sweep

    request = _request(settings, config)
    if request.models[1] is None and (config.tree_size or config.tree_depth):
        flag = "--tree-size" if config.tree_size else "--tree-depth"
        raise SettingsError(flag, need="a draft model", change="give one by --draft-model")
    if machine is None:
        from offload_rt.planning.local import this_machine

        disk_gbps = None if settings.disk is None else parse_rate(settings.disk, "--disk")
        machine = this_machine(replace(config, host_memory=settings.ram), disk_gbps)
    forecast = predict(request, machine)
    curve = None if settings.sweep is None else sweep(settings.sweep, request, machine)
    if settings.json:
        print(json.dumps(_as_json(forecast, curve), default=str))  # of a dtype
    else:
        _print(forecast, curve)
    if settings.plot is not None and curve is not None:
        _draw(forecast, curve, settings.plot)


def _with_card(settings: PlanSettings, config: EngineConfig) -> "Machine":
    card = find_card(settings.gpu)
    disk, ram = parse_rate(settings.disk or _DISK, "--disk"), parse_size(settings.ram or _RAM)
    link = None if settings.link is None else parse_rate(settings.link, "--link")
    if config.device_nbytes is not None and config.device_nbytes > card.memory_nbytes:
        raise SettingsError(
            f"--device-memory {config.device_memory}", need=f"at most the card's {format_size(card.memory_nbytes)}",
            change="lower --device-memory",
        )  # fmt: skip
    from offload_rt.planning.forecast import Machine

    machine = Machine.with_card(card, ram, disk, config.device_nbytes, link)
    defaults = (("--ram", settings.ram, _RAM), ("--disk", settings.disk, _DISK))
    assumed = tuple(f"{flag} was not given: {default} is assumed" for flag, given, default in defaults if given is None)
    return replace(machine, sources=(*machine.sources, *assumed))


def _request(settings: PlanSettings, config: EngineConfig) -> "PlanRequest":
    from offload_rt.planning.acceptance import assume
    from offload_rt.planning.forecast import PlanRequest

    models = _models(config)
    names = config.model.lower(), (config.draft_model or "").lower()
    acceptance = assume(settings.acceptance, _identities(config), names, settings.temperature)
    drafter = "none" if models[1] is None else "mtp" if config.draft_model is None else "static_tree"
    config = replace(config, drafter=drafter)
    return PlanRequest(config, models, acceptance, settings.context, settings.max_new_tokens)


def _models(config: EngineConfig) -> "tuple[Sizes, Sizes | None]":
    """The target, and what computes drafts for it: models that are built in or have a config."""
    import torch

    from offload_rt.engine.memory_plan import Sizes
    from offload_rt.models.families import spec_of
    from offload_rt.models.heads import head_of
    from offload_rt.speculate.select import check_pair
    from offload_rt.weights.checkpoint import find_config

    def config_of(name: str, revision: str | None) -> dict[str, Any]:
        return KNOWN.get(name.lower()) or find_config(name, revision, config.offline)

    def sizes(spec: "Architecture", dtype: str) -> Sizes:
        return Sizes.of_spec(spec, getattr(torch, spec.dtype_name or "float16" if dtype == "auto" else dtype))

    target = sizes(spec_of(config_of(config.model, config.revision)), config.dtype)
    raw = None if config.draft_model is None else config_of(config.draft_model, None)
    head = head_of(raw, target.spec)
    if head is not None:
        return target, Sizes.of_spec(head, target.dtype)
    if raw is None:
        return target, None
    draft = spec_of(raw)
    check_pair(target.spec, draft, (None, None))
    return target, sizes(draft, "auto")


def _identities(config: EngineConfig) -> tuple[str, str]:
    """Of the checkpoints of both, where they lie on this machine; empty where they do not, or nothing computes drafts."""
    from offload_rt.speculate.select import find_draft
    from offload_rt.weights.checkpoint import locate, open_checkpoint

    try:
        target = open_checkpoint(locate(config.model, config.revision, offline=True))
        draft = find_draft(replace(config, offline=True), None, target, None).draft
    except OffloadError:
        return "", ""
    return target.identity, draft.identity if draft else ""


def _title(forecast: "Forecast") -> str:
    config = forecast.request.config
    models = config.model if config.draft_model is None else f"{config.model} with {config.draft_model}"
    return f"{models} on {forecast.machine.title}"


def _print(forecast: "Forecast", curve: "Sweep | None") -> None:
    from offload_rt.cli.format import placement_table, print_table

    machine, fitted = forecast.machine, forecast.memory_plan
    dtype = forecast.request.models[0].dtype
    table = placement_table(f"{_title(forecast)}, {dtype}", fitted.plan, fitted.cache_rows)
    for name, rate in machine.links:
        if name in forecast.link_s:
            nbytes = forecast.link_s[name] * rate * 1e9
            table.add_row(f"bytes per pass at {rate:.2f} GB/s", f"{name} link", format_size(nbytes))
    table.add_row("predicted", machine.title, f"{forecast.run.seconds_per_token:.3f} s per token")
    print_table(table)
    plain_s, topology = forecast.plain.seconds_per_token, forecast.topology
    if len(topology) > 1:
        print(
            f"trees of {len(topology)} nodes on {topology.n_levels} levels give {forecast.run.tokens_per_pass:.2f} tokens a "
            f"pass of {forecast.run.pass_s:.3f} s, {forecast.draft_s:.3f} s of it drafting\nplain decoding takes "
            f"{plain_s:.3f} s per token: {plain_s / forecast.run.seconds_per_token:.2f} times faster"
        )
    print(f"a pass waits for {forecast.bound}")
    for name, share in forecast.busy.items():
        link = "host-to-card link" if name == "host" else "disk"
        print(
            f"the {link} is busy for {share:.1%} of a pass, which takes {1 / share:.3f} times its bytes over its rate"
        )
    if (level := forecast.level) is not None:
        print(
            f"a level of the draft takes {1e3 * level.seconds:.2f} ms: {level.ratio:.2f} times as long as reading its "
            f"{level.nbytes / 1e9:.2f} GB at {level.gbps:.0f} GB/s"
        )
    if len(topology) > 1:
        print(f"acceptance: {forecast.request.acceptance.source}")
    print("\n".join(machine.sources))
    if curve is not None:
        _print_curve(curve)


def _print_curve(curve: "Sweep") -> None:
    """A line for each point: x, seconds per token, a bar as long as these, and what the pass waits for."""
    print(f"\nseconds per token by {curve.what}")
    longest = max((one.run.seconds_per_token for _, one in curve.points if one is not None), default=1.0)
    for x, one in curve.points:
        if one is None:
            print(f"{x:10.6g}  does not fit")
        else:
            bar = "#" * max(round(_BAR * one.run.seconds_per_token / longest), 1)
            print(f"{x:10.6g}  {one.run.seconds_per_token:8.4f} s  {bar:{_BAR}}  {one.bound.split(':')[0]}")


def _as_json(forecast: "Forecast", curve: "Sweep | None") -> dict[str, Any]:
    request, machine, fitted = forecast.request, forecast.machine, forecast.memory_plan
    return {
        "model": request.config.model,
        "draft_model": request.config.draft_model,
        "machine": machine.title,
        "links": dict(machine.links),
        "sources": machine.sources,
        "acceptance": {"by_rank": request.acceptance.by_rank.tolist(), "source": request.acceptance.source},
        "plan": asdict(fitted.plan),
        "max_model_len": fitted.max_model_len,
        **_figures(forecast),
        "sweep": curve and {"over": curve.what, "points": [{"x": x, **_figures(one)} for x, one in curve.points]},
    }


def _figures(forecast: "Forecast | None") -> dict[str, Any]:
    if forecast is None:
        return {}
    return {
        "predicted_seconds_per_token": forecast.run.seconds_per_token,
        "predicted_plain_seconds_per_token": forecast.plain.seconds_per_token,
        "tokens_per_pass": forecast.run.tokens_per_pass,
        "tree_nodes": len(forecast.topology),
        "tree_levels": forecast.topology.n_levels,
        "pass_seconds": forecast.run.pass_s,
        "draft_seconds": forecast.draft_s,
        "compute_seconds": forecast.compute_s,
        "link_seconds": forecast.link_s,
        "link_busy": forecast.busy,
        "pass_over_link": {name: 1 / share for name, share in forecast.busy.items()},
        "draft_level": forecast.level and {**asdict(forecast.level), "ratio": forecast.level.ratio},
        "bound": forecast.bound,
    }


def _draw(forecast: "Forecast", curve: "Sweep", path: str) -> None:
    figure, ((axes,),) = panels(1, 1, (8, 4.5))
    xs = [x for x, one in curve.points if one is not None]
    there = [one for _, one in curve.points if one is not None]
    axes.plot(xs, [one.run.seconds_per_token for one in there], marker="o", label="chosen trees")
    axes.plot(xs, [one.plain.seconds_per_token for one in there], marker=".", ls="--", label="plain decoding")
    axes.set(title=_title(forecast), xlabel=curve.what, ylabel="seconds per token", yscale="log")
    axes.legend()
    save(figure, path)
