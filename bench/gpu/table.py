"""Table of GPU measurements, created from the result files."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

BEGIN = "<!-- bench.gpu: begin -->"
END = "<!-- bench.gpu: end -->"
_MISSING = "not measured yet"
_COUNTS = re.compile(r"\d+ (?:passed|failed|errors?|skipped)")


def table(results: Path) -> str:
    """Return a Markdown table: a row per target, with its figure or the reason of its absence."""
    by_section = {
        path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))
    }
    sections: dict[str, list[str]] = {}
    for name, entry in by_section.items():
        device = f"{entry['device']}, torch {entry['torch']}, commit {entry['commit']}"
        sections.setdefault(device, []).append(name)
    devices = [f"{device} ({', '.join(names)})" for device, names in sorted(sections.items())]
    head = "Nothing has been measured on a card yet."
    if devices:
        head = f"Measured on {'; '.join(devices)}."
    rows = [
        f"| {what} | {target} | {_figure(by_section, section, read)} |"
        for what, target, section, read in _ROWS
    ]
    return "\n".join([head, "", "| what | target | measured |", "|---|---|---|", *rows])


def written_into(text: str, made: str) -> str:
    """The text with the part between the marks replaced. Raises ValueError without marks."""
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def _figure(by_section: dict[str, Any], section: str, read: Callable[[Any], str]) -> str:
    entry = by_section.get(section)
    if entry is None:
        return _MISSING
    try:
        return read(entry["result"])
    except (KeyError, StopIteration, IndexError, TypeError):
        return f"failed: {entry['failed']}".replace("|", "/") if "failed" in entry else _MISSING


def _pass_of(result: Any, rows: int) -> dict[str, Any]:
    return next(entry for entry in result["passes"] if entry["rows"] == rows)


def _against_floor(result: Any) -> str:
    entry = _pass_of(result, 1)
    seconds = median(entry["seconds"])
    return f"{seconds / entry['floor_s']:.3f} ({seconds:.2f} s at {entry['link_gbps']:.1f} GB/s)"


def _against_plain(result: Any) -> str:
    large, plain = (median(_pass_of(result, rows)["seconds"]) for rows in (768, 1))
    return f"{large / plain:.3f}"


def _busy(result: Any) -> str:
    return ", ".join(
        f"{min(run['link_busy'] for run in entry['runs']):.1%} at T={entry['temperature']}"
        for entry in result["generation"]
    )


def _paced(result: Any) -> str:
    entry = result["generation"][0]
    run = entry["runs"][-1]
    return (
        f"{run['measured_seconds_per_token']:.2f} s; {entry['plain_s']:.2f} s;"
        f" {entry['times_faster']:.1f}x; {run['link_busy']:.1%} of {run['n_passes']} passes"
    )


def _faster(result: Any) -> str:
    return ", ".join(
        f"{entry['times_faster']:.2f}x at T={entry['temperature']}"
        for entry in result["generation"]
    )


def _attention(result: Any) -> str:
    times = {name: spread["median"] for name, spread in result["768"].items() if "median" in spread}
    ours = times["tree_attention"]
    dense = min(times[name] for name in times if name.startswith("sdpa"))
    against = result["768"]["tree_attention against"]
    return (
        f"{dense / ours:.2f}x faster; {against['flash, no mask']:.2f}x its time;"
        f" {against['floor']:.2f}x the floor"
    )


def _level(result: Any) -> str:
    entry = next(shape for shape in result["shapes"] if shape["shape"] == "llama-2-7b")
    return ", ".join(
        f"{n} rows {median(times) / entry['floor_s']:.2f}" for n, times in entry["levels"].items()
    )


def _products(result: Any) -> str:
    return ", ".join(
        f"{n} rows {times['int4']['median'] / times['bf16']['median']:.2f}"
        for n, times in result.items()
        if n.isdecimal()
    )


def _onchip(result: Any) -> str:
    return ", ".join(
        f"{entry['shape']} {entry['times_faster']:.2f}x"
        for entry in result["shapes"]
        if "times_faster" in entry
    )


def _pinning(result: Any) -> str:
    return ", ".join(
        f"{name} {result['nbytes'] / entry['seconds'] / 1e9:.1f}"
        for name, entry in result.items()
        if name != "nbytes"
    )


def _verdicts(result: Any) -> str:
    return "; ".join(
        f"{name.removeprefix('tests/')}: {', '.join(_COUNTS.findall(verdict)) or verdict}"
        for name, verdict in result.items()
    ).replace("|", "/")


def _peers(result: Any) -> str:
    return ", ".join(
        f"{name} failed: {entry['failed']}"
        if "failed" in entry
        else f"{name} {entry['seconds_per_token']:.2f} s"
        for name, entry in result.items()
    )


_ROWS: tuple[tuple[str, str, str, Callable[[Any], str]], ...] = (
    ("70B shape on a card of 24 GB: pass of one token / (streamed bytes / pinned bandwidth)",
     "<= 1.03", "streamed", _against_floor),
    ("pass of 768 nodes / pass of one token", "<= 1.05", "streamed", _against_plain),
    ("link busy while generating", ">= 97 %", "generation", _busy),
    ("seconds per token against plain streaming, chosen tree, acceptance of the demonstration pair",
     ">= 10x", "generation", _faster),
    ("the same with a link slowed to 25 GB/s, T=0: seconds per token; plain; ratio; link busy",
     "0.28 s; -; >= 10x; >= 97 %", "paced", _paced),
    ("the same shape by peers, seconds per token", "20x and 10x slower", "peers", _peers),
    ("tree attention, 768 nodes, 4,096 before: against SDPA with a dense mask; unmasked flash; "
     "products and memory",
     ">= 2x; <= 1.2x; -", "attention", _attention),
    ("a level of a 7B draft / (its bytes / device bandwidth)", "<= 1.2", "onchip", _level),
    ("a product of a 7B draft in int4 / in bfloat16", "< 1", "products", _products),
    ("whole models on the card, trees against plain", "", "onchip", _onchip),
    ("12 GB of host memory pinned, GB/s", "", "pinning", _pinning),
    ("ops against their references, whole models", "all", "correctness", _verdicts),
    ("kernels under the memory checker", "no error", "memcheck", _verdicts),
)  # fmt: skip
