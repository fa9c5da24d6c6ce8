"""`offload-rt report FILE`: what a timeline written by `--trace` says, as a picture and a few
lines.

The picture shows the whole run above and two of its steps below: what the link brought into which
slot and why it was idle, what was computed, drafted and verified, and when computing waited for a
layer.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offload_rt.cli.flags import Parser
from offload_rt.cli.picture import check_picture, is_drawable, panels, save
from offload_rt.cli.process import exit_code
from offload_rt.errors import TraceError
from offload_rt.system import trace
from offload_rt.system.trace import COMPUTE, DISK, DRAFT, KV, LINK, VERIFY, WAIT, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ACTIVITIES = (COMPUTE, DRAFT, VERIFY, WAIT)
# Shares of idle time below this are not told.
_LEAST_TOLD = 0.0005


@dataclass(frozen=True)
class Shares:
    """Shares of the seconds from the first draft to the last verdict.

    link       in which a layer was on its way into a slot
    compute    in which layers or the head were computed; draft, verify likewise; wait, in which a
               layer was awaited
    rest       in which none of these four went on
    idle       why the link was idle -> what else went on meanwhile -> share
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
        if raw["otherData"]["format"] != trace.FORMAT:
            raise ValueError("another format")
        events = raw["traceEvents"]
        lanes = {
            event["tid"]: str(event["args"]["name"])
            for event in events
            if event["name"] == "thread_name"
        }
        spans = [
            Span(
                lanes[event["tid"]],
                str(event["name"]),
                event["ts"] / 1e6,
                (event["ts"] + event["dur"]) / 1e6,
            )
            for event in events
            if event["ph"] == "X"
        ]
    except OSError as error:
        raise TraceError(
            f"{path}: {error.strerror}", change="give the file that --trace wrote"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{path} is not a timeline, or not all of one"
        raise TraceError(problem, need=trace.FORMAT, change="write it again by --trace") from error
    return sorted(spans, key=lambda span: span.start_s)


class _Moments:
    """A window cut at every start and end of a span, so that in each piece the same things go
    on.
    """

    def __init__(self, spans: Sequence[Span], start: float, end: float) -> None:
        times = [time for span in spans for time in (span.start_s, span.end_s)]
        self._edges = np.unique(np.clip([start, *times, end], start, end))
        self.shares = np.diff(self._edges) / (end - start)

    def during(self, spans: Iterable[Span]) -> NDArray[np.bool_]:
        """(n_pieces,) whether one of these spans goes on."""
        found = np.zeros(len(self.shares), dtype=np.bool_)
        for span in spans:
            first, last = np.searchsorted(self._edges, (span.start_s, span.end_s))
            found[first:last] = True
        return found

    def share(self, pieces: NDArray[np.bool_]) -> float:
        """Of the window."""
        return float(self.shares[pieces].sum())


def shares(spans: Sequence[Span]) -> Shares:
    """Where the time of a run went. Raises TraceError for one of which no pass came to its end."""
    start, end = window(spans)
    moments = _Moments(spans, start, end)
    link = moments.during(
        span for span in spans if span.lane.startswith((f"{LINK}, slot ", f"{KV}, slot "))
    )
    reasons = [span for lane in (LINK, KV) for span in _of(spans, trace.waits(lane))]
    activities = {lane: moments.during(_of(spans, lane)) for lane in _ACTIVITIES}
    activities["rest"] = ~np.logical_or.reduce(list(activities.values()))
    return Shares(
        seconds=end - start,
        n_steps=len(_of(spans, VERIFY)),
        link=moments.share(link),
        **{lane: moments.share(pieces) for lane, pieces in activities.items()},
        idle=_idle(reasons, moments, ~link, activities) if link.any() else {},
    )


def _idle(
    reasons: Sequence[Span],
    moments: _Moments,
    idle: NDArray[np.bool_],
    activities: dict[str, NDArray[np.bool_]],
) -> dict[str, dict[str, float]]:
    """Why the link was idle, and what else went on meanwhile."""
    names = dict.fromkeys(span.name for span in reasons)
    by_name = {
        name: moments.during(span for span in reasons if span.name == name) for name in names
    }
    by_name["between two reads"] = ~moments.during(reasons)
    found = {}
    for name, pieces in by_name.items():
        during = {lane: moments.share(pieces & idle & other) for lane, other in activities.items()}
        found[name] = {lane: share for lane, share in during.items() if share >= _LEAST_TOLD}
    return {name: during for name, during in found.items() if during}


def window(spans: Sequence[Span]) -> tuple[float, float]:
    """From the start of the first draft to the end of the last verdict."""
    drafts = _of(spans, DRAFT)
    verdicts = _of(spans, VERIFY)
    end = max((span.end_s for span in verdicts), default=0.0)
    if not drafts or not verdicts or end <= drafts[0].start_s:
        raise TraceError(
            "the timeline shows no pass from draft to verdict",
            change="trace a run of at least one token",
        )
    return drafts[0].start_s, end


def text(found: Shares) -> str:
    """A few lines for people."""
    lines = [
        f"computing {found.compute:.1%}, drafting {found.draft:.1%}, verifying {found.verify:.1%}, "
        f"waiting for a layer {found.wait:.1%}, the rest {found.rest:.1%}"
    ]
    if found.link == 0:
        return "\n".join([*lines, "nothing crossed the link: all layers were resident"])
    lines = [
        (
            f"{found.seconds:.3f} s of {found.n_steps} passes: the link was busy {found.link:.1%}"
            " of the time"
        ),
        *lines,
    ]
    for why, during in sorted(found.idle.items(), key=lambda pair: -sum(pair[1].values())):
        meanwhile = ", ".join(f"{lane} {share:.1%}" for lane, share in during.items())
        lines.append(f"the link was idle {sum(during.values()):.1%}, {why}, during: {meanwhile}")
    return "\n".join(lines if found.idle else [*lines, "the link was never idle for long"])


def _of(spans: Sequence[Span], lane: str) -> list[Span]:
    return [span for span in spans if span.lane == lane]


_COLOURS = {
    DISK: "#8c6bb1", LINK: "#4878a8", KV: "#6fa8c8", COMPUTE: "#5a9e5a", DRAFT: "#e0a030",
    VERIFY: "#7b5aa6", WAIT: "#c44e52",
}  # fmt: skip
# Where the colour is not that of the lane: why a link is idle, a tree around its levels, the head
# after the layers.
_NAMED = {
    trace.SLOTS_FULL: "#d0d0d0",
    trace.NOTHING_ASKED: "#303030",
    "tree": "#f4dcae",
    "head": "#2f6b2f",
}
# Bars at least so wide, as a part of the panel, are told apart by a white edge; narrower ones would
# be all edge.
_LEAST_EDGED = 1 / 300


def draw(spans: Sequence[Span], found: Shares, path: Path) -> None:
    """Write a PNG: the whole run, and two steps from its middle."""
    from matplotlib.patches import Patch

    run = window(spans)
    steps = _two_steps(spans)
    lanes = sorted({span.lane for span in spans if span.end_s > run[0]}, key=trace.lane_order)
    shown = {"the whole run": run} | ({"two steps of it": steps} if steps != run else {})
    figure, rows = panels(len(shown), 1, (12, 1.2 + len(shown) * (0.4 + 0.3 * len(lanes))))
    for axes, (title, between) in zip(rows[:, 0], shown.items(), strict=True):
        _panel(axes, spans, lanes, between, run[0])
        axes.set_title(title, loc="left", fontsize=10)
    rows[-1, 0].set_xlabel("seconds since the first draft")
    patches = [Patch(color=colour, label=name) for name, colour in _NAMED.items()]
    figure.legend(
        handles=patches, loc="outside lower right", ncols=len(patches), frameon=False, fontsize=8
    )
    figure.suptitle(
        f"{found.seconds:.2f} s: link {found.link:.0%}, compute {found.compute:.0%}, draft "
        f"{found.draft:.0%}, "
        f"verify {found.verify:.0%}, waiting for a layer {found.wait:.0%}",
        x=0.01, ha="left",
    )  # fmt: skip
    save(figure, path, dpi=110)


def _two_steps(spans: Sequence[Span]) -> tuple[float, float]:
    """From one verdict to the second after it, about the middle of the run; all of a run that is
    shorter.
    """
    start, end = window(spans)
    ends = [start, *(span.end_s for span in _of(spans, VERIFY))]
    if len(ends) < 4:
        return start, end
    middle = (len(ends) - 1) // 2
    return ends[middle - 1], ends[middle + 1]


def _panel(
    axes: "Axes", spans: Sequence[Span], lanes: list[str], shown: tuple[float, float], zero: float
) -> None:
    a, b = shown
    for row, lane in enumerate(lanes):
        visible = [span for span in _of(spans, lane) if span.end_s > a and span.start_s < b]
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
    parser = Parser("offload-rt report", "What a timeline says, as a picture and a few lines.")
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="written by offload-rt run --trace FILE"
    )
    parser.add_argument(
        "--out", type=Path, help="the picture; default: FILE with .png in place of its suffix"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the text"
    )
    return exit_code(lambda: _report(parser.parse_args(arguments)))


def _report(flags: Namespace) -> None:
    spans = read(flags.file)
    found = shares(spans)
    picture = flags.out or flags.file.with_suffix(".png")
    if flags.out is not None:
        check_picture("--out", flags.out)
    print(json.dumps(asdict(found)) if flags.json else text(found), flush=True)
    if is_drawable():
        draw(spans, found, picture)
    told = (
        f"picture: {picture}"
        if is_drawable()
        else "no picture is drawn: pip install matplotlib to have one"
    )
    print(told, file=sys.stderr if flags.json else sys.stdout)
