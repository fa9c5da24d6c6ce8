"""How much a link moved, and for how long it was busy."""

import threading
import time


class LinkMeter:
    """Counts bytes and the time in which at least one transfer was under way. Safe to use from several threads.

    waited_s  seconds in which the device had nothing to compute because a layer had not arrived; one thread writes it
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_under_way = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._nbytes = 0
        self.waited_s = 0.0

    def begin(self) -> None:
        """A transfer starts."""
        with self._lock:
            if self._n_under_way == 0:
                self._since = time.perf_counter()
            self._n_under_way += 1

    def end(self, nbytes: int) -> None:
        """A transfer has ended and moved so many bytes."""
        with self._lock:
            self._n_under_way -= 1
            self._nbytes += nbytes
            if self._n_under_way == 0:
                self._busy_s += time.perf_counter() - self._since

    def add(self, nbytes: int, seconds: float) -> None:
        """A transfer that was timed elsewhere, such as by events on a copy stream."""
        with self._lock:
            self._nbytes += nbytes
            self._busy_s += seconds

    def read(self) -> tuple[int, float]:
        """Bytes moved and seconds busy since the meter was made."""
        with self._lock:
            under_way = time.perf_counter() - self._since if self._n_under_way else 0.0
            return self._nbytes, self._busy_s + under_way
