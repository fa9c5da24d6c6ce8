"""Traffic and busy time of a link."""

import threading
import time
from collections.abc import Callable


class LinkMeter:
    """Count bytes, and the time with at least one transfer in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_under_way = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._nbytes = 0
        self.waited_s = 0.0  # of the device for layers; written by a single thread at a time
        self.before_read: set[Callable[[], None]] = set()  # add the transfers finished so far

    def begin(self) -> None:
        """Record the start of a transfer."""
        with self._lock:
            if self._n_under_way == 0:
                self._since = time.perf_counter()
            self._n_under_way += 1

    def end(self, nbytes: int) -> None:
        """Record the end of a transfer of `nbytes` bytes."""
        with self._lock:
            self._n_under_way -= 1
            self._nbytes += nbytes
            if self._n_under_way == 0:
                self._busy_s += time.perf_counter() - self._since

    def add(self, nbytes: int, seconds: float) -> None:
        """Record a transfer timed elsewhere, e.g. by CUDA events."""
        with self._lock:
            self._nbytes += nbytes
            self._busy_s += seconds

    def read(self) -> tuple[int, float]:
        """Return total bytes and busy seconds."""
        for count in [*self.before_read]:
            count()
        with self._lock:
            under_way = time.perf_counter() - self._since if self._n_under_way else 0.0
            return self._nbytes, self._busy_s + under_way
