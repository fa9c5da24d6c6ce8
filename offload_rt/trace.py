"""The timeline of a run: spans in lanes, written as a Chrome trace (chrome://tracing, Perfetto)."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from offload_rt.files import write_atomically


class Trace:
    """Collects spans from several threads; collects nothing unless it is on."""

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._spans: list[tuple[str, str, float, float]] = []
        self._lock = threading.Lock()

    def span(self, lane: str, name: str) -> AbstractContextManager[None]:
        """Record how long the body of a `with` takes."""
        return self._record(lane, name) if self._on else nullcontext()

    @contextmanager
    def _record(self, lane: str, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            with self._lock:
                self._spans.append((lane, name, started, ended))

    def write(self, path: Path) -> None:
        """Write the spans so far, in the order of their lanes' first use. Raises OSError."""
        with self._lock:
            spans = sorted(self._spans, key=lambda span: span[2])
        lanes = list(dict.fromkeys(lane for lane, *_ in spans))
        start = spans[0][2] if spans else 0.0
        events = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": lane}}
            for i, lane in enumerate(lanes)
        ]
        events += [
            {"ph": "X", "name": name, "pid": 0, "tid": lanes.index(lane), "ts": (a - start) * 1e6, "dur": (b - a) * 1e6}
            for lane, name, a, b in spans
        ]
        write_atomically(path, json.dumps({"traceEvents": events}))
