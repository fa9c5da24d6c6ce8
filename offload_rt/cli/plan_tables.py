"""Output of `offload-rt plan`: tables, sentences and the verdict, or JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from textwrap import fill
from typing import Any

from rich.table import Column, Table

from offload_rt.cli.format import COLUMNS, columns, format_speed, print_rows, print_table
from offload_rt.config import format_size
from offload_rt.offload.placement import Plan
from offload_rt.packing import LOSSLESS_SHARE
from offload_rt.planning.acceptance import PUBLISHED, SELF
from offload_rt.planning.alternatives import Alternatives, Sweep, short_context
from offload_rt.planning.drafters import RankedDrafter
from offload_rt.planning.forecast import Forecast


def show(forecast: Forecast, others: Alternatives) -> None:
    """Print a forecast with its alternatives; the verdict is the last line."""
    machine = forecast.machine
    _print_placement(forecast)
    print(f"predicted: {format_speed(forecast.run.seconds_per_token)}")
    _print_trees(forecast)
    if forecast.mode:
        _print(f"mixture: a run reads {forecast.mode}")
    for place, placed in others.places.items():
        _print(f"with the draft model {place}: {format_speed(placed.run.seconds_per_token)}")
    _print(f"the bottleneck is {forecast.bound}")
    for name, share in forecast.busy.items():
        link = "host-to-card link" if name == "host" else "disk"
        print(f"the {link} is busy for {share:.1%} of a pass")
    if len(forecast.topology) > 1:
        _print(f"acceptance: {forecast.acceptance_source}")
    for sentence in filter(None, (*machine.sources, short_context(forecast))):
        _print(sentence)
    if others.formats:
        _print_formats(others.formats, machine.decode_gbps)
    if others.experts:
        _print_experts(forecast, others.experts)
    if others.drafters:
        _print_drafters(others.drafters)
    if others.sweep is not None:
        _print_curve(others.sweep)
    verdict = _verdict(forecast)
    fastest = others.drafters[0].forecast if others.drafters else None
    if fastest and fastest.run.seconds_per_token < forecast.run.seconds_per_token:
        verdict += f"; with {others.drafters[0].title}: {_verdict(fastest)}"
    print()
    _print(f"verdict: {verdict}")


def _verdict(forecast: Forecast) -> str:
    return f"{forecast.verdict}, {format_speed(forecast.run.seconds_per_token)}"


def _print_placement(forecast: Forecast) -> None:
    fitted = forecast.memory_plan
    config = forecast.request.config
    models = " with ".join(filter(None, (config.model, config.draft_model)))
    title = f"{models} on {forecast.machine.title}, {forecast.request.models[0].dtype}"
    table = placement_table(title, fitted.plan, fitted.cache_rows)
    for name, rate in forecast.machine.links:
        if name in forecast.moved:
            nbytes = format_size(forecast.moved[name])
            table.add_row(f"bytes per pass at {rate:.2f} GB/s", f"{name} link", nbytes)
    rows = fitted.plan.pass_bytes.rows
    if rows is not None:
        context = fitted.max_model_len - 1
        item = f"KV cache part, after {context} tokens"
        table.add_row(item, f"{rows.tier} link", format_size(rows.pass_nbytes(context)))
    print_table(table)


def _print_trees(forecast: Forecast) -> None:
    run = forecast.run
    topology = forecast.topology
    draft = forecast.request.models[1]
    if draft is not None and draft.rounding != "none":
        print(f"draft model quantised to {draft.rounding}: {format_size(draft.nbytes)}")
    if len(topology) > 1:
        _print(
            f"trees of {len(topology)} nodes on {topology.n_levels} levels:"
            f" {run.tokens_per_pass:.2f} tokens per pass of {run.pass_s:.2f} s,"
            f" including {forecast.draft_s:.2f} s of drafting"
        )
    elif forecast.memory_plan.limits.n_nodes > 1 and draft is None:
        _print(
            f"the acceptance of --drafter {forecast.request.config.drafter} depends on the text:"
            " this is a forecast of plain decoding"
        )
    if draft is not None or len(topology) > 1:
        plain_s = forecast.plain.seconds_per_token
        advice = f"drafting is {plain_s / run.seconds_per_token:.2f} times as fast"
        if plain_s < run.seconds_per_token:
            advice = "it is faster: omit the draft model, or lower --max-model-len"
        _print(f"plain decoding: {format_speed(plain_s)}; {advice}")


def _print_formats(
    by_format: Mapping[str, Mapping[str, Forecast | None]], decode_gbps: float
) -> None:
    first, drafters = next(iter(by_format.items()))
    heads = "", "plain pass reads", "plain", *(f"with {name}" for name in list(drafters)[1:])
    print("\nforecast by weight format, tokens/s (s per token)")
    rows = (
        (name, _traffic(row["none"]), *map(_speed, row.values())) for name, row in by_format.items()
    )
    print_rows(heads, rows)
    share = f"lossless layers have {LOSSLESS_SHARE:.2f} of their bytes"
    _print(f"assumed: {share}, decoding writes {decode_gbps:g} GB/s")
    fitting = {way.run.seconds_per_token: name for name, way in drafters.items() if way}
    if len(fitting) > 1:
        name = fitting[min(fitting)].replace("none", "plain decoding")
        _print(f"fastest forecast with {first} weights: {name}, {format_speed(min(fitting))}")
    if (itself := drafters.get(SELF)) is not None:
        _print(f"acceptance of --drafter self: {itself.request.acceptance.source}")


def _print_experts(forecast: Forecast, ways: Mapping[str, Forecast | None]) -> None:
    print("\nforecast of plain decoding by transferred weights")
    chosen = {forecast.mode: " (the mode of a run)"}
    rows = ((name + chosen.get(name, ""), _traffic(way), _speed(way)) for name, way in ways.items())
    print_rows(("", "bytes per pass", "tokens/s"), rows)
    model = forecast.request.config.model.lower().rpartition("/")[2]
    for line in PUBLISHED["rates"].get(model, ()):
        _print(f"published: {line}")
    plan = forecast.memory_plan.plan
    touched = plan.touched
    assert touched is not None and plan.experts is not None
    print(f"experts per layer: {touched.n_experts}, of which a token needs {touched.n_used}")
    _print(
        f"on average the device holds {touched.n_resident:.0f} experts of a layer,"
        f" and host memory {plan.experts.n_on_host / touched.n_layers:.0f}"
    )
    _print(
        "assumed: all experts are equally frequent; the CPU of a GPU machine reads"
        f" {forecast.machine.ram_gbps:g} GB/s of weights"
    )


def _print_drafters(choices: Iterable[RankedDrafter]) -> None:
    print("\nforecast by drafter, tokens/s (s per token)")
    rows = []
    for choice in choices:
        size = format_size(choice.nbytes) if choice.nbytes else ""
        tokens, speed = "", "no forecast"
        if forecast := choice.forecast:
            tokens, speed = f"{forecast.run.tokens_per_pass:.2f}", _speed(forecast)
            if choice.drafter != "none" and len(forecast.topology) == 1:
                tokens, speed = "", "does not pay"
        rows.append((choice.title, size, tokens, speed))
    print_rows(("", "drafter size", "tokens per pass", "tokens/s"), rows)
    for choice in choices:
        _print(f"{choice.title}: {choice.source}")


def _traffic(forecast: Forecast | None) -> str:
    """Bytes of a pass over its busiest link."""
    return "" if forecast is None else format_size(max(forecast.moved.values(), default=0))


def _speed(forecast: Forecast | None) -> str:
    if forecast is None:
        return "does not fit"
    seconds = forecast.run.seconds_per_token
    return f"{1 / seconds:.2f}" + (f" ({seconds:.2f} s)" if seconds > 1 else "")


def _print_curve(curve: Sweep) -> None:
    print(f"\ntokens/s by {curve.over}")
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(justify="right")
    # The numbers and the bottleneck take 60 columns.
    longest = max(min(columns() - 60, 40), 10)
    best_s = min((point.run.seconds_per_token for _, point in curve.points if point), default=0.0)
    for x, point in curve.points:
        if point is None:
            table.add_row(f"{x:.6g}", "", "", "does not fit")
        else:
            rate = 1 / point.run.seconds_per_token
            bar = "#" * max(round(longest * rate * best_s), 1)
            table.add_row(f"{x:.6g}", f"{rate:.3f}", bar, point.bound.split(":")[0])
    print_table(table)


def show_json(forecast: Forecast, others: Alternatives) -> None:
    """Print a forecast with its alternatives as one JSON object."""
    request = forecast.request
    machine = forecast.machine
    fitted = forecast.memory_plan
    draft = request.models[1]
    content = {
        "model": request.config.model,
        "draft_model": request.config.draft_model,
        "draft_quantize": draft.rounding if draft else None,
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
        "sweep": None,
    }
    if (curve := others.sweep) is not None:
        points = [{"x": x, **_figures(point)} for x, point in curve.points]
        content["sweep"] = {"over": curve.over, "points": points}
    print(json.dumps(content, default=str))  # dtypes


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


def placement_table(title: str, plan: Plan, cache_rows: int) -> Table:
    """Return the placement as a table."""
    reserved = plan.reserved
    split = plan.split
    tower = "slots of the vision tower" if reserved.streamed_images else "vision tower, resident"
    n_rows = cache_rows if split is None else split.n_on_device
    on_device = {
        "embedding, last norm, head": reserved.non_layer,
        f"cache of {n_rows} tokens{'' if split is None else ', its slots'}": reserved.cache,
        "activations": reserved.scratch,
        "draft model, its cache and distributions": reserved.draft,
        "4-bit copies of the other layers": plan.copies_nbytes,
        "reserved for libraries": reserved.libraries,
        "CUDA graphs": reserved.graphs,
        f"{tower}, image features": reserved.images,
        f"{plan.n_slots} slots": plan.n_slots * plan.slot_nbytes,
        "buffers of lossless weights": plan.link.buffer if plan.n_slots else 0,
    }
    rows = [(item, "device", nbytes) for item, nbytes in on_device.items()]
    rest = ""
    if experts := plan.experts:
        n_on_disk = experts.n_blocks - plan.n_expert_slots - experts.n_on_host
        held = {"device": plan.n_expert_slots, "host": experts.n_on_host, "disk": n_on_disk}
        for tier, n in held.items():
            rows.append((f"{n} of {experts.n_blocks} experts", tier, n * experts.nbytes))
        rest = ", without experts"
    if split is not None:
        nbytes = split.n_blocks * split.block_nbytes * len(plan.tiers)
        rows.append((f"cache of {split.n_offloaded} tokens", plan.kv_tier, nbytes))
    for tier in ("device", "host", "disk"):
        layers = f"{plan.tiers.count(tier)} of {len(plan.tiers)} layers{rest}"
        rows.append((layers, tier, plan.on(tier)))
    rows.append(("vision tower, streamed for each image", "disk", reserved.streamed_images))
    nbytes = plan.n_host_slots * plan.host_slot_nbytes
    rows.append((f"{plan.n_host_slots} slots", "host", nbytes))
    size = Column("size", justify="right")
    table = Table("item", "where", size, title=title.replace("torch.", ""))
    for item, where, nbytes in rows:
        if nbytes > 0:
            table.add_row(item, where, format_size(nbytes))
    used = f"{format_size(plan.device_nbytes)} of {format_size(plan.budget.device)}"
    table.add_row("used of the budget", "device", used, end_section=True)
    return table


def _print(sentence: str) -> None:
    """Print to stdout, wrapped between words to the terminal, at most 100 columns."""
    print(fill(sentence, min(columns(), COLUMNS), break_long_words=False, break_on_hyphens=False))
