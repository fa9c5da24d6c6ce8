"""Waiting, running and kept sequences: their admission and their KV caches."""

from collections import deque
from dataclasses import dataclass, field, replace
from operator import itemgetter

from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence
from offload_rt.kv.cache import n_shared
from offload_rt.kv.split import KVShare, KVSplit
from offload_rt.speculate.protocols import Drafter


@dataclass(eq=False)
class RunningSequence:
    """A sequence in every pass, with its cache; `share` is None if all rows are on the device."""

    sequence: Sequence
    cache: int
    n_rows: int
    n_nodes: int
    share: KVShare | None = None


@dataclass(frozen=True)
class Scheduler:
    """Limits of the sequences that run together.

    n_nodes     nodes of all trees of a pass, including roots
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

    def fits(self, present: list[RunningSequence], new: list[Sequence], n_nodes: int) -> bool:
        """Return whether new sequences with trees of `n_nodes` fit beside present caches."""
        rows = [sequence.longest - 1 + n_nodes for sequence in new]
        if self.split is not None:
            shares = [running.share for running in present if running.share is not None]
            if not self.split.fits(shares + [self.split.share(n, n_nodes) for n in rows]):
                return False
        n_rows = sum(running.n_rows for running in present) + sum(rows)
        n_rows += self.state_rows * (len(present) + len(new) - self.n_states)
        n_tree_rows = sum(running.n_nodes for running in present) + n_nodes * len(new)
        # A draft model's cache needs two rows per node; its plan assumes a single largest tree.
        return n_rows <= self.cache_rows and n_rows + n_tree_rows <= self.cache_rows + self.n_nodes


@dataclass(eq=False, repr=False, kw_only=True)
class SequencePool:
    """Admit sequences between passes; keep caches of finished sequences for common prefixes.

    prompt_seconds  limit of additional pass time for prompts while other sequences decode, or None
    is_short        memory ran out, and a sequence waits until a running sequence finishes
    """

    runner: Runner
    drafter: Drafter
    scheduler: Scheduler
    prompt_seconds: float | None = None
    is_short: bool = field(default=False, init=False)
    _waiting: deque[Sequence] = field(default_factory=deque, init=False)
    _running: list[RunningSequence] = field(default_factory=list, init=False)
    _kept: list[RunningSequence] = field(default_factory=list, init=False)  # next evicted first

    @property
    def n_running(self) -> int:
        """Number of sequences in the next pass."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Number of sequences that wait for memory."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Drop a waiting or running sequence; ignore finished sequences."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        for running in [running for running in self._running if running.sequence is sequence]:
            sequence.finish_reason = "abort"
            self._finish(running)

    def reset_prefix_cache(self) -> None:
        """Release the caches of finished sequences."""
        while self._kept:
            self._evict(self._kept[0])

    def _admit(self) -> None:
        admitted = list[Sequence]()
        while self._waiting and not self.is_short:
            n_nodes = self.scheduler.share(len(self._running) + len(admitted) + 1)
            if not self.scheduler.fits(self._running, [*admitted, self._waiting[0]], n_nodes):
                break
            admitted.append(self._waiting.popleft())
        split = self.scheduler.split
        is_alone = len(admitted) == 1 and not self._running
        n_nodes = self.scheduler.share(max(len(self._running) + len(admitted), 1))
        for i, sequence in enumerate(admitted):
            n_rows = sequence.longest - 1 + n_nodes
            share = None if split is None else split.share(n_rows, n_nodes, is_alone)
            running = RunningSequence(sequence, -1, n_rows, n_nodes, share)
            self._open_cache(running, admitted[i + 1 :], is_alone)
            self._running.append(running)
            self.drafter.begin(sequence, running.cache, n_nodes)

    def _finish(self, running: RunningSequence) -> None:
        """Stop running a sequence and keep its cache, unless an error may have spoiled the rows."""
        self._running.remove(running)
        self._kept.append(running)
        self.is_short = False
        self.drafter.leave(running.sequence)
        if running.sequence.error is not None:
            self._evict(running)

    def _preempt(self, running: RunningSequence) -> None:
        """Return a sequence to the queue until another sequence finishes; drop its rows."""
        self._running.remove(running)
        self._waiting.appendleft(running.sequence)
        self.runner.free_cache(running.cache)
        self.drafter.end(running.sequence)
        self.is_short = True

    def _evict(self, kept: RunningSequence) -> None:
        self._kept.remove(kept)
        self.runner.free_cache(kept.cache)
        self.drafter.end(kept.sequence)

    def _open_cache(self, new: RunningSequence, later: list[Sequence], is_alone: bool) -> None:
        """Create a cache with the longest matching prefix, beside sequences admitted `later`."""
        source, n = self._find_prefix(new.sequence)
        n_rows = new.n_rows
        tokens = new.sequence.cache_ids
        takes_over = source in self._kept and self._takes_over(new, source, n, later)
        self._kept.sort(key=lambda kept: kept is source)  # evicted last
        if takes_over:
            new.n_rows = max(n_rows, self._kept.pop().n_rows)
        has_graphs = self.runner.replay is not None
        while self._kept and (has_graphs or not self._fits([*self._kept, new], later)):
            self._evict(self._kept[0])
        if source is None or not takes_over:
            new.cache = self.runner.new_cache(n_rows, is_alone, new.share)
            # A draft head needs the hidden states of all rows, which caches do not store.
            if source and source in (*self._running, *self._kept) and not self.runner.taps:
                self.runner.copy_prefix(new.cache, source.cache, tokens[: min(n, len(tokens) - 2)])
            return
        self.runner.rewind(source.cache, tokens[:n])
        # Moved rows exist twice for a moment; rows on a GPU move through host memory.
        may_move = self.runner.device.type != "cpu" or 2 * n <= self.scheduler.cache_rows
        new.cache = self.runner.renew_cache(
            source.cache, n_rows, new.n_nodes, is_alone, new.share, may_move
        )
        if new.cache == source.cache:
            new.share = source.share and replace(source.share, n_rows=new.n_rows)
        n = self.drafter.transfer(source.sequence, new.sequence, self.runner.n_committed(new.cache))
        self.drafter.end(source.sequence)
        self.runner.rewind(new.cache, tokens[:n])

    def _find_prefix(self, sequence: Sequence) -> tuple[RunningSequence | None, int]:
        """Return the longest prefix that is cached or computed in the next pass.

        Log-probabilities and embeddings of the prompt need all rows computed.
        """
        matches: list[tuple[RunningSequence | None, int]] = [(None, 0)]
        if sequence.sampling.prompt_logprobs is not None or sequence.pooling is not None:
            return matches[0]
        for running in (*self._running, *self._kept):
            n_cached = self.runner.n_committed(running.cache)
            if running in self._running and self.prompt_seconds is None:
                n_cached = len(running.sequence.tokens) - 1  # after the next pass
            n = n_shared(running.sequence.cache_ids[:n_cached], sequence.cache_ids[:-1])
            matches.append((running, n))
        return max(matches, key=itemgetter(1))

    def _takes_over(
        self, new: RunningSequence, source: RunningSequence, n: int, later: list[Sequence]
    ) -> bool:
        """Return whether to reuse a kept cache of n common rows instead of copying from it."""
        is_mostly_common = 2 * n >= self.runner.n_committed(source.cache)
        needs_memory = self.runner.replay is not None or not self._fits([source, new], later)
        resized = replace(new, n_rows=max(new.n_rows, source.n_rows))
        return (is_mostly_common or needs_memory) and self._fits([resized], later)

    def _fits(self, more: list[RunningSequence], later: list[Sequence]) -> bool:
        return self.scheduler.fits([*self._running, *more], later, more[-1].n_nodes)
