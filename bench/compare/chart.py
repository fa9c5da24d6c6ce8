"""The comparison as a picture: a dot for each system, its floor beside it.

`python -m bench.compare.chart docs/compare.png` prints and draws the last line of
bench/results/compare.jsonl again.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common.measure import ROOT
from bench.compare.outcome import Row, table
from offload_rt.config import format_size

_RESULTS = ROOT / "bench/results/compare.jsonl"
_COLOURS = {"ours": "#d1602f", "disk": "#2f6aa8", "host": "#2f6aa8", "memory": "#8c8c8c"}
_MEANINGS = {
    "ours": "offload_rt, weights from the disk or over the link",
    "disk": "weights from the disk",
    "host": "weights over the link",
    "memory": "all weights in memory",
}
_GROUPS = {False: "one token a pass", True: "with a draft model"}


def caption(told: Mapping[str, Any]) -> str:
    """The two lines above the picture. told: the JSON object of the comparison."""
    weights, budget = (format_size(told[name]) for name in ("model_bytes", "budget_bytes"))
    sizes = f"{weights} of weights, budget {budget}"
    disk = f"disk up to {max(told['gbps']['disk']):.2f} GB/s"
    return f"{told['model']}: {sizes} where weights are offloaded\n{disk}; {told['machine']}"


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG of seconds per token of the rows with figures, plain decoding first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {
        drafts: [row for row in rows if row.seconds_per_token and row.drafts == drafts]
        for drafts in _GROUPS
    }
    groups = {drafts: group for drafts, group in groups.items() if group}
    shown = [row for group in groups.values() for row in group]
    figure, all_axes = pyplot.subplots(
        len(groups), squeeze=False, sharex=True, figsize=(9.6, 2.2 + 0.45 * len(shown)),
        layout="constrained",
        height_ratios=[len(group) + 0.4 for group in groups.values()],
    )  # fmt: skip
    for axes, (drafts, group) in zip(all_axes[:, 0], groups.items(), strict=True):
        _draw_group(axes, _GROUPS[drafts], group)
    _scale(axes, shown)
    _legend(figure, axes, shown)
    question = "Seconds per token: the same model, prompts and tokens"
    figure.suptitle(question, x=0.01, ha="left", fontweight="bold")
    all_axes[0, 0].set_title(title, loc="left", fontsize=8.5, color="#555555", pad=14)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw_group(axes: Any, title: str, rows: Sequence[Row]) -> None:
    for i, row in enumerate(rows):
        _draw_row(axes, i, row)
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_ylabel(title, fontsize=9, color="#555555")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(color="#e8e8e8")
    axes.set_axisbelow(True)


def _draw_row(axes: Any, i: int, row: Row) -> None:
    seconds = row.seconds_per_token
    colour = _COLOURS[_kind(row)]
    axes.hlines(i, seconds.least, seconds.largest, color=colour, lw=1.5)
    axes.plot([seconds.median], [i], "o", ms=9, color=colour)
    axes.plot([row.floor_s], [i], "|", ms=15, mew=2, color="black")
    per_pass = f", {row.tokens_per_pass:.1f} tokens a pass" if row.tokens_per_pass > 1 else ""
    memory = (row.peak_bytes + row.device_bytes) / 2**30
    figures = f"{seconds.median:.3f} s{per_pass}, {memory:.1f} GiB"
    axes.text(max(seconds.largest, row.floor_s) * 1.12, i, figures, va="center", fontsize=9)


def _scale(axes: Any, shown: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    floors = [row.floor_s for row in shown if row.floor_s]
    least = min([*floors, *(row.seconds_per_token.least for row in shown)])
    largest = max(row.seconds_per_token.largest for row in shown)
    axes.set(xscale="log", xlim=(least / 1.6, largest * 4))
    axes.set_xlabel("seconds per token, log scale: median, least, largest; GiB: peak of a process")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Any, axes: Any, shown: Sequence[Row]) -> None:
    kinds = dict.fromkeys(map(_kind, shown))
    handles = [
        axes.plot([], [], "o", ms=9, color=_COLOURS[kind], label=_MEANINGS[kind])[0]
        for kind in kinds
    ]
    mark = {"ms": 14, "mew": 2, "color": "black", "ls": ""}
    floor = axes.plot([], [], "|", label="floor: moving the bytes, nothing else", **mark)
    figure.legend(
        handles=[*handles, *floor], loc="outside lower center", ncols=2, frameon=False, fontsize=9
    )


def _kind(row: Row) -> str:
    return "ours" if row.name.startswith("offload_rt") else str(row.source)


def main() -> None:
    """Print and draw the last record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, help="PNG to write")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="draws the last line")
    flags = parser.parse_args()
    told = json.loads(flags.results.read_text(encoding="utf-8").splitlines()[-1])
    rows = [Row.of(entry) for entry in told["rows"]]
    print(table(rows))
    draw(rows, caption(told), flags.picture)


if __name__ == "__main__":
    main()
