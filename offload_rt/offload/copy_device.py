"""What a streamer asks of a CUDA device, in one place, so that its logic can be tested against a device that is none."""

import torch
from torch import Tensor
from torch.cuda import Event


class CopyDevice:
    """A CUDA device with a stream for copies beside the one for compute. Only `wait` and `synchronize` wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types there

    def allocate(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 on the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def event(self) -> Event:
        """An event that has not been recorded, which nothing waits for."""
        return Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as above

    def copy(self, target: Tensor, source: Tensor, after: Event) -> tuple[Event, Event]:
        """Enqueue a copy on the copy stream behind `after`; returns events recorded before and after it."""
        before, done = self.event(), self.event()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(after)
            before.record(self._copies)
            target.copy_(source, non_blocking=True)
            done.record(self._copies)
        return before, done

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
        """Seconds from one event to another, negative if it came first; None while not both have happened."""
        have_happened = start.query() and end.query()  # type: ignore[no-untyped-call]  # as above
        return start.elapsed_time(end) / 1e3 if have_happened else None

    def synchronize(self) -> None:
        """Hold the calling thread until all copies have ended."""
        self._copies.synchronize()
