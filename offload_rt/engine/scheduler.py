"""Which sequences run together: those there are rows of keys and values for, oldest first."""

from collections import deque
from dataclasses import dataclass

from offload_rt.executor.sequence import Sequence
from offload_rt.kv.host import KVShare, KVSplit


@dataclass(eq=False)
class RunningSequence:
    """A sequence that takes part in every step, its cache, and the most nodes that its trees may have.

    share  of the cache's rows on the device; None: all of them
    """

    id: int
    sequence: Sequence
    cache: int
    n_nodes: int
    share: KVShare | None = None


@dataclass(frozen=True)
class Scheduler:
    """Admits waiting sequences in their order, as long as the caches of all fit.

    cache_rows  rows of keys and values that there is memory for
    n_nodes     nodes of all trees of a pass together, roots included
    split       of these rows, where some are beyond the device
    """

    cache_rows: int
    n_nodes: int
    split: KVSplit | None = None

    def share(self, n_sequences: int) -> int:
        """Nodes of each tree when so many sequences run together."""
        return max(self.n_nodes // n_sequences, 1)

    def admit(self, running: list[RunningSequence], waiting: deque[tuple[int, Sequence]]) -> list[tuple[int, Sequence]]:
        """Take from the waiting sequences those that may run from now on, each with `share` nodes of all that run then."""
        n = 0
        while n < len(waiting) and self._fits(running, [waiting[i][1] for i in range(n + 1)]):
            n += 1
        return [waiting.popleft() for _ in range(n)]

    def _fits(self, running: list[RunningSequence], joining: list[Sequence]) -> bool:
        share = self.share(len(running) + len(joining))
        n_tokens = sum(one.longest - 1 for one in (*(one.sequence for one in running), *joining))
        n_nodes = sum(one.n_nodes for one in running) + share * len(joining)
        if self.split is not None:
            there = [one.share for one in running if one.share is not None]
            if not self.split.fits([*there, *(self.split.share(one.longest - 1 + share, share) for one in joining)]):
                return False
        # A draft model's cache takes two rows a node, and is planned for the longest sequence with the largest tree.
        return n_tokens + n_nodes <= self.cache_rows and n_tokens + 2 * n_nodes <= self.cache_rows + self.n_nodes
