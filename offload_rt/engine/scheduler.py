"""Which sequences run together: those there are rows of keys and values for, oldest first."""

from collections import deque
from dataclasses import dataclass

from offload_rt.executor.sequence import Sequence
from offload_rt.kv.split import KVShare, KVSplit


@dataclass(eq=False)
class RunningSequence:
    """A sequence that takes part in every step, its cache of `n_rows` rows, and the most nodes that
    its trees may have.

    share  of the cache's rows on the device; None: all of them
    """

    id: int
    sequence: Sequence
    cache: int
    n_rows: int
    n_nodes: int
    share: KVShare | None = None


@dataclass(frozen=True)
class Scheduler:
    """Admits waiting sequences in their order, as long as the caches of all fit.

    cache_rows  rows of keys and values that there is memory for
    n_nodes     nodes of all trees of a pass together, roots included
    split       of these rows, where some are beyond the device
    n_states    sequences whose states there is memory for besides
    state_rows  rows that take as much as the states of a sequence
    """

    cache_rows: int
    n_nodes: int
    split: KVSplit | None = None
    n_states: int = 0
    state_rows: int = 0

    def share(self, n_sequences: int) -> int:
        """Nodes of each tree when so many sequences run together."""
        return max(self.n_nodes // n_sequences, 1)

    def admit(
        self, running: list[RunningSequence], waiting: deque[tuple[int, Sequence]]
    ) -> list[tuple[int, Sequence]]:
        """Take from the waiting sequences those that may run from now on, each with `share` nodes
        of all that run then.
        """
        n = 0
        while n < len(waiting):
            joining = [waiting[i][1] for i in range(n + 1)]
            if not self.fits(running, joining, self.share(len(running) + len(joining))):
                break
            n += 1
        return [waiting.popleft() for _ in range(n)]

    def fits(self, there: list[RunningSequence], joining: list[Sequence], n_nodes: int) -> bool:
        """Whether there is room for sequences with trees of `n_nodes` beside the caches that are
        there.
        """
        if self.split is not None:
            shares = [one.share for one in there if one.share is not None]
            shares += [self.split.share(one.longest - 1 + n_nodes, n_nodes) for one in joining]
            if not self.split.fits(shares):
                return False
        n_rows = sum(one.n_rows for one in there) + sum(
            one.longest - 1 + n_nodes for one in joining
        )
        n_rows += self.state_rows * (len(there) + len(joining) - self.n_states)
        n_more = sum(one.n_nodes for one in there) + n_nodes * len(joining)
        # A draft model's cache takes two rows a node, and is planned for the longest sequence with
        # the largest tree.
        return n_rows <= self.cache_rows and n_rows + n_more <= self.cache_rows + self.n_nodes
