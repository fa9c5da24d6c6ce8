"""Admission of waiting sequences, in order of arrival, while KV rows suffice."""

from collections import deque
from dataclasses import dataclass

from offload_rt.executor.sequence import Sequence
from offload_rt.kv.split import KVShare, KVSplit


@dataclass(eq=False)
class RunningSequence:
    """A sequence in every pass.

    cache    cache id
    n_rows   capacity of the cache
    n_nodes  largest tree
    share    rows of the cache on the device; None for all rows
    """

    id: int
    sequence: Sequence
    cache: int
    n_rows: int
    n_nodes: int
    share: KVShare | None = None


@dataclass(frozen=True)
class Scheduler:
    """Admit waiting sequences while the caches of all sequences fit.

    cache_rows  KV rows in memory
    n_nodes     nodes of all trees of a pass, including roots
    split       split of the rows between device and host or disk, or None
    n_states    number of sequences with a reserved recurrent state
    state_rows  recurrent state of a sequence, in KV rows
    """

    cache_rows: int
    n_nodes: int
    split: KVSplit | None = None
    n_states: int = 0
    state_rows: int = 0

    def share(self, n_sequences: int) -> int:
        """Return the nodes per tree for `n_sequences` running sequences."""
        return max(self.n_nodes // n_sequences, 1)

    def admit(
        self, running: list[RunningSequence], waiting: deque[tuple[int, Sequence]]
    ) -> list[tuple[int, Sequence]]:
        """Pop the sequences that fit beside the running sequences."""
        n = 0
        while n < len(waiting):
            candidates = [waiting[i][1] for i in range(n + 1)]
            if not self.fits(running, candidates, self.share(len(running) + len(candidates))):
                break
            n += 1
        return [waiting.popleft() for _ in range(n)]

    def fits(self, present: list[RunningSequence], new: list[Sequence], n_nodes: int) -> bool:
        """Return whether new sequences with trees of `n_nodes` fit beside present caches."""
        rows = [sequence.longest - 1 + n_nodes for sequence in new]
        if self.split is not None:
            shares = [running.share for running in present if running.share is not None]
            shares += [self.split.share(n, n_nodes) for n in rows]
            if not self.split.fits(shares):
                return False
        n_rows = sum(running.n_rows for running in present) + sum(rows)
        n_rows += self.state_rows * (len(present) + len(new) - self.n_states)
        n_tree_rows = sum(running.n_nodes for running in present) + n_nodes * len(new)
        # A draft model's cache needs two rows per node; its plan assumes a single largest tree.
        has_draft_rows = n_rows + n_tree_rows <= self.cache_rows + self.n_nodes
        return n_rows <= self.cache_rows and has_draft_rows
