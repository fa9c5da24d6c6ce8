"""Expert caches of a GPU: copies from pinned host memory fill the slots."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial

from torch import Tensor
from torch.cuda import Event

from offload_rt.models.layers import HostWork
from offload_rt.offload.copy_device import CopyDevice
from offload_rt.offload.expert_cache import ExpertCache, MakeWeights
from offload_rt.offload.host_experts import HostExperts
from offload_rt.offload.memory import MemoryTier, pin, unpin
from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.placement import ExpertSizes
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.thread_experts import ThreadExperts
from offload_rt.offload.tier import Read, Tier
from offload_rt.system.numa import Cpus, staying_near
from offload_rt.system.trace import Trace
from offload_rt.weights.layout import PackedLayer


class CardExperts(ExpertCache):
    """GPU expert cache over pinned host memory. A block is present once its copy is enqueued."""

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
        blocks = sorted(self._wanted & self._slot_of.keys())
        return {block: self._ready[self._slot_of[block]] for block in blocks}

    def _in_transfer(self) -> tuple[set[int], int]:
        self._count_finished()
        ends = self._ends().items()
        wanted = {block for block, end in ends if not self._link.has_occurred(end)}
        return wanted, sum(nbytes > 0 for *_, nbytes in self._timings) - len(wanted)

    def _gather(self) -> None:
        """Ensure that some wanted block is enqueued; all blocks with a slot are."""

    def _computed(self, slot: int) -> None:
        self._last_use[slot] = self._device.record_compute()
        self._count_finished()

    def _count_finished(self) -> None:
        meter, between = self._link.meter, self._device.seconds_between
        while self._timings and (seconds := between(*self._timings[0][:2])) is not None:
            nbytes = self._timings.popleft()[2]
            if nbytes:
                meter.add(nbytes, seconds)
            else:
                meter.waited_s += max(seconds, 0.0)

    def _drain(self) -> None:
        self._last_use = [self._device.record_compute()] * len(self._slots)


class PinnedExperts(ThreadExperts):
    """Host cache in pinned slots, read by copies to the GPU; threads read misses from disk."""

    def __init__(
        self,
        sizes: ExpertSizes,
        tier: Tier,
        view: MakeWeights,
        device: CopyDevice,
        trace: Trace,
        cpus: Cpus,
    ) -> None:
        self._device = device
        # Event after the last copy out of each slot.
        self._copied = [device.record_compute()] * sizes.n_on_host
        super().__init__(sizes, sizes.n_on_host, tier, view, LinkMeter(), trace, cpus)
        with staying_near(cpus):
            self._pinned = [slot for slot in self._slots if pin(slot)]

    def close(self) -> None:
        super().close()
        unpin(*self._pinned)
        self._pinned.clear()

    def _reads(self, block: int, slot: int) -> list[Read]:
        reads = super()._reads(block, slot)
        return [partial(self._read_behind, self._copied[slot], read) for read in reads]

    def _read_behind(self, copied: Event, read: Read) -> int:
        self._device.wait(copied)
        return read()

    def image(self, i: int) -> PackedLayer:
        """Return a block that is present."""
        layout = self.tier.layout(i)
        return PackedLayer(self._slots[self._slot_of[i]][: layout.nbytes], layout)

    def present(self) -> set[int]:
        """Return the wanted blocks that have arrived."""
        with self._changed:
            return self._wanted & (self._slot_of.keys() - self._coming.keys())

    def hold(self, blocks: Collection[int]) -> None:
        """Keep wanted blocks until `release`, and do not copy them as needed blocks."""
        with self._changed:
            self._wanted.difference_update(blocks)

    def free_after(self, block: int, copied: Event) -> None:
        """Free the slot of a block after its enqueued copy."""
        self._copied[self._slot_of[block]] = copied
        if block in self._wanted:
            self.release(block)


class TieredExperts(CardExperts):
    """Device cache of experts, filled through a cache on the host.

    It waits for the disk only if no needed expert is on the device or being copied. The host cache
    keeps the experts that the device missed most often, because it counts only device misses. The
    host computes some experts that its cache contains at the start of a layer. Experts from the
    disk are copied: the disk is slower than the link.
    """

    def __init__(
        self, sizes: ExpertSizes, n_slots: int, host: PinnedExperts, link: CudaStreamer
    ) -> None:
        self._host = host
        super().__init__(sizes, n_slots, host.tier, host._view, link)

    def close(self) -> None:
        super().close()
        self._host.close()

    def expect(self, k: int, experts: Sequence[int]) -> None:
        super().expect(k, experts)
        first = k * self.mixture.n_experts
        self._host.expect(k, [block - first for block in self._ahead if block not in self._slot_of])

    def _request(
        self, first: int, n_rows: Mapping[int, int], work: HostWork | None = None
    ) -> list[int]:
        missing = {k: n for k, n in n_rows.items() if first + k not in self._slot_of}
        self._host._request(first, missing)
        return super()._request(first, n_rows, work)

    def _on_host(self) -> Iterable[int]:
        return self._host.present()

    def _timed(self, first: int, missing: Collection[int]) -> Sequence[int]:
        return sorted(missing)

    def _select_for_host(
        self, host: HostExperts, first: int, n_rows: Mapping[int, int], work: HostWork
    ) -> list[int]:
        blocks = super()._select_for_host(host, first, n_rows, work)
        self._host.hold(blocks)
        return blocks

    def _copied_to_time(self) -> Iterable[Tensor]:
        return self._host._slots[:3]

    def _fill(self) -> None:
        """Copy needed experts as they arrive on the host; copy likely experts present there."""
        self._needed.clear()
        host = self._host
        with host._changed:
            while (block := host._first_present(host._wanted)) is not None:
                slot = self._room()
                if slot is None:
                    break
                self._start_fetch(block, slot, True)
            if not host._wanted:
                there = self._slot_of.keys() | (host._slot_of.keys() - host._coming.keys())
                self._ahead = deque(block for block in self._ahead if block in there)
                super()._fill()

    def _source(self, block: int) -> Tensor:
        return self._host._slots[self._host._slot_of[block]][: self.tier.layout(block).nbytes]

    def _fetch(self, block: int, slot: int, is_needed: bool) -> None:
        super()._fetch(block, slot, is_needed)
        self._host.free_after(block, self._ready[slot])

    def _gather(self) -> None:
        while self._host._wanted and not self._wanted & self._slot_of.keys():
            self._host._await()
            with self._changed:
                self._fill()

    def _abandon(self) -> None:
        if self.host is not None:
            self.host.wait()
        self._host._abandon()
        super()._abandon()
