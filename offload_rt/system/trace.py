"""Timeline of a run: spans in lanes, written as a Chrome trace (chrome://tracing, Perfetto)."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from offload_rt.system.files import write_atomically

FORMAT = "offload_rt timeline 1"
# Lanes. A link has a lane per slot, and a lane for idle reasons; see `slot_lane` and `waits`.
# KV rows and the vision tower cross the layers' link through separate slots.
DISK = "disk"
LINK = "link"
KV = "keys and values"
IMAGES = "vision tower"
WAIT = "wait"
COMPUTE = "compute"
DRAFT = "draft"
VERIFY = "verify"
EXPERTS = "experts"
_ORDER = (DISK, LINK, EXPERTS, KV, IMAGES, WAIT, COMPUTE, DRAFT, VERIFY)
# Reasons for an idle link.
SLOTS_FULL = "slots full"
NOTHING_ASKED = "nothing asked for"


def slot_lane(link: str, slot: int) -> str:
    """Return the lane of transfers into a slot."""
    return f"{link}, slot {slot}"


def waits(link: str) -> str:
    """Return the lane of a link's idle reasons."""
    return f"{link}, waits"


def span_name(link: str, i: int) -> str:
    """Return the span name of the i-th block of a link."""
    kind = {KV: "rows", EXPERTS: "expert", IMAGES: "block"}.get(link, "layer")
    return f"{kind} {i}"


class Span(NamedTuple):
    """A span by `time.perf_counter`; no dataclass: 0.6 us instead of 1.3 us in passes."""

    lane: str
    name: str
    start_s: float
    end_s: float


class Trace:
    """Thread-safe collection of spans; collects nothing if `on` is False."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self._spans: list[Span] = []
        self._states: dict[str, tuple[str, float]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Record the duration of a `with` block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, name, started, time.perf_counter())

    def add(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """Record a span measured elsewhere by `time.perf_counter`."""
        if self.on:
            with self._lock:
                self._spans.append(Span(lane, name, start_s, end_s))

    def state(self, lane: str, name: str | None) -> None:
        """Set the state of a lane until the next call; None for no visible state."""
        if not self.on:
            return
        now = time.perf_counter()
        with self._lock:
            if lane in self._states:
                self._spans.append(Span(lane, *self._states.pop(lane), now))
            if name is not None:
                self._states[lane] = (name, now)

    def write(self, path: Path) -> None:
        """Write all spans and states so far, lanes in the order of `lane_order`. Raises OSError."""
        now = time.perf_counter()
        with self._lock:
            lasting = [Span(lane, name, since, now) for lane, (name, since) in self._states.items()]
            spans = sorted([*self._spans, *lasting], key=lambda span: span.start_s)
        lanes = sorted({span.lane for span in spans}, key=lane_order)
        start = spans[0].start_s if spans else 0.0
        events: list[dict[str, object]] = []
        for i, lane in enumerate(lanes):
            of_lane = {"ph": "M", "pid": 0, "tid": i}
            events.append({**of_lane, "name": "thread_name", "args": {"name": lane}})
            events.append({**of_lane, "name": "thread_sort_index", "args": {"sort_index": i}})
        for lane, name, start_s, end_s in spans:
            ts, dur = (round(s * 1e6, 1) for s in (start_s - start, end_s - start_s))
            event = {"ph": "X", "name": name, "pid": 0, "tid": lanes.index(lane)}
            events.append({**event, "ts": ts, "dur": dur})
        write_atomically(path, json.dumps({"traceEvents": events, "otherData": {"format": FORMAT}}))


def lane_order(lane: str) -> tuple[int, str]:
    """Return the sort key of a lane: from disk to verification."""
    kind = lane.partition(",")[0]
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), lane)
