"""CUDA operations of a streamer, in one class, so that tests can replace the device."""

from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor
from torch.cuda import Event, Stream

# A single copy engine serves all copies to a GPU. It ignores priorities, starts the first ready
# copy and stays with a stream that has another copy ready. Therefore chunks of a single stream act
# as one copy (meta-pytorch/torchrec 4303, 4315, 4339: chunks of 32 MiB).
CHUNK = 32 << 20


class CopyDevice:
    """CUDA device with two copy streams besides the compute stream.

    Only `wait` and `synchronize` block the thread, without spinning.
    Chunks of a copy alternate between the two streams, each ready after the previous chunk.
    Therefore a copy of another stream waits for the current chunk only.
    """

    def __init__(self, device: torch.device, chunk_nbytes: int = CHUNK) -> None:
        self._device = device
        self._chunk_nbytes = chunk_nbytes
        self._last = Stream(device)  # type: ignore[no-untyped-call]  # torch has no types there
        self._next = Stream(device)  # type: ignore[no-untyped-call]
        self._lock = Lock()  # for streamers that share the device
        self._turn = Event()  # type: ignore[no-untyped-call]  # as above

    def select(self) -> None:
        """Make the device current: a `with` of torch would create a context on GPU 0."""
        torch.cuda.set_device(self._device)

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate (nbytes,) uint8 on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def event(self) -> Event:
        """Create an event; until recorded, waiting for it returns immediately."""
        return Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]  # as above

    def copy(self, moves: Sequence[tuple[Tensor, Tensor]], after: Event) -> tuple[Event, Event]:
        """Enqueue copies (target, source) after `after` and earlier ones; return start and end."""
        before = self.event()
        done = self.event()
        with self._lock:
            stream = self._alternate()
            stream.wait_event(after)
            before.record(stream)
            for target, source in moves:
                chunks = (torch.split(block, self._chunk_nbytes) for block in (target, source))
                for target_chunk, source_chunk in zip(*chunks, strict=True):
                    stream = self._alternate()
                    with torch.cuda.stream(stream):
                        self._move(target_chunk, source_chunk)
            done.record(stream)
        return before, done

    def _move(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def _alternate(self) -> Stream:
        """Return the other copy stream, ordered after all work of the current stream."""
        self._turn.record(self._last)
        self._next.wait_event(self._turn)
        self._last, self._next = self._next, self._last
        return self._last

    def compute_waits_for(self, event: Event) -> None:
        """Order all later compute after `event`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def record_compute(self) -> Event:
        """Record an event after all compute enqueued so far."""
        event = self.event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        """Block the calling thread until `event` has occurred."""
        event.synchronize()

    def seconds_between(self, start: Event, end: Event) -> float | None:
        """Return the seconds between two events, possibly negative; None before both occurred."""
        have_occurred = start.query() and end.query()  # type: ignore[no-untyped-call]  # as above
        return start.elapsed_time(end) / 1e3 if have_occurred else None

    def synchronize(self) -> None:
        """Block the calling thread until all copies have ended."""
        end = self.event()
        with self._lock:
            end.record(self._last)
        self.wait(end)
