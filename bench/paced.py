"""Another tier behind a link of a set speed, to measure overlap without a disk's noise."""

import threading
import time

from torch import Tensor

from offload_rt.offload.tier import Read, Tier
from offload_rt.weights.layout import Layout


class PacedTier:
    """Delivers what `source` holds, one part after the other, at `gbps` GB/s.

    The link is a queue: a part leaves when the one before has arrived and takes its bytes over the rate, as a copy engine does.
    """

    n_parallel = 1

    def __init__(self, source: Tier, gbps: float) -> None:
        self._source, self._gbps = source, gbps
        self._lock = threading.Lock()
        self._free_at = 0.0

    def layout(self, i: int) -> Layout:
        """As the source lays it."""
        return self._source.layout(i)

    def reads(self, i: int, into: Tensor) -> list[Read]:
        """The source's reads, each held back until the link would have carried it."""
        return [self._paced(part) for part in self._source.reads(i, into)]

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def _paced(self, part: Read) -> Read:
        def read() -> int:
            asked = time.perf_counter()
            nbytes = part()
            with self._lock:
                self._free_at = max(self._free_at, asked) + nbytes / (self._gbps * 1e9)
                arrives = self._free_at
            time.sleep(max(arrives - time.perf_counter(), 0.0))
            return nbytes

        return read
