"""`offload-rt plan`: forecast placement and speed of a model on a machine, from its config.

The forecast uses the engine's placement, tree choice and cost model. Only the headers of local
weights are read. With `--gpu this` and without `--disk`, a few layers are also read, to measure the
disk. Without a draft model or self-drafting, the forecast is of plain decoding.
"""

import gc
import json
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.process import exit_code
from offload_rt.config import (
    EngineConfig,
    SamplingParams,
    check_positive,
    format_size,
    parse_size,
    setting,
)
from offload_rt.errors import OffloadError, SettingsError
from offload_rt.planning.hardware import CARDS, find_card
from offload_rt.planning.known_models import KNOWN
from offload_rt.weights.locate import check_paths, is_here

if TYPE_CHECKING:
    from offload_rt.planning.acceptance import Assumed
    from offload_rt.planning.forecast import Forecast, Machine, PlanRequest, Sweep

    Alternatives = dict[str, dict[str, Forecast | None]]

_SWEEPS = ("ram", "memory")
# Defaults of the machine.
_RAM = "64GiB"
_DISK = "7GB/s"
_BAR = 40
# Engine settings without a flag here: the plan chooses them.
_NO_FLAGS = ("device", "host_memory", "rule")
# Drafters with a forecast; with a draft model, trees of a fixed shape stand for all tree drafters.
_SELF = "self"
_DRAFTERS = ("auto", "none", _SELF)
_DYNAMIC_DRAFTERS = ("adaptive_tree", "dynamic_tree")
_MODEL_DRAFTERS = (*_DYNAMIC_DRAFTERS, "static_tree")


@dataclass(frozen=True)
class PlanSettings:
    """Settings of a plan besides the engine's."""

    gpu: str = setting(
        "this",
        "GPU: " + ", ".join(card.name for card in CARDS) + "; this: this machine, measured",
    )
    ram: str | None = setting(
        None, f"host memory, default {_RAM}; with --gpu this: the free memory"
    )
    disk: str | None = setting(
        None, f"read rate of the disk, default {_DISK}; with --gpu this: measured"
    )
    link: str | None = setting(
        None, "rate of the host-to-card link, default: measured rate of its PCIe version"
    )
    temperature: float = setting(0.0, "sampling temperature", parse=float)
    acceptance: str = setting(
        "auto", "acceptance of drafted tokens: name of a preset, or probabilities by rank; "
        "auto: measured on this machine, else a preset of this pair, else a guess",
    )  # fmt: skip
    context: int = setting(128, "tokens before the first pass", parse=int)
    max_new_tokens: int = setting(128, "generated tokens", parse=int)
    ranks: int = setting(1, "cards of the machine; each computes a shard of every layer", parse=int)
    shared_link: bool = setting(False, "each pair of ranks shares a host-to-card link")
    network: str | None = setting(
        None, "rate between ranks, default: NVLink, else through host memory"
    )
    sweep: str | None = setting(
        None, "print the forecast over a range of host or device memory", choices=_SWEEPS
    )
    json: bool = setting(False, "print one JSON object instead of tables")

    def __post_init__(self) -> None:
        SamplingParams(temperature=self.temperature, max_new_tokens=self.max_new_tokens)
        for name in ("context", "ranks"):
            check_positive(name, getattr(self, name))

    def check(self, config: EngineConfig) -> None:
        """Raise SettingsError for contradictory settings."""
        card_settings = {
            "--link": self.link,
            "--ranks": self.ranks > 1,
            "--pipeline": config.pipeline > 1,
        }
        flags = [flag for flag, value in card_settings.items() if value]
        if flags and self.gpu == "this":
            raise SettingsError(
                flags[0], need="a card by name", have="--gpu this", change="name a card with --gpu"
            )
        if {"--ranks", "--pipeline"} <= {*flags}:
            raise SettingsError(
                "--ranks", need="no --pipeline", have="both", change="omit --ranks or --pipeline"
            )


def parse_rate(text: str, flag: str) -> float:
    """Parse a rate like "7GB/s" to GB/s. Raises SettingsError."""
    amount, _, per = text.partition("/")
    try:
        rate = parse_size(amount) / 1e9 if per.strip().lower() == "s" else 0.0
    except SettingsError:
        rate = 0.0
    if rate <= 0:
        raise SettingsError(
            f"{flag} is {text!r}", need="a rate", change='write it like "7GB/s" or "800MB/s"'
        )
    return rate


class _List(Action):
    def __call__(
        self, parser: ArgumentParser, settings: object, values: object, flag: str | None = None
    ) -> None:
        print("\n".join(KNOWN))
        parser.exit()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    text = (
        "Forecast memory placement and speed of a model from its config.json, its files, or a"
        " built-in shape."
    )
    parser = Parser(
        "offload-rt plan",
        text,
        EngineConfig,
        PlanSettings,
        without=_NO_FLAGS,
        examples=(
            "offload-rt plan llama2-70b --draft-model llama2-7b --gpu rtx4090 --ram 160GiB",
            "offload-rt plan DIR --gpu this --device-memory 10GiB",
        ),
    )
    parser.add_argument("--list", action=_List, nargs=0, help="print the built-in shapes and exit")
    # Garbage collection is an eighth of the import time of torch and transformers, and finds nearly
    # no garbage.
    gc.disable()
    try:
        return exit_code(lambda: print_plan(parser.parse_args(arguments)))
    finally:
        gc.enable()


def print_plan(flags: Namespace) -> None:
    """Print the plan for the flags of this command; absent flags have their defaults."""
    settings = from_flags(PlanSettings, flags)
    config = from_flags(EngineConfig, flags)
    settings.check(config)
    check_paths(config)
    if settings.gpu == "this" and _is_here(config):
        _show(settings, _of_run(settings, config), {})
        return
    machine = None if settings.gpu == "this" else _with_card(settings, config)
    if config.drafter not in (
        _DRAFTERS if config.draft_model is None else _DRAFTERS[:1] + _MODEL_DRAFTERS
    ):
        need = (
            "a draft model"
            if config.drafter in _MODEL_DRAFTERS
            else "a drafter with a forecast of tokens per pass"
        )
        change = f"use {' or '.join(_DRAFTERS)} without --draft-model, or omit --drafter"
        raise SettingsError(f"--drafter {config.drafter}", need=need, change=change)
    # Imported here: wrong flags are reported before torch loads.
    from offload_rt.planning.forecast import predict

    if machine is None:
        from offload_rt.planning.local import this_machine

        source = "disk: set by --disk"
        if settings.disk is None:
            source = f"--disk: {parse_rate(_DISK, '--disk'):g} GB/s assumed"
        machine = this_machine(
            replace(config, host_memory=settings.ram),
            parse_rate(settings.disk or _DISK, "--disk"),
            source,
        )
    request = _request(settings, config, machine)
    places = _by_place(config.split_draft, request, machine)
    _show(settings, next(iter(places.values()), None) or predict(request, machine), places)


def print_run_plan(config: EngineConfig, flags: Namespace) -> None:
    """Print the plan of a run with these flags, for `offload-rt run --plan`."""
    if config.offline or _is_here(config):  # an offline run reports missing weights
        settings = from_flags(PlanSettings, flags)
        _show(settings, _of_run(settings, config, is_clipped=True), {})
        return
    from huggingface_hub.constants import HF_HUB_CACHE

    from offload_rt.engine import profile

    print(
        "some weights are not downloaded: planning from configs and the measured disk rate",
        file=sys.stderr,
    )
    rate = profile.disk_gbps(Path(HF_HUB_CACHE))
    print_plan(Namespace(**vars(flags), disk=f"{rate:.2f}GB/s"))


def _is_here(config: EngineConfig) -> bool:
    """Return whether all weights are on this machine."""
    if {config.model.lower(), (config.draft_model or "").lower()} & KNOWN.keys():
        return False
    models = [(config.model, config.revision)]
    if config.draft_model is not None:
        models.append((config.draft_model, None))
    return all(is_here(*model) for model in models)


def _of_run(settings: PlanSettings, config: EngineConfig, is_clipped: bool = False) -> "Forecast":
    """Predict a run on this machine, by the memory plan of the run itself.

    is_clipped  shorten context and answer to the maximum length of the plan
    """
    from offload_rt.engine import profile
    from offload_rt.llm import LLM
    from offload_rt.planning.forecast import PlanRequest, predict
    from offload_rt.planning.local import this_machine

    config = replace(config, host_memory=settings.ram or config.host_memory)
    with LLM.open(config) as llm:
        spec = llm.spec
        disk = "disk: set by --disk"
        if settings.disk is not None:
            disk_gbps = parse_rate(settings.disk, "--disk")
        else:
            disk = "disk: measured with the model's files"
            n_layers = spec.target.checkpoint.spec.n_layers
            disk_gbps = profile.link_gbps(spec.files.disk, n_layers)
    machine = this_machine(config, disk_gbps, disk)
    draft = spec.draft.sizes()
    config = replace(config, drafter=spec.draft.drafting.name)
    drafter = "none" if draft is None else _SELF if draft.stand_in else config.drafter
    acceptance = _assumed(settings.acceptance, settings.temperature, config, drafter)
    context = settings.context
    tokens = settings.max_new_tokens
    if is_clipped:
        tokens = min(tokens, max(spec.memory.max_model_len // 2, 1))
        context = min(context, spec.memory.max_model_len - tokens)
    request = PlanRequest(config, (spec.target.sizes, draft), acceptance, context, tokens)
    return predict(request, machine, (spec.memory, spec.pass_bytes))


def _show(settings: PlanSettings, forecast: "Forecast", places: "Mapping[str, Forecast]") -> None:
    """Print a forecast with its alternatives, as tables or as JSON.

    places  forecasts by placement of the draft model, fastest first
    """
    from offload_rt.planning.forecast import alternatives, expert_ways, sweep

    request = forecast.request
    config = request.config
    self_acceptance = (
        request.acceptance
        if config.drafter == _SELF
        else _assumed("auto", settings.temperature, config, _SELF)
    )
    by_format = alternatives(request, self_acceptance, forecast.machine)
    curve = None if settings.sweep is None else sweep(settings.sweep, request, forecast.machine)
    experts = expert_ways(forecast)
    if settings.json:
        print(json.dumps(_as_json(forecast, by_format, experts, curve), default=str))  # dtypes
        return
    _print(forecast, by_format, experts, curve)
    for place, placed in places.items():
        print(f"with the draft model {place}: {placed.run.seconds_per_token:.3f} s per token")


def _with_card(settings: PlanSettings, config: EngineConfig) -> "Machine":
    card = find_card(settings.gpu)
    disk = parse_rate(settings.disk or _DISK, "--disk")
    ram = parse_size(settings.ram or _RAM)
    link = None if settings.link is None else parse_rate(settings.link, "--link")
    from offload_rt.engine.memory_plan import DRIVER

    available = card.free_nbytes - DRIVER
    if config.device_nbytes is not None and config.device_nbytes > available:
        need = f"at most {format_size(available)}, the available memory of this card"
        raise SettingsError(
            f"--device-memory {config.device_memory}", need=need, change="lower --device-memory"
        )
    from offload_rt.planning.forecast import Machine
    from offload_rt.planning.ranks import Parallelism

    machine = Machine.with_card(card, ram, disk, config.device_nbytes, link)
    defaults = (("--ram", settings.ram, _RAM), ("--disk", settings.disk, _DISK))
    assumed = tuple(
        f"{flag}: {default} assumed" for flag, value, default in defaults if value is None
    )
    ranks = Parallelism.of(
        max(settings.ranks, config.pipeline), card, link or card.link.gbps,
        None if settings.network is None else parse_rate(settings.network, "--network"),
        exact=config.exact_parallel,
        pipeline=config.pipeline > 1, shared_link=settings.shared_link,
        split_draft=config.split_draft == "on",
    )  # fmt: skip
    return replace(machine, sources=(*machine.sources, *assumed)).of_rank(ranks)


def _request(settings: PlanSettings, config: EngineConfig, machine: "Machine") -> "PlanRequest":
    from offload_rt.planning.forecast import PlanRequest
    from offload_rt.planning.sizes import copies, find_models, lossless

    target, draft = find_models(config)
    ranks = machine.ranks
    on_card = machine.budget.has_card
    target = ranks.part(target)
    draft = ranks.part(draft) if draft and ranks.split_draft else draft
    if config.link_format == "lossless":
        target = lossless(target, on_card)
    if config.drafter == _SELF:
        draft = copies(target, on_card)
        drafter = _SELF
    else:
        trees = "adaptive_tree" if config.drafter == "auto" else config.drafter
        drafter = "none" if draft is None else "mtp" if config.draft_model is None else trees
    if draft is None and (config.tree_size or config.tree_depth):
        flag = "--tree-size" if config.tree_size else "--tree-depth"
        raise SettingsError(flag, need="a drafter", change="set --draft-model, or --drafter self")
    acceptance = _assumed(settings.acceptance, settings.temperature, config, drafter)
    config = replace(config, drafter=drafter)
    return PlanRequest(
        config, (target, draft), acceptance, settings.context, settings.max_new_tokens
    )


def _by_place(split: str, request: "PlanRequest", machine: "Machine") -> "dict[str, Forecast]":
    """Predict a draft model on the first GPU and sharded over all GPUs, fastest first.

    Empty if the setting or the models leave a single placement.
    """
    from offload_rt.planning.forecast import predict_if_it_fits

    (target, draft), ranks = request.models, replace(machine.ranks, split_draft=True)
    if split != "auto" or ranks.n_parts == 1 or draft is None or draft.stand_in:
        return {}
    by_place = {"on the first card": predict_if_it_fits(request, machine)}
    with suppress(OffloadError):  # The draft model cannot be sharded.
        sharded = replace(request, models=(target, ranks.part(draft)))
        by_place["sharded over all cards"] = predict_if_it_fits(
            sharded, replace(machine, ranks=ranks)
        )
    fitting = {place: forecast for place, forecast in by_place.items() if forecast is not None}
    return dict(sorted(fitting.items(), key=lambda item: item[1].run.seconds_per_token))


def _assumed(name: str, temperature: float, config: EngineConfig, drafter: str) -> "Assumed":
    from offload_rt.planning.acceptance import assume

    draft = _SELF if drafter == _SELF else (config.draft_model or "").lower()
    pair = _identities(config, drafter) if name == "auto" and drafter != "none" else ("", "")
    assumed = assume(name, pair, (config.model.lower(), draft), temperature)
    is_dynamic = temperature == 0 and drafter in _DYNAMIC_DRAFTERS
    return assumed.with_dynamic_trees() if is_dynamic else assumed


def _identities(config: EngineConfig, drafter: str) -> tuple[str, str]:
    """Return the identities of local checkpoints; empty strings without local files or a draft."""
    if {config.model.lower(), (config.draft_model or "").lower()} & KNOWN.keys():
        return "", ""
    from offload_rt.speculate.select import find_draft
    from offload_rt.weights.checkpoint import open_checkpoint
    from offload_rt.weights.int4 import Format
    from offload_rt.weights.locate import locate

    try:
        target = open_checkpoint(locate(config.model, config.revision, offline=True))
        if drafter == _SELF:
            return target.identity, Format.name
        draft = find_draft(replace(config, offline=True), None, target, None).draft
    except OffloadError:
        return "", ""
    return target.identity, draft.identity if draft else ""


def _print(
    forecast: "Forecast",
    by_format: "Alternatives",
    experts: "dict[str, Forecast | None]",
    curve: "Sweep | None",
) -> None:
    from offload_rt.cli.format import placement_table, print_table
    from offload_rt.planning.forecast import short_context

    machine = forecast.machine
    fitted = forecast.memory_plan
    config = forecast.request.config
    models = (
        config.model if config.draft_model is None else f"{config.model} with {config.draft_model}"
    )
    title = f"{models} on {machine.title}, {forecast.request.models[0].dtype}"
    table = placement_table(title, fitted.plan, fitted.cache_rows)
    for name, rate in machine.links:
        if name in forecast.moved:
            nbytes = format_size(forecast.moved[name])
            table.add_row(f"bytes per pass at {rate:.2f} GB/s", f"{name} link", nbytes)
    rows = fitted.plan.pass_bytes.rows
    if rows is not None:
        context = fitted.max_model_len - 1
        item = f"KV cache part, after {context} tokens"
        table.add_row(item, f"{rows.tier} link", format_size(rows.pass_nbytes(context)))
    table.add_row("predicted", machine.title, f"{forecast.run.seconds_per_token:.3f} s per token")
    print_table(table)
    plain_s = forecast.plain.seconds_per_token
    topology = forecast.topology
    if len(topology) > 1:
        print(
            f"trees: {len(topology)} nodes on {topology.n_levels} levels,"
            f" {forecast.run.tokens_per_pass:.2f} tokens per pass of {forecast.run.pass_s:.3f} s,"
            f" including {forecast.draft_s:.3f} s of drafting\nplain decoding: {plain_s:.3f} s per"
            f" token; trees are {plain_s / forecast.run.seconds_per_token:.2f} times faster"
        )
    elif fitted.limits.n_nodes > 1 and forecast.request.models[1] is None:
        print(
            f"the acceptance of --drafter {config.drafter} depends on the text: this is a forecast"
            " of plain decoding"
        )
    print(f"the bottleneck is {forecast.bound}")
    for name, share in forecast.busy.items():
        link = "host-to-card link" if name == "host" else "disk"
        print(
            f"the {link} is busy for {share:.1%} of a pass; a pass is {1 / share:.3f} times as long"
            " as its transfers"
        )
    _print_draft(forecast)
    if len(topology) > 1:
        print(f"acceptance: {forecast.acceptance_source}")
    print("\n".join(machine.sources))
    if short := short_context(forecast):
        print(short)
    if by_format:
        _print_formats(by_format, machine.decode_gbps)
    if experts:
        _print_experts(forecast, experts)
    if curve is not None:
        _print_curve(curve)


def _print_draft(forecast: "Forecast") -> None:
    """Print the size of a quantised draft model, and the time of a draft level."""
    draft = forecast.request.models[1]
    if draft is not None and draft.rounding != "none":
        print(f"draft model quantised to {draft.rounding}: {format_size(draft.nbytes)}")
    if (level := forecast.level) is not None:
        print(
            f"draft level: {1e3 * level.seconds:.2f} ms, {level.ratio:.2f} times as long as"
            f" reading its {level.nbytes / 1e9:.2f} GB at {level.gbps:.0f} GB/s"
        )


def _print_formats(by_format: "Alternatives", decode_gbps: float) -> None:
    """Print a row per weight format, and the drafter with the fastest forecast."""
    from offload_rt.planning.sizes import LOSSLESS_SHARE

    first, drafters = next(iter(by_format.items()))
    columns = "bytes per pass", "plain", *(f"with {name}" for name in list(drafters)[1:])
    print("\nforecast by weight format, seconds per token\n" + _line("", columns))
    for name, row in by_format.items():
        nbytes = format_size(max(row["none"].moved.values(), default=0)) if row["none"] else ""
        seconds = (
            f"{variant.run.seconds_per_token:.3f}" if variant else "does not fit"
            for variant in row.values()
        )
        print(_line(name, (nbytes, *seconds)))
    print(
        f"assumed: lossless layers have {LOSSLESS_SHARE:.2f} of their bytes, decoding writes"
        f" {decode_gbps:g} GB/s"
    )
    fitting = {
        variant.run.seconds_per_token: name
        for name, variant in drafters.items()
        if variant is not None
    }
    if len(fitting) > 1:
        print(
            f"fastest forecast with {first} weights: {fitting[min(fitting)]},"
            f" {min(fitting):.3f} s per token"
        )
    if (itself := drafters.get(_SELF)) is not None:
        print(f"acceptance of --drafter self: {itself.request.acceptance.source}")


def _print_experts(forecast: "Forecast", ways: "dict[str, Forecast | None]") -> None:
    """Print plain decoding of a mixture by expert placement, and published rates."""
    from offload_rt.planning.forecast import PUBLISHED_RATES

    print(
        "\nforecast of plain decoding by transferred weights\n"
        + _line("", ("bytes per pass", "tokens per second"))
    )
    for name, way in ways.items():
        cells = (
            (format_size(sum(way.moved.values())), f"{1 / way.plain.pass_s:.2f}")
            if way
            else ("", "does not fit")
        )
        print(_line(name, cells))
    model = forecast.request.config.model.lower().rpartition("/")[2]
    print("".join(f"published: {line}\n" for line in PUBLISHED_RATES.get(model, ())), end="")
    plan = forecast.memory_plan.plan
    touched = plan.touched
    assert touched is not None and plan.experts is not None
    n_on_host = plan.experts.n_on_host / touched.n_layers
    print(
        f"experts per layer: {touched.n_experts}, {touched.n_resident:.0f} on the device,"
        f" {n_on_host:.0f} in host memory; a token needs {touched.n_used}\nassumed: all experts are"
        f" equally frequent; the CPU of a GPU machine reads {forecast.machine.ram_gbps:g} GB/s of"
        " weights"
    )


def _line(name: str, cells: Iterable[str]) -> str:
    return f"{name:20}" + "".join(f"{cell:>18}" for cell in cells)


def _print_curve(curve: "Sweep") -> None:
    """Print a line per point: x, seconds per token as number and bar, bottleneck."""
    print(f"\nseconds per token by {curve.over}")
    longest = max(
        (point.run.seconds_per_token for _, point in curve.points if point is not None),
        default=1.0,
    )
    for x, point in curve.points:
        if point is None:
            print(f"{x:10.6g}  does not fit")
        else:
            bar = "#" * max(round(_BAR * point.run.seconds_per_token / longest), 1)
            print(
                f"{x:10.6g}  {point.run.seconds_per_token:8.4f} s  {bar:{_BAR}} "
                f" {point.bound.split(':')[0]}"
            )


def _as_json(
    forecast: "Forecast",
    by_format: "Alternatives",
    experts: "dict[str, Forecast | None]",
    curve: "Sweep | None",
) -> dict[str, Any]:
    request = forecast.request
    machine = forecast.machine
    fitted = forecast.memory_plan
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
        "formats": {
            name: {drafter: _figures(variant) for drafter, variant in row.items()}
            for name, row in by_format.items()
        },
        "ranks": asdict(machine.ranks),
        "experts": {name: _figures(way) for name, way in experts.items()},
        "sweep": (
            curve
            and {
                "over": curve.over,
                "points": [{"x": x, **_figures(point)} for x, point in curve.points],
            }
        ),
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
        "exchange_seconds": forecast.exchange_s,
        "link_bytes": forecast.moved,
        "link_seconds": forecast.link_s,
        "link_busy": forecast.busy,
        "pass_over_link": {name: 1 / share for name, share in forecast.busy.items()},
        "draft_level": forecast.level and forecast.level._asdict(),
        "bound": forecast.bound,
    }
