"""The timeline of a run: spans in lanes, written as a Chrome trace (chrome://tracing, Perfetto)."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from offload_rt.system.files import write_atomically

FORMAT = "offload_rt timeline 1"
# Lanes of a run. A link has one for each of its slots, and one for why it stands still; see `slot_lane` and `waits`. Keys and
# values come over the link of the layers, through slots of their own.
DISK, LINK, KV, WAIT, COMPUTE, DRAFT, VERIFY = "disk", "link", "keys and values", "wait", "compute", "draft", "verify"
EXPERTS = "experts"
_ORDER = (DISK, LINK, EXPERTS, KV, WAIT, COMPUTE, DRAFT, VERIFY)
# Why a link stands still.
SLOTS_FULL, NOTHING_ASKED = "slots full", "nothing asked for"


def slot_lane(link: str, slot: int) -> str:
    """The lane of what a link brings into a slot."""
    return f"{link}, slot {slot}"


def waits(link: str) -> str:
    """The lane of the reasons for which a link stands still."""
    return f"{link}, waits"


def span_name(link: str, i: int) -> str:
    """The name of what comes i-th in a pass."""
    kind = {KV: "rows", EXPERTS: "expert"}.get(link, "layer")
    return f"{kind} {i}"


class Span(NamedTuple):
    """Something that took from `start_s` to `end_s` on the clock of `time.perf_counter`.

    Made while the run goes on: a frozen dataclass takes twice as long to make (1.3 us against 0.6).
    """

    lane: str
    name: str
    start_s: float
    end_s: float


class Trace:
    """Collects spans from several threads; collects nothing unless it is on."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self._spans: list[Span] = []
        self._states: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Record how long the body of a `with` takes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, name, started, time.perf_counter())

    def add(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """Record what was timed elsewhere, by the clock of `time.perf_counter`."""
        if self.on:
            with self._lock:
                self._spans.append(Span(lane, name, start_s, end_s))

    def state(self, lane: str, name: str | None) -> None:
        """From now on, until told otherwise, a lane is in a state; None: in no state worth showing."""
        if not self.on:
            return
        now = time.perf_counter()
        with self._lock:
            if lane in self._states:
                self._spans.append(Span(lane, *self._states.pop(lane), now))
            if name is not None:
                self._states[lane] = (name, now)

    def write(self, path: Path) -> None:
        """Write the spans and states so far, lanes in the order of the way of a layer. Raises OSError."""
        now = time.perf_counter()
        with self._lock:
            lasting = [Span(lane, name, since, now) for lane, (name, since) in self._states.items()]
            spans = sorted([*self._spans, *lasting], key=lambda span: span.start_s)
        lanes = sorted({span.lane for span in spans}, key=lane_order)
        start = spans[0].start_s if spans else 0.0
        events = [event for i, lane in enumerate(lanes) for event in _titles(i, lane)]
        for lane, name, start_s, end_s in spans:
            times = {"ts": round((start_s - start) * 1e6, 1), "dur": round((end_s - start_s) * 1e6, 1)}
            events.append({"ph": "X", "name": name, "pid": 0, "tid": lanes.index(lane), **times})
        write_atomically(path, json.dumps({"traceEvents": events, "otherData": {"format": FORMAT}}))


def lane_order(lane: str) -> tuple[int, str]:
    """Sorts lanes in the order of the way of a layer."""
    kind = lane.partition(",")[0]
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), lane)


def _titles(i: int, lane: str) -> list[dict[str, object]]:
    """What makes a viewer show a lane by its name, and lanes in their order."""
    return [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": lane}},
        {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": i, "args": {"sort_index": i}},
    ]
