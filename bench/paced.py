"""Another tier behind a link of a set speed, to measure overlap without a disk's noise."""

import threading
import time

from torch import Tensor

from offload_rt.offload.tier import Read, Tier
from offload_rt.weights.layout import Layout


class PacedLink:
    """A queue of `gbps` GB/s: a part leaves when the one before has arrived and takes its bytes over the rate."""

    def __init__(self, gbps: float) -> None:
        self._gbps = gbps
        self._lock = threading.Lock()
        self._free_at = 0.0

    def paced(self, part: Read) -> Read:
        """A read, held back until the link would have carried it."""

        def read() -> int:
            asked = time.perf_counter()
            nbytes = part()
            with self._lock:
                self._free_at = max(self._free_at, asked) + nbytes / (self._gbps * 1e9)
                arrives = self._free_at
            time.sleep(max(arrives - time.perf_counter(), 0.0))
            return nbytes

        return read


class PacedTier:
    """Delivers what `source` holds, one part after the other, over a link of its own or one that others use as well."""

    def __init__(self, source: Tier, link: float | PacedLink, n_parallel: int = 1) -> None:
        """link: or GB/s of it; n_parallel: parts that are in its queue at once."""
        self._source, self._link = source, link if isinstance(link, PacedLink) else PacedLink(link)
        self.n_parallel = n_parallel

    def layout(self, i: int) -> Layout:
        """As the source lays it."""
        return self._source.layout(i)

    def reads(self, i: int, into: Tensor) -> list[Read]:
        """The source's reads, paced."""
        return [self._link.paced(part) for part in self._source.reads(i, into)]

    def close(self) -> None:
        """Close the source."""
        self._source.close()
