"""The comparison as a picture: a bar for each system, its floor marked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.compare.outcome import Row

_COLOURS = {"disk": "#4878a8", "host": "#4878a8", "memory": "#b8b8b8"}
_OURS = "#d1602f"
_MEANINGS = {
    "ours": "offload_rt, weights from the disk or over the link",
    "disk": "weights from the disk",
    "host": "weights over the link",
    "memory": "all weights in memory",
}


def draw(rows: Sequence[Row], caption: str, path: Path) -> None:
    """Write a PNG of seconds per token, shorter is faster; rows without figures are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.seconds_per_token is not None]
    figure, axes = pyplot.subplots(figsize=(9.6, 2.1 + 0.5 * len(shown)), layout="constrained")
    for i, row in enumerate(shown):
        _bar(axes, i, row)
    _scale(axes, shown)
    _legend(figure, axes, shown)
    axes.set_title(caption, loc="left", fontsize=8.5, color="#555555")
    figure.suptitle("Seconds per token: the same model, prompts and tokens", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _scale(axes: Any, shown: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    least = min(min(row.floor_s, row.seconds_per_token.least) for row in shown)
    largest = max(row.seconds_per_token.largest for row in shown)
    axes.set(xscale="log", xlim=(least / 1.6, largest * 2.9))
    axes.set_xlabel("seconds per token, log scale; thin lines: least to largest; GiB: peak of the process")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(shown)), [row.title for row in shown])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", which="major", color="#e4e4e4")
    axes.set_axisbelow(True)


def _legend(figure: Any, axes: Any, shown: Sequence[Row]) -> None:
    from matplotlib.patches import Patch

    kinds = dict.fromkeys("ours" if _is_ours(row) else row.source for row in shown)
    handles = [Patch(color=_OURS if kind == "ours" else _COLOURS[kind], label=_MEANINGS[kind]) for kind in kinds]
    floor = axes.plot([], [], "|", ms=14, mew=2, color="black", label="floor: moving the bytes, nothing else")
    figure.legend(handles=[*handles, *floor], loc="outside lower center", ncols=2, frameon=False, fontsize=9)


def _bar(axes: Any, i: int, row: Row) -> None:
    seconds = row.seconds_per_token
    axes.barh(i, seconds.median, height=0.62, color=_OURS if _is_ours(row) else _COLOURS[row.source])
    axes.hlines(i, seconds.least, seconds.largest, color="#333333", lw=1)
    axes.plot([row.floor_s], [i], "|", ms=17, mew=2, color="black")
    per_pass = f", {row.tokens_per_pass:.1f} tokens a pass" if row.tokens_per_pass > 1 else ""
    told = f"{seconds.median:.3f} s{per_pass}, {(row.peak_bytes + row.device_bytes) / 2**30:.1f} GiB"
    axes.text(max(seconds.largest, row.floor_s) * 1.07, i, told, va="center", fontsize=9)


def _is_ours(row: Row) -> bool:
    return row.name.startswith("offload_rt")
