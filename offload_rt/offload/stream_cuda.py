"""The streamer of a CUDA device: copies on a stream of their own, ordered with the compute by events alone."""

import atexit
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offload_rt.offload.copy_device import CopyDevice, CudaCopyDevice
from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources, LayerView, refuse_closed, visit
from offload_rt.system.threads import Monitor, Worker
from offload_rt.system.trace import LINK, Trace, slot_lane


@dataclass(frozen=True)
class _Copy:
    """A copy of (part of) a layer into a slot, between two events."""

    start: Any
    end: Any
    nbytes: int
    layer: int
    slot: int


class CudaStreamer:
    """Slots on the device, refilled in a circle by a feeder thread that enqueues copies ahead of the compute.

    A host block is copied from where it lies. A block from the disk comes through pinned slots on the host, which a
    `ThreadStreamer` fills, so disk, link and compute overlap as three stages. The copy into a slot waits, on the copy
    stream, for the event recorded after the slot's last compute; the compute of a layer waits, on its own stream, for the
    event recorded after its copy. The host waits for neither.
    """

    def __init__(self, sources: LayerSources, trace: Trace, device: CopyDevice) -> None:
        self.meter = LinkMeter()
        self._sources, self._device, self._trace = sources, device, trace
        self.order = sources.order
        self._upstream = ThreadStreamer(sources.on_host(), trace, pinned=True)
        n_slots = sources.n_slots if sources.order else 0
        self._slots: list[Tensor] = [device.allocate(sources.packed_slot_nbytes) for _ in range(n_slots)]
        self._state = Monitor()
        self._closed = False
        self._n_sweeps = 0
        self._timings: deque[_Copy] = deque()
        self._waits: deque[tuple[Any, Any]] = deque()
        self._epoch = device.record_compute()
        device.wait(self._epoch)
        self._epoch_s = time.perf_counter()
        if self._slots:
            atexit.register(self.close)  # see ThreadStreamer
        self._start()

    def sweep(self) -> Iterator[LayerView]:
        """Yield every layer once, in order; see `Streamer`. The compute of a block may still run when the next is asked for."""
        refuse_closed(self._closed)
        self._n_sweeps += 1
        if self._stopping or (self.order and self._n_consumed % len(self.order)):
            self._stop()  # the last one was left half-way; an interrupt may have met its end
            self._start()
        newest = self._n_sweeps
        yield from visit(self._sources, self._arrive, self._release, self._stop, lambda: newest == self._n_sweeps)

    def close(self) -> None:
        """Join the threads, end the copies, release the slots."""
        if not self._closed:
            self._stop()
            self._closed = True
            self._upstream.close()
            self._slots.clear()
            atexit.unregister(self.close)

    def _start(self) -> None:
        self._stopping = self._is_parked = False
        self._error: BaseException | None = None
        self._n_copied = self._n_consumed = 0
        self._ready: dict[int, Any] = {}
        self._free = [self._device.event() for _ in self._slots]
        self._feeder = Worker(self._feed, "copies", daemon=True)
        if self._slots:
            self._feeder.start()

    def _stop(self) -> None:
        with self._state.lock:
            self._stopping = True
            self._state.ring()
        self._feeder.join()
        self._device.synchronize()
        self._count_finished()
        # No copies before the next sweep asks: what made this one fail would fail again behind its back.
        with self._state.lock:
            self._is_parked = True
            self._state.ring()

    def _arrive(self, i: int) -> LayerView:
        """Wait until the copy of layer i has been enqueued, and let the compute wait for its end."""
        k, idle = self._n_consumed, self._device.record_compute()
        self._state.wait_for(lambda: self._error is not None or self._is_parked or k in self._ready)
        refuse_closed(self._is_parked)
        if self._error is not None:
            raise self._error
        ready = self._ready[k]
        self._waits.append((idle, ready))
        self._device.compute_waits_for(ready)
        return LayerView(i, self._sources.packed_layout(i), self._slots[k % len(self._slots)])

    def _release(self) -> None:
        refuse_closed(self._closed)
        used = self._device.record_compute()
        with self._state.lock:
            self._free[self._n_consumed % len(self._slots)] = used
            del self._ready[self._n_consumed]
            self._n_consumed += 1
            self._state.ring()

    def _feed(self) -> None:
        """Enqueue copies for ever; an error goes to the caller of `sweep`."""
        try:
            while self._feed_sweep():
                pass
        except BaseException as error:  # whatever it is, it belongs to the caller of sweep
            self._error = error
            with self._state.lock:
                self._state.ring()

    def _feed_sweep(self) -> bool:
        """Copy every streamed layer once; returns whether to go on."""
        sweep = self._upstream.sweep()
        try:
            for block in sweep:
                if self._sources.streamed[block.i] is None:
                    continue
                slot = self._wait_for_slot()
                if slot is None:
                    return False
                done = self._copy(block, slot)
                with self._state.lock:
                    self._ready[self._n_copied] = done
                    self._n_copied += 1
                    self._state.ring()
                if self._sources.is_transient(block.i):
                    # The pinned slot is refilled at the next step of this loop: its copy must have ended.
                    self._device.wait(done)
        finally:
            sweep.close()
        return True

    def _wait_for_slot(self) -> int | None:
        """The next slot, once its last compute has been enqueued; None when the streamer stops."""
        self._state.wait_for(lambda: self._stopping or self._n_copied < self._n_consumed + len(self._slots))
        return None if self._stopping else self._n_copied % len(self._slots)

    def _copy(self, block: LayerView, slot: int) -> Any:
        """One copy where the block lies on the host as on the device; otherwise one for each tensor."""
        target, packed = self._slots[slot], self._sources.packed_layout(block.i)
        if block.layout == packed:
            moves = [(target[: packed.nbytes], block.data[: packed.nbytes])]
        else:
            moves = [
                (target[to.offset : to.offset + to.nbytes], block.data[at.offset : at.offset + at.nbytes])
                for at, to in zip(block.layout.entries, packed.entries, strict=True)
            ]
        after = self._free[slot]
        for to, source in moves:
            start, after = self._device.copy(to, source, after)
            self._timings.append(_Copy(start, after, len(to), block.i, slot))
        self._count_finished()
        return after

    def _count_finished(self) -> None:
        """Add up what has ended: copies, and from the end of a layer's compute to the arrival of the next one."""
        while self._timings:
            copy = self._timings[0]
            seconds = self._device.seconds_between(copy.start, copy.end)
            if seconds is None:
                break
            self.meter.add(copy.nbytes, seconds)
            self._note(copy, seconds)
            self._timings.popleft()
        while self._waits:
            seconds = self._device.seconds_between(*self._waits[0])
            if seconds is None:
                return
            self.meter.waited_s += max(seconds, 0.0)
            self._waits.popleft()

    def _note(self, copy: _Copy, seconds: float) -> None:
        if self._trace.on:
            started = self._epoch_s + self._device.seconds_between(self._epoch, copy.start)
            self._trace.add(slot_lane(LINK, copy.slot), f"layer {copy.layer}", started, started + seconds)


def open_streamer(sources: LayerSources, trace: Trace, device: Any) -> CudaStreamer:
    """The streamer of a torch CUDA device."""
    return CudaStreamer(sources, trace, CudaCopyDevice(device))
