"""Threads that fill slots by blocking reads, which release the GIL; slots of a CPU, or pinned."""

import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from threading import Thread
from typing import Self

from offload_rt.offload.memory import pin, unpin
from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.streamer import LayerSources, LayerView, Streamer, Waiting
from offload_rt.offload.tier import Read
from offload_rt.system.numa import Cpus, stay_near, staying_near
from offload_rt.system.trace import (
    DISK,
    LINK,
    NOTHING_ASKED,
    SLOTS_FULL,
    WAIT,
    Trace,
    slot_lane,
    span_name,
    waits,
)
from offload_rt.weights.layout import host_block

# Shorter intervals are lock acquisitions, not waits for a layer.
_LEAST_WAIT_S = 1e-4


@dataclass(eq=False)
class Fetch:
    """Transfer of block i into a slot: parts not yet started, and number of unfinished parts."""

    i: int
    slot: int
    parts: list[Read]
    n_missing: int
    started: float = field(default_factory=time.perf_counter)


class ReadThreads(Waiting, ABC):
    """Threads that execute reads part by part; subclasses select the next fetch."""

    meter: LinkMeter
    _trace: Trace
    _n_reading = 0
    _link: str
    _cpus: Cpus

    def _start(self, n_threads: int) -> None:
        # Daemon threads: the interpreter would join other threads before atexit handlers run.
        names = (f"read-{i}" for i in range(n_threads))
        self._threads = [Thread(target=self._work, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def _end(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    @abstractmethod
    def _next(self) -> Fetch | None:
        """Return a fetch with a part to read, or None. Called with the lock held."""

    @abstractmethod
    def _note_standstill(self) -> None:
        """Record the reason for an idle link."""

    def _arrived(self, fetch: Fetch) -> None:
        """Handle a complete fetch. Called with the lock held."""

    def _count_wait(self, started: float, name: str) -> None:
        ended = time.perf_counter()
        self.meter.waited_s += ended - started
        if ended - started > _LEAST_WAIT_S:
            self._trace.add(WAIT, name, started, ended)

    def _work(self) -> None:
        stay_near(self._cpus)
        while True:
            with self._changed:
                fetch = None
                while not self._is_closed and (fetch := self._next()) is None:
                    self._changed.wait()
                if fetch is None:
                    return
                if self._n_reading == 0:
                    self._trace.state(waits(self._link), None)
                self._n_reading += 1
                part = fetch.parts.pop()
            self._read(fetch, part)

    def _read(self, fetch: Fetch, part: Read) -> None:
        nbytes = 0
        error = None
        self.meter.begin()
        try:
            nbytes = part()
        except BaseException as caught:  # passed to the waiting thread
            error = caught
        with self._changed:
            self.meter.end(nbytes)
            self._n_reading -= 1
            self._error = self._error or error
            fetch.n_missing -= error is None
            if fetch.n_missing == 0:
                self._arrived(fetch)
                lane = slot_lane(self._link, fetch.slot)
                name = span_name(self._link, fetch.i)
                self._trace.add(lane, name, fetch.started, time.perf_counter())
            if self._n_reading == 0:
                self._note_standstill()
            # Waiting threads need a complete block, an error, or the end of all reads.
            if fetch.n_missing == 0 or error is not None or self._n_reading == 0:
                self._changed.notify_all()


class ThreadStreamer(ReadThreads, Streamer):
    """Ring of slots: fetch k reads layer order[k mod m] into slot k mod n_slots.

    Fetch k starts after the compute of fetch k - n_slots, also across passes. Therefore the link
    stays busy during head, sampling and drafting. Parts of consecutive layers are read without a
    gap: `n_parallel` requests are in flight while a slot is free.
    """

    def __init__(
        self, sources: LayerSources, trace: Trace, meter: LinkMeter | None = None, lane: str = LINK
    ) -> None:
        """lane: DISK for pinned slots, from which another streamer copies to a GPU."""
        super().__init__(sources, trace, meter)
        self._cpus = sources.cpus
        self._link = lane
        streamed = (sources.source(i).layout(i).nbytes for i in self.order)
        longest = max((*streamed, sources.slot_nbytes))
        self._slots = [host_block(longest) for _ in range(sources.n_slots if self.order else 0)]
        with staying_near(sources.cpus):  # first touch decides the NUMA node
            self._pinned = [slot for slot in self._slots if lane == DISK and pin(slot)]
        # Started, not consumed fetches; only the last has parts left to start.
        self._fetches: deque[Fetch] = deque()
        self._note_standstill()
        self._start(max((sources.source(i).n_parallel for i in self.order), default=0))

    def share_link(self, sources: LayerSources, lane: str) -> Self:
        return type(self)(sources, self._trace, self.meter, lane)

    def park(self) -> None:
        with self._changed:
            self._is_parked = True
            self._changed.wait_for(lambda: not self._n_reading)
            self._fetches.clear()
            self._n_consumed = 0
            self._error = None
            self._note_standstill()

    def close(self) -> None:
        self._end()
        unpin(*self._pinned)
        self._pinned.clear()
        self._slots.clear()

    def _arrive(self, i: int) -> LayerView:
        started = time.perf_counter()
        with self._changed:
            self._wait_for(lambda: self._fetches and self._fetches[0].n_missing == 0)
            slot = self._slots[self._fetches[0].slot]
        self._count_wait(started, span_name(self._link, i))
        return LayerView(i, self._sources.source(i).layout(i), slot)

    def _release(self) -> None:
        with self._changed:
            if self._fetches:  # empty if closed in the meantime
                self._fetches.popleft()
            self._n_consumed += 1
            self._changed.notify_all()

    def _next(self) -> Fetch | None:
        if self._is_parked or self._error is not None:
            return None
        if self._fetches and self._fetches[-1].parts:
            return self._fetches[-1]
        if len(self._fetches) == len(self._slots):
            return None
        k = self._n_consumed + len(self._fetches)
        layer = self.order[k % len(self.order)]
        slot = k % len(self._slots)
        try:
            parts = self._sources.source(layer).reads(layer, self._slots[slot])[::-1]
        except BaseException as error:  # passed to the caller of `sweep`
            self._error = error
            self._changed.notify_all()
            return None
        self._fetches.append(Fetch(layer, slot, parts, len(parts)))
        return self._fetches[-1]

    def _note_standstill(self) -> None:
        if self._is_parked or self._error is not None or not (self._fetches or self._n_consumed):
            self._trace.state(waits(self._link), NOTHING_ASKED)
        elif len(self._fetches) == len(self._slots):
            self._trace.state(waits(self._link), SLOTS_FULL)
