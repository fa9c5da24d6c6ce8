"""Experts beside a card whose host does not hold them all: two caches, of which the one fetches from the other."""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.cuda import Event

from offload_rt.models.architecture import HostWork
from offload_rt.offload.copy_device import CopyDevice
from offload_rt.offload.expert_cache import CardExperts, ThreadExperts, View
from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.pinning import pin, unpin
from offload_rt.offload.placement import ExpertSizes
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.tier import Read, Tier
from offload_rt.system.numa import Cpus, staying_near
from offload_rt.system.trace import Trace


class PinnedExperts(ThreadExperts):
    """Experts on the host beside a card, which it copies from pinned slots; threads read those that are not there."""

    def __init__(
        self, sizes: ExpertSizes, tier: Tier, view: View, device: CopyDevice, trace: Trace, cpus: Cpus
    ) -> None:  # fmt: skip
        self._device = device
        self._copied = [device.record_compute()] * sizes.n_on_host  # behind the last copy out of each slot
        super().__init__(sizes, sizes.n_on_host, tier, view, LinkMeter(), trace, cpus)
        with staying_near(cpus):
            self._pinned = [slot for slot in self._slots if pin(slot)]

    def close(self) -> None:
        """See `ExpertCache.close`."""
        super().close()
        for slot in self._pinned:
            unpin(slot)
        self._pinned.clear()

    def _reads(self, block: int, slot: int) -> list[Read]:
        return [partial(self._read_behind, self._copied[slot], read) for read in super()._reads(block, slot)]

    def _read_behind(self, copied: Event, read: Read) -> int:
        self._device.wait(copied)
        return read()

    def leave(self, block: int, copied: Event) -> None:
        """A copy of a block was enqueued, whose slot is free behind that."""
        self._copied[self._slot_of[block]] = copied
        if block in self._wanted:
            self._release(block)


class FarExperts(CardExperts):
    """Experts beside a card that come by way of a cache on the host.

    The host waits for the disk where nothing else that is needed is on the card or on its way there. It keeps what the card
    lacked most: its counts are of what was asked of it.
    """

    def __init__(self, sizes: ExpertSizes, n_slots: int, host: PinnedExperts, view: View, link: CudaStreamer) -> None:
        self._host = host
        super().__init__(sizes, n_slots, host.tier, view, link)

    def close(self) -> None:
        """See `ExpertCache.close`."""
        super().close()
        self._host.close()

    def expect(self, k: int, experts: Sequence[int]) -> None:
        """See `ExpertCache.expect`; those that are not on the host are read ahead."""
        super().expect(k, experts)
        first = k * self.mixture.n_experts
        self._host.expect(k, [one - first for one in self._ahead if one not in self._slot_of])

    def _want(self, first: int, n_rows: Mapping[int, int], work: HostWork | None = None) -> list[int]:
        self._host._want(first, {one: n for one, n in n_rows.items() if first + one not in self._slot_of})
        return super()._want(first, n_rows, work)

    def _fill(self) -> None:
        """What is needed leaves the host as it comes there; of what is likely, what is there."""
        self._needed.clear()
        host = self._host
        with host._changed:
            while (block := host._there(host._wanted)) is not None and (slot := self._room()) is not None:
                self._bring(block, slot, True)
            if not host._wanted:
                self._ahead = deque(i for i in self._ahead if i in self._slot_of or host._there([i]) is not None)
                super()._fill()

    def _source(self, block: int) -> Tensor:
        return self._host._slots[self._host._slot_of[block]][: self.tier.layout(block).nbytes]

    def _fetch(self, block: int, slot: int, is_needed: bool) -> None:
        super()._fetch(block, slot, is_needed)
        self._host.leave(block, self._ready[slot])

    def _gather(self) -> None:
        while self._host._wanted and not self._wanted & self._slot_of.keys():
            self._host._await()
            with self._changed:
                self._fill()

    def _forget(self) -> None:
        self._host._forget()
        super()._forget()
