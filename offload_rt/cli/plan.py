"""`offload-rt plan`: what a model would take on a machine, from its config alone.

The engine's own placement and choice of tree run on a virtual clock. No weight is read, except that with `--gpu this` a few
layers give the rate of the disk where `--disk` does not. Without a draft model plain decoding is planned.
"""

import json
import re
from dataclasses import MISSING, asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.picture import check_picture, panels, save
from offload_rt.cli.process import exit_code
from offload_rt.config import EngineConfig, SamplingParams, format_size, parse_size, setting
from offload_rt.errors import OffloadError, SettingsError
from offload_rt.planning.hardware import CARDS, Card, find_card

if TYPE_CHECKING:
    from offload_rt.planning.forecast import Forecast, Machine, PlanRequest
    from offload_rt.planning.sweep import Sweep

_SWEEPS = ("ram", "memory", "tree", "context")
# Of a machine of which nothing else was said.
_RAM, _DISK = "64GiB", "7GB/s"
_RATE = re.compile(r"(.*\S)\s*/\s*s", re.IGNORECASE)
_BAR = 40


@dataclass(frozen=True)
class PlanSettings:
    """What to plan for."""

    model: str = setting(
        MISSING, "a config.json, its directory, a hub id, or a shape that is built in, like llama2-70b"
    )
    draft_model: str | None = setting(None, "the same of a draft model")
    gpu: str = setting("this", "the card, " + ", ".join(card.name for card in CARDS) + "; this: this machine, measured")
    ram: str | None = setting(
        None, f"memory of the machine beside the card, default {_RAM}; with --gpu this: what is free"
    )
    disk: str | None = setting(None, f"rate of the disk, default {_DISK}; with --gpu this: measured")
    link: str | None = setting(None, "rate of the link to the card, default: what its PCIe reaches")
    device_memory: str | None = setting(None, "budget on the card; default: all of it, less a margin")
    dtype: str = setting("auto", "of weights and computation; auto: the config's",
                         choices=("auto", "bfloat16", "float16", "float32", "float64"))  # fmt: skip
    max_model_len: int | None = setting(None, "most tokens of prompt and answer together, as for a run", parse=int)
    tree_size: int | None = setting(None, "nodes of the trees; default: chosen by what passes cost", parse=int)
    tree_depth: int | None = setting(None, "levels of the trees; default: chosen", parse=int)
    temperature: float = setting(0.0, "at which tokens are sampled", parse=float)
    acceptance: str = setting(
        "auto", "how often the draft is right: measured (on this machine), a preset's name, guess, or probabilities by rank; "
        "auto: the first of measured, a preset of this pair, guess",
    )  # fmt: skip
    context: int = setting(128, "tokens before the first pass", parse=int)
    max_new_tokens: int = setting(128, "tokens that are generated", parse=int)
    sweep: str | None = setting(None, "draw the curve over this", choices=_SWEEPS)
    plot: str | None = setting(None, "file for a picture of the curve, PNG; needs matplotlib")
    json: bool = setting(False, "print one JSON object instead of tables")
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    offline: bool = setting(False, "use only what the hub cache already holds")

    def __post_init__(self) -> None:
        SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens)
        if self.context < 1:
            raise SettingsError(f"--context is {self.context}", need="at least 1", change="raise --context")
        if self.plot is not None and self.sweep is None:
            raise SettingsError("--plot", need="a curve to draw", change=f"give --sweep {' or '.join(_SWEEPS)}")
        if self.link is not None and self.gpu == "this":
            raise SettingsError("--link", need="a card that is not here", have="--gpu this", change="name a card")
        if self.draft_model is None and (self.tree_size or self.tree_depth):
            flag = "--tree-size" if self.tree_size else "--tree-depth"
            raise SettingsError(flag, need="a draft model", change="give one by --draft-model")

    @property
    def title(self) -> str:
        """The models by name."""
        return self.model if self.draft_model is None else f"{self.model} with {self.draft_model}"

    def engine(self) -> EngineConfig:
        """The settings of the engine that is planned."""
        return EngineConfig(
            model=self.model,
            draft_model=self.draft_model,
            dtype=self.dtype,
            device_memory=self.device_memory,
            host_memory=self.ram if self.gpu == "this" else None,
            max_model_len=self.max_model_len,
            drafter="none" if self.draft_model is None else "static_tree",
            tree_size=self.tree_size,
            tree_depth=self.tree_depth,
        )


def parse_rate(text: str, flag: str) -> float:
    """GB/s from `"7GB/s"`. Raises SettingsError."""
    match = _RATE.fullmatch(text.strip())
    try:
        rate = parse_size(match.group(1)) / 1e9 if match else 0.0
    except SettingsError:
        rate = 0.0
    if rate <= 0:
        raise SettingsError(f"{flag} is {text!r}", need="a rate", change='write it like "7GB/s" or "800MB/s"')
    return rate


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = Parser("offload-rt plan", "What a model would take on a machine, from its config alone.", PlanSettings)
    return exit_code(lambda: _plan(from_flags(PlanSettings, parser.parse_args(arguments))))


@dataclass(frozen=True)
class _Prediction:
    """A question and its answer.

    curve  None where none was asked for
    """

    settings: PlanSettings
    request: "PlanRequest"
    machine: "Machine"
    forecast: "Forecast"
    curve: "Sweep | None"


def _plan(settings: PlanSettings) -> None:
    if settings.plot is not None:
        check_picture("--plot", settings.plot)
    card = None if settings.gpu == "this" else find_card(settings.gpu)
    config = settings.engine()
    machine = None if card is None else _with_card(settings, config, card)
    # Not at the top: a wrong flag is told before the seconds that torch takes to load.
    from offload_rt.planning.forecast import predict
    from offload_rt.planning.sweep import sweep

    request = _request(settings, config)
    if machine is None:
        from offload_rt.planning.local import this_machine

        machine = this_machine(config, None if settings.disk is None else parse_rate(settings.disk, "--disk"))
    forecast = predict(request, machine)
    curve = None if settings.sweep is None else sweep(settings.sweep, request, machine)
    found = _Prediction(settings, request, machine, forecast, curve)
    if settings.json:
        print(json.dumps(_as_json(found)))
    else:
        _print(found)
    if settings.plot is not None and curve is not None:
        _draw(settings, curve, machine)


def _with_card(settings: PlanSettings, config: EngineConfig, card: Card) -> "Machine":
    disk, ram = parse_rate(settings.disk or _DISK, "--disk"), parse_size(settings.ram or _RAM)
    link = None if settings.link is None else parse_rate(settings.link, "--link")
    if config.device_nbytes is not None and config.device_nbytes > card.memory_nbytes:
        raise SettingsError(
            f"--device-memory {settings.device_memory}", need=f"at most the card's {format_size(card.memory_nbytes)}",
            change="lower --device-memory",
        )  # fmt: skip
    from offload_rt.planning.forecast import Machine

    machine = Machine.with_card(card, ram, disk, config.device_nbytes, link)
    defaults = (("--ram", settings.ram, _RAM), ("--disk", settings.disk, _DISK))
    assumed = tuple(f"{flag} was not given: {default} is assumed" for flag, given, default in defaults if given is None)
    return replace(machine, sources=(*machine.sources, *assumed))


def _request(settings: PlanSettings, config: EngineConfig) -> "PlanRequest":
    import torch

    from offload_rt.engine.memory_plan import Sizes
    from offload_rt.models.families import spec_of
    from offload_rt.planning.acceptance import assume
    from offload_rt.planning.forecast import PlanRequest
    from offload_rt.planning.known_models import KNOWN
    from offload_rt.speculate.select import check_pair, pick_drafter
    from offload_rt.weights.checkpoint import find_config

    names = [name for name in (settings.model, settings.draft_model) if name is not None]
    known = [name.lower() in KNOWN for name in names]
    raw = [KNOWN[name.lower()] if is_known else find_config(name, revision, settings.offline)
           for name, is_known, revision in zip(names, known, (settings.revision, None), strict=False)]  # fmt: skip
    specs = [spec_of(one) for one in raw]
    dtypes = [getattr(torch, spec.dtype_name or "float16") for spec in specs]
    if settings.dtype != "auto":
        dtypes[0] = getattr(torch, settings.dtype)
    sizes = [Sizes.of_spec(spec, dtype) for spec, dtype in zip(specs, dtypes, strict=True)]
    check_pair(specs[0], specs[-1], (None, None))
    identities = [_identity(name, revision) for name, revision in zip(names, (settings.revision, None), strict=False)]
    pair = (identities[0], identities[-1])
    return PlanRequest(
        config=config,
        drafting=pick_drafter(config),
        models=(sizes[0], sizes[1] if len(sizes) > 1 else None),
        dtype=dtypes[0],
        acceptance=assume(settings.acceptance, pair, (names[0].lower(), names[-1].lower()), settings.temperature),
        context=settings.context,
        tokens=settings.max_new_tokens,
    )


def _identity(model: str, revision: str | None) -> str:
    """Of the checkpoint of a model, where it lies on this machine; empty where it does not."""
    from offload_rt.weights.checkpoint import locate, open_checkpoint

    try:
        return open_checkpoint(locate(model, revision, offline=True)).identity
    except OffloadError:
        return ""


def _print(found: _Prediction) -> None:
    from offload_rt.cli.format import placement_table, print_table

    forecast, machine = found.forecast, found.machine
    title = f"{found.settings.title} on {machine.title}, {found.request.dtype}"
    table = placement_table(title, forecast.memory_plan.plan, forecast.memory_plan.cache_rows)
    for name, rate in machine.links:
        if name in forecast.link_s:
            nbytes = forecast.link_s[name] * rate * 1e9
            table.add_row(f"bytes per pass at {rate:.2f} GB/s", f"{name} link", format_size(nbytes))
    table.add_row("predicted", machine.title, f"{forecast.seconds_per_token:.3f} s per token")
    print_table(table)
    for line in _lines(found.request, machine, forecast):
        print(line)
    if found.curve is not None:
        print(_curve(found.curve))


def _lines(request: "PlanRequest", machine: "Machine", forecast: "Forecast") -> list[str]:
    plain_s = forecast.plain.seconds_per_token
    n_nodes, n_levels = len(forecast.topology), int(forecast.topology.depths.max()) + 1
    lines = [f"a pass waits for {forecast.bound}"]
    if n_nodes > 1:
        lines = [
            f"trees of {n_nodes} nodes on {n_levels} levels give {forecast.tokens_per_pass:.2f} tokens a pass of "
            f"{forecast.run.pass_s:.3f} s, {forecast.draft_s:.3f} s of it drafting",
            f"plain decoding takes {plain_s:.3f} s per token: {plain_s / forecast.seconds_per_token:.2f} times faster",
            *lines,
            f"acceptance: {request.acceptance.source}",
        ]
    return [*lines, *machine.sources]


def _curve(curve: "Sweep") -> str:
    """A line for each point: x, seconds per token, a bar as long as these, and what the pass waits for."""
    found = [point.forecast.seconds_per_token for point in curve.points if point.forecast is not None]
    longest = max(found, default=1.0)
    lines = ["", f"seconds per token by {curve.what}"]
    for point in curve.points:
        if point.forecast is None:
            lines.append(f"{point.x:10.6g}  does not fit")
            continue
        seconds = point.forecast.seconds_per_token
        bar = "#" * max(round(_BAR * seconds / longest), 1)
        lines.append(f"{point.x:10.6g}  {seconds:8.4f} s  {bar:{_BAR}}  {point.forecast.bound.split(':')[0]}")
    return "\n".join(lines)


def _as_json(found: _Prediction) -> dict[str, Any]:
    request, machine, forecast, curve = found.request, found.machine, found.forecast, found.curve
    return {
        "model": found.settings.model,
        "draft_model": found.settings.draft_model,
        "machine": machine.title,
        "links": dict(machine.links),
        "sources": machine.sources,
        "acceptance": {"by_rank": request.acceptance.by_rank.tolist(), "source": request.acceptance.source},
        "plan": asdict(forecast.memory_plan.plan),
        "max_model_len": forecast.memory_plan.max_model_len,
        **_figures(forecast),
        "sweep": curve and {"over": curve.what, "points": [{"x": p.x, **_figures(p.forecast)} for p in curve.points]},
    }


def _figures(forecast: "Forecast | None") -> dict[str, Any]:
    if forecast is None:
        return {}
    return {
        "predicted_seconds_per_token": forecast.seconds_per_token,
        "predicted_plain_seconds_per_token": forecast.plain.seconds_per_token,
        "tokens_per_pass": forecast.tokens_per_pass,
        "tree_nodes": len(forecast.topology),
        "tree_levels": int(forecast.topology.depths.max()) + 1,
        "pass_seconds": forecast.run.pass_s,
        "draft_seconds": forecast.draft_s,
        "compute_seconds": forecast.compute_s,
        "link_seconds": forecast.link_s,
        "bound": forecast.bound,
    }


def _draw(settings: PlanSettings, curve: "Sweep", machine: "Machine") -> None:
    figure, ((axes,),) = panels(1, 1, (8, 4.5))
    there = [(point.x, point.forecast) for point in curve.points if point.forecast is not None]
    xs = [x for x, _ in there]
    axes.plot(xs, [one.seconds_per_token for _, one in there], marker="o", label="chosen trees")
    axes.plot(xs, [one.plain.seconds_per_token for _, one in there], marker=".", ls="--", label="plain decoding")
    axes.set(title=f"{settings.title} on {machine.title}", xlabel=curve.what, ylabel="seconds per token", yscale="log")
    if settings.sweep in ("tree", "context"):
        axes.set_xscale("log", base=2)
    axes.legend()
    save(figure, str(settings.plot))
