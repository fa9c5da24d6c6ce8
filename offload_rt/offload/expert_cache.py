"""Experts of mixtures, fetched into slots on the device as rows need them; those that are used least make room."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from math import ceil

import numpy as np
from torch import Tensor
from torch.cuda import Event

from offload_rt.errors import LinkError
from offload_rt.models.architecture import HostWork, LayerExperts, LayerWeights
from offload_rt.offload.host_experts import HostExperts
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.placement import ExpertSizes
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.stream_threads import Fetch, ReadThreads
from offload_rt.offload.tier import Read, Tier
from offload_rt.system.numa import Cpus
from offload_rt.system.trace import EXPERTS, NOTHING_ASKED, Trace, span_name, waits
from offload_rt.weights.layout import Layout, host_block

# The weights of a block.
View = Callable[[Layout, Tensor], LayerWeights]

# How much of what is known of the use of a layer's experts stays after each pass: half of it for some 14 passes. Between 0.9
# and 0.99 what is fetched differs by less than a tenth, now this way and now that (`bench/expert_policy.py`).
_MEMORY = 0.95
# Experts of the layer under way, of which a later chunk may need any, and expected ones stay before all others.
_SOON = 2.0
# Experts that are fetched ahead at most, by those that a row takes. More hold up what is needed and displace what is worth as
# much: without a limit passes took up to a quarter longer than with none ahead (`bench/expert_policy.py`).
_AHEAD = 0.25


class ExpertCache(ABC):
    """Slots on the device that hold experts of any layer.

    A layer's router says which its rows need. Those that are there are computed while others arrive; behind them come those
    that the next layer is likely to need. Room is made by the one of the least use: the share of rows that took it, with
    older passes counting less. None is left out, however few slots there are.

    host  computes some of those that are not there; None: all are brought
    """

    host: HostExperts | None = None

    def __init__(self, sizes: ExpertSizes, tier: Tier, view: View, slots: list[Tensor]) -> None:
        """tier: has expert e of layer `mixture.layers[k]` as block `k * mixture.n_experts + e`."""
        self.mixture, self.tier, self._view, self._slots = sizes.mixture, tier, view, slots
        self._changed = threading.Condition()  # guards all that follows
        self._held = np.full(len(slots), -1)  # the block in each slot, or on its way there; -1: none
        self._slot_of: dict[int, int] = {}
        self._taken = np.zeros(len(slots), dtype=bool)  # slots that are read into, or about to be computed from
        self._use, self._soon = np.zeros((2, sizes.n_blocks))
        self._needed: deque[int] = deque()  # blocks that have no slot yet
        self._ahead: deque[int] = deque()  # likely ones, whether or not they are there
        self._wanted: set[int] = set()  # of the layer under way, not computed yet
        self.n_brought = 0  # so far, or on their way, or computed by the host instead

    def of_layer(self, i: int, following: Callable[[], LayerWeights | None]) -> LayerExperts | None:
        """The experts of layer i, None where it has none; see `LayerExperts.following`."""
        layers = self.mixture.layers
        if i not in layers:
            return None
        k = layers.index(i)
        expect = partial(self.expect, (k + 1) % len(layers))
        return LayerExperts(partial(self.arrive, k), following, expect, self.host is not None)

    def arrive(
        self, k: int, n_rows: Mapping[int, int], work: HostWork | None = None
    ) -> Iterator[tuple[int, LayerWeights | Tensor]]:
        """See `LayerExperts.arrive`, of the k-th layer that has some. Raises LinkError if one cannot be read."""
        first = k * self.mixture.n_experts
        try:
            here = self._want(first, n_rows, work)
            begun = self.host.begin(first, here, work) if self.host and work and here else None
            while self._wanted:
                block = self._await()
                slot = self._slot_of[block]
                yield block - first, self._view(self.tier.layout(block), self._slots[slot])
                self._release(block)
            if self.host and begun:
                yield from zip((one - first for one in here), self.host.finish(begun), strict=True)
        finally:
            if self._wanted:
                self._forget()

    def expect(self, k: int, experts: Sequence[int]) -> None:
        """See `LayerExperts.expect`, of the k-th layer. It takes effect with the next `arrive`.

        Where nobody knows, it is those that are used most, if they are used more than what makes room for them.
        """
        n, use = self.mixture.n_experts, self._use
        with self._changed:
            if not experts:
                likely = np.argsort(-use[k * n : (k + 1) * n], kind="stable")[: self.mixture.n_used]
                least = self._least_use()
                experts = [one for one in likely.tolist() if use[k * n + one] > least]
            self._ahead = deque(k * n + one for one in experts[: ceil(_AHEAD * self.mixture.n_used)])

    def _release(self, block: int) -> None:
        """All that is done with a block that was wanted has been given to the device."""
        with self._changed:
            slot = self._slot_of[block]
            self._computed(slot)
            self._wanted.discard(block)
            self._taken[slot] = False
            self._fill()

    @abstractmethod
    def close(self) -> None:
        """End all transfers and release the slots; may be called again."""

    @abstractmethod
    def _fetch(self, block: int, slot: int, is_needed: bool) -> None:
        """Begin to bring a block into a slot."""

    @abstractmethod
    def _await(self) -> int:
        """A wanted block that is there, or whatever is computed from now on comes after its arrival."""

    @abstractmethod
    def _on_way(self) -> tuple[set[int], int]:
        """The wanted blocks that have a slot and are not there, and how many others are on their way."""

    @abstractmethod
    def _sort(self) -> None:
        """Of what was likely, hurry what is wanted now, and forget the rest if it has not begun to come."""

    @abstractmethod
    def _computed(self, slot: int) -> None:
        """All computing with a slot has been given to the device."""

    @abstractmethod
    def _settle(self) -> None:
        """Wait for what is under way, free the slots of what has not come, and forget errors."""

    def _want(self, first: int, n_rows: Mapping[int, int], work: HostWork | None = None) -> list[int]:
        """Begin to bring what is not there; returns the blocks that the host is to compute instead."""
        n, total = self.mixture.n_experts, sum(n_rows.values())
        with self._changed:
            use = self._use[first : first + n]
            use *= _MEMORY
            for expert, rows in n_rows.items():
                use[expert] += (1 - _MEMORY) * rows / total
            self._soon.fill(0)
            self._soon[first : first + n] = self._soon[list(self._ahead)] = _SOON
            self._wanted = {first + expert for expert in n_rows}
            self._sort()
            here = [] if self.host is None or work is None else self._leave(self.host, first, n_rows, work)
            self._needed = deque(one for one in sorted(self._wanted) if one not in self._slot_of)
            self._taken[[self._slot_of[one] for one in self._wanted & self._slot_of.keys()]] = True
            self._fill()
            return here

    def _leave(self, host: HostExperts, first: int, n_rows: Mapping[int, int], work: HostWork) -> list[int]:
        """What the host computes of what is wanted and not there; the most used of it comes all the same, if worth the room."""
        if host.times is None:
            host.measure(first, self.mixture.n_experts, work.rows(next(iter(n_rows)))[:1], work)
        coming, n_before = self._on_way()
        missing = {one: n_rows[one - first] for one in self._wanted if one in coming or one not in self._slot_of}
        here = host.choose(missing, self._use, coming, n_before)
        self._wanted.difference_update(here)
        self.n_brought += len(here)
        most = max((one for one in here if one not in coming), key=lambda one: self._use[one], default=None)
        if most is not None and self._use[most] > self._least_use():
            self._ahead.append(most)
        return here

    def _least_use(self) -> float:
        """Of what makes room."""
        return float(np.where(self._held < 0, 0.0, self._use[self._held]).min())

    def _fill(self) -> None:
        """Begin fetches as far as there is room: all that are needed, then likely ones. Called with the lock held."""
        while self._needed and (slot := self._room()) is not None:
            self._bring(self._needed.popleft(), slot, True)
        while not self._needed and self._ahead:
            if self._ahead[0] not in self._slot_of:
                slot = self._room()
                if slot is None or (self._held[slot] >= 0 and self._soon[self._held[slot]]):
                    return
                self._bring(self._ahead[0], slot, False)
            self._ahead.popleft()

    def _bring(self, block: int, slot: int, is_needed: bool) -> None:
        self._slot_of.pop(int(self._held[slot]), None)
        self._held[slot], self._slot_of[block], self._taken[slot] = block, slot, True
        self.n_brought += 1
        self._fetch(block, slot, is_needed)

    def _room(self) -> int | None:
        """The slot of which the content is missed least; None where all are taken."""
        if self._taken.all():
            return None
        missed = np.where(self._held < 0, -1.0, self._use[self._held] + self._soon[self._held])
        return int(np.where(self._taken, np.inf, missed).argmin())

    def _free(self, block: int) -> None:
        """Empty the slot of a block that has not come."""
        slot = self._slot_of.pop(block)
        self.n_brought -= 1
        self._held[slot], self._taken[slot] = -1, False

    def _forget(self) -> None:
        """A layer was left half-way: nothing more is fetched, and what has come stays."""
        with self._changed:
            self._needed.clear()
            self._ahead.clear()
            self._wanted.clear()
            self._settle()
            self._taken.fill(False)


class ThreadExperts(ReadThreads, ExpertCache):
    """Experts of a CPU: threads read those that are needed before those that are likely, part by part."""

    def __init__(
        self, sizes: ExpertSizes, n_slots: int, tier: Tier, view: View, meter: LinkMeter, trace: Trace,
        cpus: Cpus = frozenset(),
    ) -> None:  # fmt: skip
        """meter: of the layers' link, where that is the same; cpus: processors that the threads stay on, empty: any."""
        super().__init__(sizes, tier, view, [host_block(sizes.nbytes) for _ in range(n_slots)])
        self.meter, self._trace, self._link, self._cpus = meter, trace, EXPERTS, cpus
        self._error, self._is_closed, self._n_reading = None, False, 0
        self._urgent: deque[Fetch] = deque()
        self._idle: deque[Fetch] = deque()
        self._coming: dict[int, Fetch] = {}
        self._start(tier.n_parallel)

    def close(self) -> None:
        """See `ExpertCache.close`."""
        self._end()
        self._slots.clear()

    def _reads(self, block: int, slot: int) -> list[Read]:
        return self.tier.reads(block, self._slots[slot])

    def _fetch(self, block: int, slot: int, is_needed: bool) -> None:
        parts = self._reads(block, slot)[::-1]
        self._coming[block] = Fetch(block, slot, parts, len(parts))
        (self._urgent if is_needed else self._idle).append(self._coming[block])
        self._changed.notify_all()

    def _there(self, blocks: Iterable[int]) -> int | None:
        """The first of some blocks that has come."""
        return next((one for one in blocks if one in self._slot_of and one not in self._coming), None)

    def _await(self) -> int:
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._is_closed or self._there(self._wanted) is not None)
            if self._is_closed:
                raise LinkError("the weights were released while in use", change="close the model after the last token")
            if self._error is not None:
                raise self._error
            block = self._there(self._wanted)
        assert block is not None
        self._count_wait(started, span_name(EXPERTS, block))
        return block

    def _on_way(self) -> tuple[set[int], int]:
        wanted = self._wanted & self._coming.keys()
        return wanted, len(self._coming) - len(wanted)

    def _sort(self) -> None:
        likely, self._idle = self._idle, deque[Fetch]()
        for fetch in likely:
            if fetch.i in self._wanted:
                self._urgent.append(fetch)
            elif len(fetch.parts) == fetch.n_missing > 0:
                self._free(self._coming.pop(fetch.i).i)
            else:
                self._idle.append(fetch)

    def _computed(self, slot: int) -> None:
        """Computing is over when the call returns."""

    def _next(self) -> Fetch | None:
        for queue in (self._urgent, self._idle):
            while queue and not queue[0].parts:
                queue.popleft()
            if queue and self._error is None:
                return queue[0]
        return None

    def _arrived(self, fetch: Fetch) -> None:
        del self._coming[fetch.i]
        self._taken[fetch.slot] = fetch.i in self._wanted
        self._fill()

    def _settle(self) -> None:
        self._urgent.clear()
        self._idle.clear()
        self._changed.wait_for(lambda: not self._n_reading)
        for block in self._coming:
            self._free(block)
        self._coming.clear()
        self._error = None

    def _note_standstill(self) -> None:
        self._trace.state(waits(EXPERTS), NOTHING_ASKED)


class CardExperts(ExpertCache):
    """Experts beside a card, in pinned memory of the host: copies on the streams of the layers, ordered by events.

    What has been enqueued is there for whatever is computed behind its event, so the host waits for none.
    """

    def __init__(self, sizes: ExpertSizes, n_slots: int, tier: Tier, view: View, link: CudaStreamer) -> None:
        """link: the streamer of the layers, over whose streams these are copied."""
        self._meter, self._device = link.meter, link.device
        super().__init__(sizes, tier, view, [self._device.allocate(sizes.nbytes) for _ in range(n_slots)])
        self._last_use = [self._device.event() for _ in self._slots]
        self._ready = list(self._last_use)
        self._timings: deque[tuple[Event, Event, int]] = deque()  # of copies, and of waits for them, which move nothing

    @cached_property
    def copy_s(self) -> float:
        """Seconds of copying one, where all lie on the host."""
        found = []
        for source in map(self._source, range(3)):
            started, ended = self._device.copy([(self._slots[0][: len(source)], source)], self._device.event())
            self._device.wait(ended)
            found.append(self._device.seconds_between(started, ended) or 0.0)
        return min(found)

    def close(self) -> None:
        """See `ExpertCache.close`."""
        self._device.synchronize()
        self._slots.clear()

    def _source(self, block: int) -> Tensor:
        assert isinstance(self.tier, MemoryTier), "all are on the host"
        return self.tier.image(block).block

    def _fetch(self, block: int, slot: int, is_needed: bool) -> None:
        source = self._source(block)
        move = self._slots[slot][: len(source)], source
        started, self._ready[slot] = self._device.copy([move], self._last_use[slot])
        self._timings.append((started, self._ready[slot], len(source)))
        self._taken[slot] = is_needed

    def _await(self) -> int:
        """Those first whose copy has ended, or was enqueued first."""
        idle = self._device.record_compute()
        self._gather()
        there = {one: self._ready[self._slot_of[one]] for one in sorted(self._wanted) if one in self._slot_of}
        happened = (one for one, ready in there.items() if self._device.seconds_between(ready, ready) is not None)
        block = next(happened, next(iter(there)))
        self._timings.append((idle, there[block], 0))
        self._device.compute_waits_for(there[block])
        return block

    def _on_way(self) -> tuple[set[int], int]:
        self._count_finished()
        ready = {one: self._ready[self._slot_of[one]] for one in self._wanted if one in self._slot_of}
        wanted = {one for one, event in ready.items() if self._device.seconds_between(event, event) is None}
        return wanted, sum(nbytes > 0 for *_, nbytes in self._timings) - len(wanted)

    def _gather(self) -> None:
        """Let some of what is wanted be enqueued: all is that has a slot."""

    def _sort(self) -> None:
        """What was enqueued comes."""

    def _computed(self, slot: int) -> None:
        self._last_use[slot] = self._device.record_compute()
        self._count_finished()

    def _count_finished(self) -> None:
        while self._timings and (seconds := self._device.seconds_between(*self._timings[0][:2])) is not None:
            nbytes = self._timings.popleft()[2]
            self._meter.add(nbytes, seconds if nbytes else 0.0)
            self._meter.waited_s += 0.0 if nbytes else max(seconds, 0.0)

    def _settle(self) -> None:
        self._last_use = [self._device.record_compute()] * len(self._slots)
