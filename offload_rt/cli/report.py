"""`offload-rt report FILE`: busy and idle shares of a timeline written by `--trace`.

Perfetto (ui.perfetto.dev) and chrome://tracing draw the same file.
"""

import json
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offload_rt.cli.flags import Parser
from offload_rt.cli.process import command
from offload_rt.errors import TraceError
from offload_rt.system import trace
from offload_rt.system.trace import COMPUTE, DRAFT, KV, LINK, VERIFY, WAIT, Span

_ACTIVITIES = (COMPUTE, DRAFT, VERIFY, WAIT)


@dataclass(frozen=True)
class Shares:
    """Shares of the time from the first draft to the last verdict.

    link       a layer or KV block was in transfer
    compute    layers or the head were computed; draft and verify likewise
    wait       compute waited for a layer
    rest       none of these four activities
    idle       reason for the idle link -> concurrent activity -> share
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
    """Read the spans of a timeline, sorted by start. Raises TraceError for any other file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["otherData"]["format"] != trace.FORMAT:
            raise ValueError("unknown format")
        events = raw["traceEvents"]
        titles = (event for event in events if event["name"] == "thread_name")
        lanes = {event["tid"]: str(event["args"]["name"]) for event in titles}
        spans = []
        for event in (event for event in events if event["ph"] == "X"):
            times = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            spans.append(Span(lanes[event["tid"]], str(event["name"]), *times))
    except OSError as error:
        change = "pass the file that --trace wrote"
        raise TraceError(f"{path}: {error.strerror}", change=change) from error
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{path} is not a complete timeline of this version"
        change = "write one by `offload-rt run --trace FILE`"
        raise TraceError(problem, change=change) from error
    return sorted(spans, key=lambda span: span.start_s)


class _Pieces:
    """A window, cut at every start and end of a span."""

    def __init__(self, spans: Sequence[Span], start: float, end: float) -> None:
        times = [time for span in spans for time in (span.start_s, span.end_s)]
        self._edges = np.unique(np.clip([start, *times, end], start, end))

    def during(self, spans: Iterable[Span]) -> NDArray[np.bool_]:
        """Return for each piece whether a span covers it: (n_pieces,)."""
        covered = np.zeros(len(self._edges) - 1, dtype=np.bool_)
        for span in spans:
            first, last = np.searchsorted(self._edges, (span.start_s, span.end_s))
            covered[first:last] = True
        return covered

    def share(self, covered: NDArray[np.bool_]) -> float:
        """Return the share of these pieces in the window."""
        return float(np.diff(self._edges) @ covered / np.ptp(self._edges))


def shares(spans: Sequence[Span]) -> Shares:
    """Divide the time of a run. Raises TraceError without a completed pass."""
    drafts = _in_lane(spans, DRAFT)
    verdicts = _in_lane(spans, VERIFY)
    end = max((span.end_s for span in verdicts), default=0.0)
    if not drafts or not verdicts or end <= drafts[0].start_s:
        problem = "the timeline shows no pass from draft to verdict"
        raise TraceError(problem, change="trace a run of at least one token")
    start = drafts[0].start_s
    pieces = _Pieces(spans, start, end)
    slots = f"{LINK}, slot ", f"{KV}, slot "
    link = pieces.during(span for span in spans if span.lane.startswith(slots))
    reasons = [span for lane in (LINK, KV) for span in _in_lane(spans, trace.waits(lane))]
    activities = {lane: pieces.during(_in_lane(spans, lane)) for lane in _ACTIVITIES}
    activities["rest"] = ~np.logical_or.reduce(list(activities.values()))
    # The idle time of the link by reason and concurrent activity.
    by_reason = {
        name: pieces.during(span for span in reasons if span.name == name)
        for name in dict.fromkeys(span.name for span in reasons)
    }
    by_reason["between two reads"] = ~pieces.during(reasons)
    idle = {}
    for name, covered in by_reason.items() if link.any() else ():
        during = {
            lane: pieces.share(covered & ~link & active) for lane, active in activities.items()
        }
        if printed := {lane: share for lane, share in during.items() if share >= 0.0005}:
            idle[name] = printed
    return Shares(
        seconds=end - start,
        n_steps=len(verdicts),
        link=pieces.share(link),
        **{lane: pieces.share(covered) for lane, covered in activities.items()},
        idle=idle,
    )


def text(result: Shares) -> str:
    """Format the shares as a few lines."""
    activities = (
        f"computing {result.compute:.1%}, drafting {result.draft:.1%}, "
        f"verifying {result.verify:.1%}, waiting for a layer {result.wait:.1%}, "
        f"the rest {result.rest:.1%}"
    )
    if result.link == 0:
        return f"{activities}\nnothing crossed the link: all layers were resident"
    busy = f"the link was busy {result.link:.1%} of the time"
    lines = [f"{result.seconds:.3f} s of {result.n_steps} passes: {busy}", activities]
    for reason, during in sorted(result.idle.items(), key=lambda pair: -sum(pair[1].values())):
        concurrent = ", ".join(f"{lane} {share:.1%}" for lane, share in during.items())
        share = sum(during.values())
        lines.append(f"the link was idle {share:.1%}, {reason}, during: {concurrent}")
    return "\n".join(lines if result.idle else [*lines, "the link was never idle for long"])


def _in_lane(spans: Sequence[Span], lane: str) -> list[Span]:
    return [span for span in spans if span.lane == lane]


def new_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser("offload-rt report", "Print busy and idle shares of a timeline.")
    text = "written by offload-rt run --trace FILE"
    parser.add_argument("file", type=Path, metavar="FILE", help=text)
    text = "print one JSON object instead of the text"
    parser.add_argument("--json", action="store_true", help=text)
    return parser


@command(new_parser)
def main(flags: Namespace) -> None:
    """Run the command."""
    result = shares(read(flags.file))
    print(json.dumps(asdict(result)) if flags.json else text(result), flush=True)
