"""GPU streamer: copies on separate CUDA streams, ordered with compute by events."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from threading import Lock, Thread
from typing import NamedTuple, Self

from torch import Tensor
from torch.cuda import Event

from offload_rt.offload.copy_device import CopyDevice
from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources, LayerView, Streamer
from offload_rt.ops.lossless import decode_block
from offload_rt.system.trace import DISK, LINK, Trace, slot_lane, span_name


class _Copy(NamedTuple):
    start: Event
    end: Event
    nbytes: int
    layer: int
    slot: int


class CudaStreamer(Streamer):
    """Ring of device slots, refilled by a feeder thread that enqueues copies ahead of compute.

    Host blocks are copied in place. Disk blocks pass pinned host slots, filled by a
    `ThreadStreamer`. Therefore disk, link and compute overlap as three stages.

    A copy into a slot waits, on the copy stream, for the event after the slot's last compute.
    Compute of a layer waits, on the compute stream, for the event after its copy. The host waits
    for neither.

    Encoded layers are decoded on the compute stream, into a shared buffer; this frees the slot.
    """

    def __init__(
        self,
        sources: LayerSources,
        trace: Trace,
        device: CopyDevice,
        meter: LinkMeter | None = None,
        lane: str = LINK,
    ) -> None:
        super().__init__(sources, trace, meter)
        self.device = device
        self._lane = lane
        # Disk lanes of the trace show layers only.
        upstream_trace = trace if lane == LINK else Trace(on=False)
        self._upstream = ThreadStreamer(sources.on_host(), upstream_trace, lane=DISK)
        streamed = (sources.packed_layout(i).nbytes for i in self.order)
        longest = max((*streamed, sources.slot_nbytes))
        n_slots = sources.n_slots if self.order else 0
        self._slots = [device.allocate(longest) for _ in range(n_slots)]
        self._free = [device.event() for _ in self._slots]  # after the last compute of each slot
        decoded = max((layer.layout.nbytes for layer in sources.encoded.values()), default=0)
        self._buffer = device.allocate(decoded) if decoded else None
        self._decoded: Event | None = None  # after decoding of the current layer
        # End events of enqueued, not consumed copies.
        self._ready: deque[Event] = deque()
        self._is_feeding = False
        self._timings: deque[_Copy] = deque()
        self._waits: deque[tuple[Event, Event]] = deque()
        self._counting = Lock()
        self.meter.before_read.add(self._count_finished)
        self._writes: deque[tuple[Event, Sequence[tuple[Tensor, Tensor]]]] = deque()
        self._epoch = device.record_compute()
        device.wait(self._epoch)
        self._epoch_s = time.perf_counter()
        self._feeder = Thread(target=self._work, name="copies", daemon=True)  # see ThreadStreamer
        self._feeder.start()

    def share_link(self, sources: LayerSources, lane: str) -> Self:
        return type(self)(sources, self._trace, self.device, self.meter, lane)

    def set_sources(self, sources: LayerSources) -> None:
        self.park()
        self._upstream.set_sources(sources.on_host())
        self._restart(sources)

    def write(self, moves: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy results (target, source) of the compute so far to the host, before later copies."""
        # Keep sources until copied, for at most two writes; a third write waits.
        while self._writes and (len(self._writes) > 1 or self.has_occurred(self._writes[0][0])):
            self.device.wait(self._writes.popleft()[0])
        _, done = self.device.copy(moves, self.device.record_compute())
        self._writes.append((done, moves))

    def has_occurred(self, event: Event) -> bool:
        """Return whether an event has occurred on the device."""
        return self.device.seconds_between(event, event) is not None

    def finish_writes(self) -> None:
        """Wait until all writes have reached the host."""
        while self._writes:
            self.device.wait(self._writes.popleft()[0])

    def park(self) -> None:
        with self._changed:
            self._is_parked = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_feeding)
        self._upstream.park()  # between two sweeps it would read ahead
        self.device.synchronize()
        self._count_finished()
        self._ready.clear()
        # Compute may still read slots that no copy has waited for.
        self._free = [self.device.record_compute()] * len(self._free)
        self._n_consumed = 0
        self._error = None
        self._decoded = None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._feeder.join()
        self._upstream.close()
        self.device.synchronize()
        self._count_finished()
        self.meter.before_read.discard(self._count_finished)
        self._slots.clear()
        self._buffer = None

    def _arrive(self, i: int) -> LayerView:
        idle = self.device.record_compute()
        with self._changed:
            self._wait_for(lambda: self._ready)
            ready = self._ready[0]
            slot = self._slots[self._n_consumed % len(self._slots)]
        self._waits.append((idle, ready))
        self.device.compute_waits_for(ready)
        encoded = self._sources.encoded.get(i)
        if encoded is None or self._buffer is None:
            return LayerView(i, self._sources.packed_layout(i), slot)
        decode_block(slot[: encoded.nbytes], len(encoded.chunks), self._buffer)
        self._decoded = self.device.record_compute()
        return LayerView(i, encoded.layout, self._buffer)

    def _release(self) -> None:
        self._refuse_closed()
        used = self._decoded or self.device.record_compute()
        self._decoded = None
        with self._changed:
            self._free[self._n_consumed % len(self._free)] = used
            self._ready.popleft()
            self._n_consumed += 1
            self._changed.notify_all()

    def _work(self) -> None:
        """Enqueue copies into free slots until closed; errors are raised by `sweep`."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._is_closed or not (self._is_parked or self._error or not self._slots)
                    )
                )
                if self._is_closed:
                    return
                self._is_feeding = True
            error = None
            try:
                self.device.select()
                self._feed_sweep()
            except BaseException as caught:
                error = caught
            with self._changed:
                self._error = error
                self._is_feeding = False
                self._changed.notify_all()

    def _feed_sweep(self) -> None:
        """Copy every streamed layer once, unless parked or closed."""
        with closing(self._upstream.sweep()) as sweep:
            for block in sweep:
                if self._sources.streamed[block.i] is None:
                    continue
                if (slot := self._wait_for_slot()) is None:
                    return
                done = self._copy(block, slot)
                with self._changed:
                    self._ready.append(done)
                    self._changed.notify_all()
                if self._sources.is_transient(block.i):
                    # The next step refills the pinned slot: finish the copy first.
                    self.device.wait(done)

    def _wait_for_slot(self) -> int | None:
        """Return the next slot after its last compute is enqueued; None if parked or closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_parked or self._is_closed or len(self._ready) < len(self._slots)
            )
            if self._is_parked or self._is_closed:
                return None
            return (self._n_consumed + len(self._ready)) % len(self._slots)

    def _copy(self, block: LayerView, slot: int) -> Event:
        """Enqueue a copy as a whole if both layouts are equal, else a copy of each tensor."""
        packed = self._sources.packed_layout(block.i)
        ranges = [(0, 0, packed.nbytes)]
        if block.layout != packed:
            sources = block.layout.by_name
            ranges = [(to.offset, sources[to.name].offset, to.nbytes) for to in packed.entries]
        target = self._slots[slot]
        moves = [(target[to : to + n], block.data[at : at + n]) for to, at, n in ranges]
        start, end = self.device.copy(moves, self._free[slot])
        nbytes = sum(n for *_, n in ranges)
        self._timings.append(_Copy(start, end, nbytes, block.i, slot))
        self._count_finished()
        return end

    def _count_finished(self) -> None:
        """Record finished copies, and waits from a layer's compute to the next layer's arrival."""
        seconds_between = self.device.seconds_between
        with self._counting:
            while self._timings and (copied := seconds_between(*self._timings[0][:2])) is not None:
                copy = self._timings.popleft()
                self.meter.add(copy.nbytes, copied)
                if self._trace.on:
                    started = self._epoch_s + (seconds_between(self._epoch, copy.start) or 0.0)
                    name = span_name(self._lane, copy.layer)
                    lane = slot_lane(self._lane, copy.slot)
                    self._trace.add(lane, name, started, started + copied)
            while self._waits and (waited := seconds_between(*self._waits[0])) is not None:
                self._waits.popleft()
                self.meter.waited_s += max(waited, 0.0)
