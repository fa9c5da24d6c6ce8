"""The streamer of a CPU: threads fill slots by blocking reads that release the interpreter lock."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from threading import Thread
from typing import Self

import torch

from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.pinning import pin, unpin
from offload_rt.offload.streamer import LayerSources, LayerView, Streamer
from offload_rt.offload.tier import Read
from offload_rt.system.numa import Cpus, stay_near, staying_near
from offload_rt.system.trace import DISK, KV, LINK, NOTHING_ASKED, SLOTS_FULL, WAIT, Trace, slot_lane, span_name, waits
from offload_rt.weights.layout import host_block

# What is shorter is no wait for a layer but the taking of a lock.
_LEAST_WAIT_S = 1e-4


@dataclass(eq=False)
class Fetch:
    """Block i on its way into a slot, or there: parts not begun yet, and how many have not ended."""

    i: int
    slot: int
    parts: list[Read]
    n_missing: int
    started: float = field(default_factory=time.perf_counter)


class ReadThreads(ABC):
    """Threads that do reads part by part; a subclass says the next one, and has what a `Streamer` has."""

    meter: LinkMeter
    _trace: Trace
    _changed: threading.Condition
    _error: BaseException | None
    _is_closed: bool
    _n_reading: int
    _link: str
    _cpus: Cpus

    def _start(self, n_threads: int) -> None:
        # Daemons: the interpreter joins others before it calls whoever closes them.
        self._threads = [Thread(target=self._work, name=f"read-{i}", daemon=True) for i in range(n_threads)]
        for thread in self._threads:
            thread.start()

    def _end(self) -> None:
        """End all reads and join the threads; may be called again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    @abstractmethod
    def _next(self) -> Fetch | None:
        """The fetch of which a part is to be read; None where there is nothing to do. Called with the lock held."""

    @abstractmethod
    def _note_standstill(self) -> None:
        """Say why nothing is read."""

    @abstractmethod
    def _arrived(self, fetch: Fetch) -> None:
        """All parts have ended. Called with the lock held."""

    def _count_wait(self, started: float, name: str) -> None:
        """The device had nothing to compute since then."""
        ended = time.perf_counter()
        self.meter.waited_s += ended - started
        if ended - started > _LEAST_WAIT_S:
            self._trace.add(WAIT, name, started, ended)

    def _work(self) -> None:
        stay_near(self._cpus)
        while (part := self._next_part()) is not None:
            self._read(*part)

    def _next_part(self) -> tuple[Fetch, Read] | None:
        """Wait for a read to do, which counts as begun; None once they are closed."""
        with self._changed:
            fetch: Fetch | None = None
            while not self._is_closed and (fetch := self._next()) is None:
                self._changed.wait()
            if self._is_closed or fetch is None:
                return None
            if self._n_reading == 0:
                self._trace.state(waits(self._link), None)
            self._n_reading += 1
            return fetch, fetch.parts.pop()

    def _read(self, fetch: Fetch, part: Read) -> None:
        nbytes, error = 0, None
        self.meter.begin()
        try:
            nbytes = part()
        except BaseException as caught:  # whatever it is, it is for who waits
            error = caught
        with self._changed:
            self.meter.end(nbytes)
            self._n_reading -= 1
            self._error = self._error or error
            fetch.n_missing -= error is None
            if fetch.n_missing == 0:
                self._arrived(fetch)
                lane = slot_lane(self._link, fetch.slot)
                self._trace.add(lane, span_name(self._link, fetch.i), fetch.started, time.perf_counter())
            if self._n_reading == 0:
                self._note_standstill()
            # Whoever waits, waits for a whole block, for an error or for the end of all reads.
            if fetch.n_missing == 0 or error is not None or self._n_reading == 0:
                self._changed.notify_all()


class ThreadStreamer(ReadThreads, Streamer):
    """Slots refilled in a circle: fetch k brings layer order[k mod m] into slot k mod n_slots.

    Fetch k may start once the compute of fetch k - n_slots has finished, whichever pass either belongs to, so the link goes
    on through the head, the sampling and the drafting between two passes. Reads are handed out part by part across the
    border of two layers: there are always `n_parallel` requests under way while a slot is free.
    """

    def __init__(
        self,
        sources: LayerSources,
        trace: Trace,
        pinned: bool = False,
        meter: LinkMeter | None = None,
        lane: str = LINK,
    ) -> None:
        super().__init__(sources, trace, meter)
        self._cpus = sources.cpus
        # Towards pinned memory it is the disk that is read, and the link comes after it.
        self._link = DISK if pinned else lane
        longest = max((sources.source(i).layout(i).nbytes for i in self.order), default=0)
        longest = max(longest, sources.slot_nbytes)
        self._slots = [host_block(longest) for _ in range(sources.n_slots if self.order else 0)]
        with staying_near(sources.cpus):  # pinning touches what nobody has touched
            self._pinned = [slot for slot in self._slots if pinned and pin(slot)]
        self._fetches: deque[Fetch] = deque()  # begun and not consumed; only the last one has parts that are not begun
        self._n_reading = 0
        self._note_standstill()
        n_threads = max((sources.source(i).n_parallel for i in self.order), default=0)
        self._start(n_threads)

    def beside(self, sources: LayerSources) -> Self:
        """In lanes of the trace of its own."""
        return type(self)(sources, self._trace, meter=self.meter, lane=KV)

    def close(self) -> None:
        """End all reads, join the threads and release the slots; may be called again."""
        self._end()
        for slot in self._pinned:
            unpin(slot)
        self._pinned.clear()
        self._slots.clear()

    def _arrive(self, i: int) -> LayerView:
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or self._is_closed or (self._fetches and self._fetches[0].n_missing == 0)
            )
            self._refuse_closed()
            if self._error is not None:
                raise self._error
            slot = self._slots[self._fetches[0].slot]
        self._count_wait(started, span_name(self._link, i))
        return LayerView(i, self._sources.source(i).layout(i), slot)

    def _release(self) -> None:
        with self._changed:
            if self._fetches:  # not where it was closed meanwhile
                self._fetches.popleft()
            self._n_consumed += 1
            self._changed.notify_all()

    def _park(self) -> None:
        with self._changed:
            self._is_parked = True
            self._changed.wait_for(lambda: not self._n_reading)
            self._fetches.clear()
            self._n_consumed, self._error = 0, None
            self._note_standstill()

    def _next(self) -> Fetch | None:
        """See `ReadThreads._next`; it may begin."""
        if self._is_parked or self._error is not None:
            return None
        if self._fetches and self._fetches[-1].parts:
            return self._fetches[-1]
        if len(self._fetches) == len(self._slots):
            return None
        k = self._n_consumed + len(self._fetches)
        layer, slot = self.order[k % len(self.order)], k % len(self._slots)
        try:
            parts = self._sources.source(layer).reads(layer, self._slots[slot])[::-1]
        except BaseException as error:  # as in `_read`: it is for the caller of sweep
            self._error = error
            self._changed.notify_all()
            return None
        self._fetches.append(Fetch(layer, slot, parts, len(parts)))
        return self._fetches[-1]

    def _arrived(self, fetch: Fetch) -> None:
        """Whoever waits for it looks for itself."""

    def _note_standstill(self) -> None:
        """Say why nothing is read, where it is more than a hand-over from one request to the next."""
        if self._is_parked or self._error is not None or not (self._fetches or self._n_consumed):
            self._trace.state(waits(self._link), NOTHING_ASKED)
        elif len(self._fetches) == len(self._slots):
            self._trace.state(waits(self._link), SLOTS_FULL)


def open_streamer(sources: LayerSources, trace: Trace, device: torch.device) -> ThreadStreamer:
    """The streamer of the CPU."""
    return ThreadStreamer(sources, trace)
