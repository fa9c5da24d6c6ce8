"""What a streamer asks of a CUDA device, in one place, so that its logic can be tested against a
device that is none.
"""

from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor
from torch.cuda import Event, Stream

# One engine makes all copies to a card. It heeds no priority, takes what is ready first, and stays
# with a stream that has another copy ready, so chunks of one stream pass as one
# (meta-pytorch/torchrec 4303, 4315, 4339: chunks of 32 MiB).
_CHUNK = 32 << 20


class CopyDevice:
    """A CUDA device with streams for copies, either way, beside that for compute. Only `wait` and
    `synchronize` wait, asleep.

    Chunks of a copy take turns on two streams, each ready when the one before has ended: a copy of
    another stream waits for the chunk that is under way and no longer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last, self._next = Stream(device), Stream(device)  # type: ignore[no-untyped-call]  # torch has no types there
        self._lock = Lock()  # for streamers that share the device
        self._turn = Event()  # type: ignore[no-untyped-call]  # as above

    def select(self) -> None:
        """Make the device current in the calling thread.

        A thread begins with GPU 0, where leaving `torch.cuda.stream` would create a context of 0.5
        GB.
        """
        torch.cuda.set_device(self._device)

    def allocate(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def event(self) -> Event:
        """An event that has not been recorded, which nothing waits for."""
        return Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]  # as above

    def copy(self, moves: Sequence[tuple[Tensor, Tensor]], after: Event) -> tuple[Event, Event]:
        """Enqueue copies behind `after` and all earlier ones; returns events recorded before and
        after them.

        moves  targets and sources, (n,) uint8 each
        """
        before = self.event()
        done = self.event()
        with self._lock:
            stream = self._take_turns()
            stream.wait_event(after)
            before.record(stream)
            for target, source in moves:
                for to, of in zip(
                    torch.split(target, _CHUNK), torch.split(source, _CHUNK), strict=True
                ):
                    stream = self._take_turns()
                    with torch.cuda.stream(stream):
                        self._move(to, of)
            done.record(stream)
        return before, done

    def _move(self, to: Tensor, source: Tensor) -> None:
        """Enqueue the copy of a chunk on the current stream."""
        to.copy_(source, non_blocking=True)

    def _take_turns(self) -> Stream:
        """The other stream, behind all that was given to this one."""
        self._turn.record(self._last)
        self._next.wait_event(self._turn)
        self._last, self._next = self._next, self._last
        return self._last

    def compute_waits_for(self, event: Event) -> None:
        """Whatever is computed from now on runs after `event`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def record_compute(self) -> Event:
        """An event that comes after all that has been given to compute so far."""
        event = self.event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        """Hold the calling thread until `event` has happened."""
        event.synchronize()

    def seconds_between(self, start: Event, end: Event) -> float | None:
        """Seconds from one event to another, negative if it came first; None while not both have
        happened.
        """
        have_happened = start.query() and end.query()  # type: ignore[no-untyped-call]  # as above
        return start.elapsed_time(end) / 1e3 if have_happened else None

    def synchronize(self) -> None:
        """Hold the calling thread until all copies have ended."""
        end = self.event()
        with self._lock:
            end.record(self._last)
        self.wait(end)
