"""The streamer of a CPU: threads fill slots by blocking reads that release the interpreter lock."""

import atexit
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.pinning import pin, unpin
from offload_rt.offload.streamer import LayerSources, LayerView, refuse_closed, visit
from offload_rt.offload.tier import Read
from offload_rt.system.threads import Monitor, Worker
from offload_rt.system.trace import DISK, LINK, NOTHING_ASKED, SLOTS_FULL, WAIT, Trace, slot_lane, waits
from offload_rt.weights.layout import host_block

# What is shorter is no wait for a layer but the taking of a lock.
_LEAST_WAIT_S = 1e-4


class _Fetch:
    """One layer on its way into a slot, from now on."""

    def __init__(self, parts: list[Read]) -> None:
        self.parts = parts[::-1]
        self.n_missing = len(parts)
        self.started = time.perf_counter()


class ThreadStreamer:
    """Slots refilled in a circle: fetch k brings layer order[k mod m] into slot k mod n_slots.

    Fetch k may start once the compute of fetch k - n_slots has finished, whichever pass either belongs to, so the link goes
    on through the head, the sampling and the drafting between two passes. Reads are handed out part by part across the
    border of two layers: there are always `n_parallel` requests under way while a slot is free.
    """

    def __init__(self, sources: LayerSources, trace: Trace, pinned: bool = False) -> None:
        self.meter, self._trace = LinkMeter(), trace
        # Towards pinned memory it is the disk that is read, and the link comes after it.
        self._link = DISK if pinned else LINK
        self._sources, self.order = sources, sources.order
        n_slots = sources.n_slots if self.order else 0
        self._slots: list[Tensor] = [host_block(sources.slot_nbytes) for _ in range(n_slots)]
        self._pinned = [slot for slot in self._slots if pinned and pin(slot)]
        self._state = Monitor()
        self._closed = self._parked = False
        self._n_sweeps = 0
        self._rewind()
        n_threads = max((tier.n_parallel for tier in sources.streamed if tier is not None), default=0)
        self._threads = [Worker(self._work, f"read-{i}", daemon=True) for i in range(n_threads)]
        self._note_standstill()
        # At the latest then: a thread that still reads when the interpreter goes ends the process by abort().
        if self._threads:
            atexit.register(self.close)
        for thread in self._threads:
            thread.start()

    def sweep(self) -> Iterator[LayerView]:
        """Yield every layer once, in order; see `Streamer`."""
        refuse_closed(self._closed)
        self._n_sweeps += 1
        if not self._parked and self.order and self._n_consumed % len(self.order):
            self._park()  # the last one was left half-way, and an interrupt met its end
        self._go_on()
        newest = self._n_sweeps
        yield from visit(self._sources, self._arrive, self._release, self._park, lambda: newest == self._n_sweeps)

    def close(self) -> None:
        """Join the threads and release the slots."""
        with self._state.lock:
            self._closed = True
            self._state.ring()
        for thread in self._threads:
            thread.join()
        atexit.unregister(self.close)
        for slot in self._pinned:
            unpin(slot)
        self._pinned.clear()
        self._slots.clear()

    def _go_on(self) -> None:
        if self._parked:
            self._stand_still()
        with self._state.lock:
            self._parked = False
            self._state.ring()

    def _rewind(self) -> None:
        self._n_consumed = 0  # fetches whose compute has finished
        self._n_started = 0
        self._under_way: dict[int, _Fetch] = {}
        self._error: BaseException | None = None
        self._n_reading = 0

    def _arrive(self, i: int) -> LayerView:
        """Wait until the next fetch, which is layer i, is in its slot."""
        k, started = self._n_consumed, time.perf_counter()
        self._state.wait_for(lambda: self._error is not None or self._closed or self._has_arrived(k))
        self._note_wait(i, started)
        refuse_closed(self._closed)
        if self._error is not None:
            raise self._error
        return LayerView(i, self._sources.streamed[i].layout(i), self._slots[k % len(self._slots)])

    def _has_arrived(self, k: int) -> bool:
        return k < self._n_started and k not in self._under_way

    def _release(self) -> None:
        with self._state.lock:
            self._n_consumed += 1
            self._state.ring()

    def _park(self) -> None:
        """Fetch nothing before the next sweep asks: what made this one fail would fail again behind its back."""
        with self._state.lock:
            self._parked = True
        self._stand_still()

    def _stand_still(self) -> None:
        """Wait for the reads of a parked streamer that are under way, and forget what has come."""
        self._state.wait_for(lambda: not self._n_reading)
        with self._state.lock:
            self._rewind()
            self._note_standstill()

    def _work(self) -> None:
        while not self._closed:
            try:
                self._state.wait_for(self._next_step)()
            except BaseException as error:  # no memory for what lies between two reads; it is for the caller of sweep
                self._error = error

    def _next_step(self) -> Callable[[], None] | None:
        """What a thread has to do, counted as begun; None while it has to wait. Called with the lock held."""
        if self._closed:
            return _nothing
        part = self._next_part()
        if part is None:
            return None
        if self._n_reading == 0:
            self._trace.state(waits(self._link), None)
        self._n_reading += 1
        return partial(self._run, *part)

    def _next_part(self) -> tuple[int, Read] | None:
        """The next read to do, or None while all slots are full or a read has failed. Called with the lock held."""
        if self._error is not None or self._parked:
            return None
        for k, fetch in self._under_way.items():
            if fetch.parts:
                return k, fetch.parts.pop()
        if not self._slots or self._n_started >= self._n_consumed + len(self._slots):
            return None
        k = self._n_started
        i = self.order[k % len(self.order)]
        try:
            fetch = _Fetch(self._sources.streamed[i].reads(i, self._slots[k % len(self._slots)]))
        except BaseException as error:  # as in `_run`: it belongs to the caller of sweep
            self._error = error
            self._state.ring()
            return None
        self._under_way[k] = fetch
        self._n_started += 1
        return k, fetch.parts.pop()

    def _run(self, k: int, part: Read) -> None:
        nbytes, error = 0, None
        try:
            self.meter.begin()
            nbytes = part()
        except BaseException as caught:  # whatever it is, it belongs to the caller of sweep
            error = caught
        with self._state.lock:
            self._n_reading -= 1
            self.meter.end(nbytes)
            fetch = self._under_way[k]
            fetch.n_missing -= 1
            self._error = self._error or error
            if fetch.n_missing == 0 and error is None:
                del self._under_way[k]
                self._note_fetch(k, fetch)
            if self._n_reading == 0:
                self._note_standstill()
            # The caller waits for whole fetches; a finished part is news only when something else could wait for it.
            if k not in self._under_way or error is not None or self._n_reading == 0:
                self._state.ring()

    def _note_fetch(self, k: int, fetch: _Fetch) -> None:
        layer, lane = self.order[k % len(self.order)], slot_lane(self._link, k % len(self._slots))
        self._trace.add(lane, f"layer {layer}", fetch.started, time.perf_counter())

    def _note_wait(self, i: int, started: float) -> None:
        ended = time.perf_counter()
        self.meter.waited_s += ended - started
        if ended - started > _LEAST_WAIT_S:
            self._trace.add(WAIT, f"layer {i}", started, ended)

    def _note_standstill(self) -> None:
        """Say why nothing is read, where it is more than a hand-over from one request to the next."""
        if self._n_started == 0 or self._parked or self._error is not None:
            self._trace.state(waits(self._link), NOTHING_ASKED)
        elif self._n_started == self._n_consumed + len(self._slots):
            self._trace.state(waits(self._link), SLOTS_FULL)


def _nothing() -> None:
    """What a thread of a closed streamer has to do."""


def open_streamer(sources: LayerSources, trace: Trace, device: torch.device) -> ThreadStreamer:
    """The streamer of the CPU."""
    return ThreadStreamer(sources, trace)
