"""`python -m offload_rt.report FILE`: what a timeline written by `--trace` says, as a picture and a few lines.

The picture shows the whole run above and two of its steps below: what the link brought into which slot and why it stood still,
what was computed, drafted and verified, and when computing waited for a layer.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offload_rt.cli.process import exit_code, run_program
from offload_rt.config import Parser
from offload_rt.errors import SettingsError, TraceError
from offload_rt.system.trace import (
    COMPUTE,
    DISK,
    DRAFT,
    FORMAT,
    LINK,
    NOTHING_ASKED,
    SLOTS_FULL,
    VERIFY,
    WAIT,
    Span,
    waits,
)

_ACTIVITIES = (COMPUTE, DRAFT, VERIFY, WAIT)
# Of link and compute standing still, what is too short to be told.
_LEAST_TOLD = 0.0005


@dataclass(frozen=True)
class Shares:
    """Of the seconds from the first draft to the last verdict.

    link       in which a layer was on its way into a slot
    compute    in which layers or the head were computed; draft, verify likewise; wait, in which a layer was awaited
    rest       in which none of these four went on
    idle       why the link stood still -> while what else went on -> share
    """

    seconds: float
    n_steps: int
    link: float
    compute: float
    draft: float
    verify: float
    wait: float
    rest: float
    idle: dict[str, dict[str, float]]


def read(path: Path) -> list[Span]:
    """The spans of a timeline, by their start. Raises TraceError for a file that holds none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}", change="give the file that --trace wrote") from error
    except ValueError as error:
        raise TraceError(
            f"{path} is not a timeline, or not all of one",
            have=f"no JSON ({error})",
            change="write it again by --trace",
        ) from error
    try:
        return _spans(raw)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TraceError(
            f"{path} is not a timeline of offload_rt", need=FORMAT, change="write one by --trace"
        ) from error


def _spans(raw: dict[str, Any]) -> list[Span]:
    if raw["otherData"]["format"] != FORMAT:
        raise ValueError("another format")
    events = raw["traceEvents"]
    lanes = {event["tid"]: str(event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    spans = [
        Span(lanes[event["tid"]], str(event["name"]), event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event["ph"] == "X"
    ]
    if not all(np.isfinite((span.start_s, span.end_s)).all() and span.end_s >= span.start_s for span in spans):
        raise ValueError("a span that ends before it begins")
    return sorted(spans, key=lambda span: span.start_s)


def shares(spans: Sequence[Span]) -> Shares:
    """Where the time of a run went. Raises TraceError for one of which no pass came to its end."""
    start, end = window(spans)
    seconds = end - start
    of = {lane: _union(_of(spans, lane), start, end) for lane in _ACTIVITIES}
    link = _union(_of(spans, LINK), start, end)
    busy = _union([pair for pairs in of.values() for pair in pairs], start, end)
    return Shares(
        seconds,
        len(_steps(spans)),
        _length(link) / seconds,
        *(_length(of[lane]) / seconds for lane in _ACTIVITIES),
        rest=1 - _length(busy) / seconds,
        idle=_idle(spans, link, of, (start, end)),
    )


def _idle(
    spans: Sequence[Span],
    link: list[tuple[float, float]],
    of: dict[str, list[tuple[float, float]]],
    run: tuple[float, float],
) -> dict[str, dict[str, float]]:
    """Why the link stood still, and meanwhile what else went on; drafting counts before what it contains."""
    if not link:
        return {}
    found, seconds = {}, run[1] - run[0]
    gaps = _without([run], link)
    reasons = [span for span in spans if span.lane == waits(LINK)]
    told = {why: _union([(s.start_s, s.end_s) for s in reasons if s.name == why], *run) for why in _names(reasons)}
    known = _union([pair for pairs in told.values() for pair in pairs], *run)
    told["between two reads"] = _without([run], known)
    for why, pairs in told.items():
        still = _both(pairs, gaps)
        during = {lane: _length(_both(still, of[lane])) / seconds for lane in _ACTIVITIES}
        during["rest"] = max(_length(still) / seconds - sum(during.values()), 0.0)
        found[why] = {lane: share for lane, share in during.items() if share >= _LEAST_TOLD}
    return {why: during for why, during in found.items() if during}


def window(spans: Sequence[Span]) -> tuple[float, float]:
    """From the start of the first draft to the end of the last verdict."""
    drafts, verdicts = _of(spans, DRAFT), _of(spans, VERIFY)
    if not drafts or not verdicts or max(end for _, end in verdicts) <= drafts[0][0]:
        raise TraceError("the timeline shows no pass from draft to verdict", change="trace a run of at least one token")
    return drafts[0][0], max(end for _, end in verdicts)


def text(found: Shares) -> str:
    """A few lines for people."""
    lines = [
        f"{found.seconds:.3f} s of {found.n_steps} passes: the link was busy {found.link:.1%} of the time",
        f"computing {found.compute:.1%}, drafting {found.draft:.1%}, verifying {found.verify:.1%}, "
        f"waiting for a layer {found.wait:.1%}, the rest {found.rest:.1%}",
    ]
    if found.link == 0:
        return "\n".join([*lines[1:], "nothing crossed the link: all layers were resident"])
    for why, during in sorted(found.idle.items(), key=lambda pair: -sum(pair[1].values())):
        meanwhile = ", ".join(f"{lane} {share:.1%}" for lane, share in during.items())
        lines.append(f"the link stood still {sum(during.values()):.1%}, {why}, during: {meanwhile}")
    return "\n".join(lines if found.idle else [*lines, "the link never stood still for long"])


def _of(spans: Sequence[Span], lane: str) -> list[tuple[float, float]]:
    """Start and end of the spans of a lane, or of all slots of a link."""
    return [(s.start_s, s.end_s) for s in spans if s.lane == lane or s.lane.startswith(f"{lane}, slot ")]


def _names(spans: Iterable[Span]) -> list[str]:
    return list(dict.fromkeys(span.name for span in spans))


def _steps(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.lane == VERIFY]


def _union(pairs: Iterable[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    """The intervals in which at least one of these goes on, cut to [start, end]."""
    joined: list[tuple[float, float]] = []
    for a, b in sorted((max(a, start), min(b, end)) for a, b in pairs):
        if b <= a:
            continue
        if joined and a <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(b, joined[-1][1]))
        else:
            joined.append((a, b))
    return joined


def _both(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The intervals in which two unions go on together."""
    found, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        a, b = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if a < b:
            found.append((a, b))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def _without(some: list[tuple[float, float]], others: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The parts of one interval, given as a union of one, in which none of a union goes on."""
    ((start, end),) = some
    edges = [start, *(edge for pair in others for edge in pair), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def _length(pairs: list[tuple[float, float]]) -> float:
    return sum(b - a for a, b in pairs)


_COLOURS = {DISK: "#8c6bb1", LINK: "#4878a8", COMPUTE: "#5a9e5a", DRAFT: "#e0a030", VERIFY: "#7b5aa6", WAIT: "#c44e52"}
# Where the colour is not that of the lane: why a link stands still, a tree around its levels, the head after the layers.
_NAMED = {SLOTS_FULL: "#d0d0d0", NOTHING_ASKED: "#303030", "tree": "#f4dcae", "head": "#2f6b2f"}
# Bars at least so wide, as a part of the panel, are told apart by a white edge; narrower ones would be all edge.
_LEAST_EDGED = 1 / 300


def draw(spans: Sequence[Span], found: Shares, path: Path) -> None:
    """Write a PNG: the whole run, and two steps from its middle. Raises SettingsError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise SettingsError(
            "the picture", need="matplotlib", have="none", change="pip install 'offload-rt[plot]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from offload_rt.cli.format import save_figure

    lanes, run, steps = _lanes(spans), window(spans), _two_steps(spans)
    shown = {"the whole run": run} | ({"two steps of it": steps} if steps != run else {})
    size = (12, 1.2 + len(shown) * (0.4 + 0.3 * len(lanes)))
    figure, panels = pyplot.subplots(len(shown), 1, figsize=size, layout="constrained", squeeze=False)
    for axes, (title, between) in zip(panels[:, 0], shown.items(), strict=True):
        _panel(axes, spans, lanes, between, run[0])
        axes.set_title(title, loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("seconds since the first draft")
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colour, label=name) for name, colour in _NAMED.items()]
    figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), frameon=False, fontsize=8)
    figure.suptitle(
        f"{found.seconds:.2f} s: link {found.link:.0%}, compute {found.compute:.0%}, draft {found.draft:.0%}, "
        f"verify {found.verify:.0%}, waiting for a layer {found.wait:.0%}",
        x=0.01,
        ha="left",
        fontsize=12,
    )
    save_figure(figure, path, dpi=110)


def _lanes(spans: Sequence[Span]) -> list[str]:
    """From top to bottom, in the order of the way of a layer."""
    order = (DISK, LINK, WAIT, COMPUTE, DRAFT, VERIFY)
    lanes = {span.lane for span in spans}
    return [lane for kind in order for lane in sorted(lanes) if lane.partition(",")[0] == kind]


def _two_steps(spans: Sequence[Span]) -> tuple[float, float]:
    """From one verdict to the second after it, about the middle of the run; all of a run that is shorter."""
    start, end = window(spans)
    ends = [start, *(span.end_s for span in _steps(spans))]
    if len(ends) < 4:
        return start, end
    middle = (len(ends) - 1) // 2
    return ends[middle - 1], ends[middle + 1]


def _panel(axes: Any, spans: Sequence[Span], lanes: list[str], shown: tuple[float, float], zero: float) -> None:
    a, b = shown
    for row, lane in enumerate(lanes):
        visible = [span for span in spans if span.lane == lane and span.end_s > a and span.start_s < b]
        bars = [(max(s.start_s, a) - zero, min(s.end_s, b) - max(s.start_s, a)) for s in visible]
        colours = [_NAMED.get(s.name, _COLOURS[lane.partition(",")[0]]) for s in visible]
        is_wide = bars and np.median([width for _, width in bars]) > (b - a) * _LEAST_EDGED
        edge = "white" if is_wide else "face"
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colours, edgecolor=edge, linewidth=0.6)
    axes.set(xlim=(a - zero, b - zero), ylim=(len(lanes) - 0.4, -0.6))
    axes.set_yticks(range(len(lanes)), lanes, fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    parser = Parser("python -m offload_rt.report", __doc__.split("\n\n")[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="written by python -m offload_rt.run --trace FILE")
    parser.add_argument("--out", type=Path, help="the picture; default: FILE with .png in place of its suffix")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    return exit_code(lambda: _report(parser.parse_args(arguments)))


def _report(flags: Namespace) -> None:
    spans = read(flags.file)
    found = shares(spans)
    out = flags.out or flags.file.with_suffix(".png")
    _check_folder(out)
    draw(spans, found, out)
    print(json.dumps(asdict(found)) if flags.json else f"{text(found)}\npicture: {out}")


def _check_folder(out: Path) -> None:
    folder = out.resolve().parent
    if not folder.is_dir():
        raise SettingsError(f"--out {out}", need="a folder that exists", have=f"no {folder}", change="make it")


if __name__ == "__main__":
    sys.exit(run_program(main))
