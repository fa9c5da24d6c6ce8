"""Expert cache of a GPU: copies from pinned host memory fill the slots."""

from collections import deque
from collections.abc import Iterable
from functools import cached_property

from torch import Tensor
from torch.cuda import Event

from offload_rt.offload.expert_cache import ExpertCache, MakeWeights
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.placement import ExpertSizes
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.tier import Tier


class CardExperts(ExpertCache):
    """GPU expert cache over pinned host memory; copies share the layers' streams.

    A block counts as present once its copy is enqueued: compute waits for the event on the device.
    """

    def __init__(
        self, sizes: ExpertSizes, n_slots: int, tier: Tier, view: MakeWeights, link: CudaStreamer
    ) -> None:
        """link: streamer of the layers; its streams also copy the experts."""
        self._link = link
        self._device = link.device
        slots = [self._device.allocate(sizes.nbytes) for _ in range(n_slots)]
        super().__init__(sizes, tier, view, slots)
        # Compute may still use memory that the allocator has reused for the slots.
        self._last_use = [self._device.record_compute()] * len(self._slots)
        self._ready = list(self._last_use)
        # Start, end and bytes of copies; 0 bytes for waits of the device.
        self._timings: deque[tuple[Event, Event, int]] = deque()

    @cached_property
    def copy_s(self) -> float:
        """Seconds to copy an expert from the host."""
        times = []
        for source in self._copied_to_time():
            move = self._slots[0][: len(source)], source
            started, ended = self._device.copy([move], self._device.event())
            self._device.wait(ended)
            times.append(self._device.seconds_between(started, ended) or 0.0)
        return min(times)

    def _copied_to_time(self) -> Iterable[Tensor]:
        return map(self._source, range(3))

    def close(self) -> None:
        """See `ExpertCache.close`."""
        self._device.synchronize()
        self._slots.clear()

    def _source(self, block: int) -> Tensor:
        assert isinstance(self.tier, MemoryTier), "all experts are on the host"
        return self.tier.image(block).block

    def _fetch(self, block: int, slot: int, is_needed: bool) -> None:
        source = self._source(block)
        move = self._slots[slot][: len(source)], source
        started, self._ready[slot] = self._device.copy([move], self._last_use[slot])
        self._timings.append((started, self._ready[slot], len(source)))
        self._taken[slot] = is_needed

    def _await(self) -> int:
        """Return a block with a finished copy, else the first enqueued block."""
        idle = self._device.record_compute()
        self._gather()
        ends = self._ends()
        finished = (block for block, end in ends.items() if self._link.has_occurred(end))
        block = next(finished, next(iter(ends)))
        self._timings.append((idle, ends[block], 0))
        self._device.compute_waits_for(ends[block])
        return block

    def _ends(self) -> dict[int, Event]:
        """Return the events after the copies of wanted blocks, in order."""
        blocks = sorted(self._wanted & self._slot_of.keys())
        return {block: self._ready[self._slot_of[block]] for block in blocks}

    def _in_transfer(self) -> tuple[set[int], int]:
        self._count_finished()
        ends = self._ends().items()
        wanted = {block for block, end in ends if not self._link.has_occurred(end)}
        return wanted, sum(nbytes > 0 for *_, nbytes in self._timings) - len(wanted)

    def _gather(self) -> None:
        """Ensure that some wanted block is enqueued; all blocks with a slot are."""

    def _sort(self) -> None:
        """Do nothing: enqueued copies cannot be reordered or canceled."""

    def _computed(self, slot: int) -> None:
        self._last_use[slot] = self._device.record_compute()
        self._count_finished()

    def _count_finished(self) -> None:
        while (
            self._timings
            and (seconds := self._device.seconds_between(*self._timings[0][:2])) is not None
        ):
            nbytes = self._timings.popleft()[2]
            if nbytes:
                self._link.meter.add(nbytes, seconds)
            else:
                self._link.meter.waited_s += max(seconds, 0.0)

    def _drain(self) -> None:
        self._last_use = [self._device.record_compute()] * len(self._slots)
