"""Expert cache: device slots filled on demand; the least used experts are evicted."""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil

import numpy as np
from torch import Tensor

from offload_rt.models.layers import HostWork, LayerExperts, LayerWeights
from offload_rt.offload.host_experts import HostExperts
from offload_rt.offload.placement import ExpertSizes
from offload_rt.offload.streamer import Streamer
from offload_rt.offload.tier import Tier
from offload_rt.weights.layout import Layout

# Creates the weights of a block from its layout and bytes.
MakeWeights = Callable[[Layout, Tensor], LayerWeights]

# Decay of expert usage per pass, a half-life of about 14 passes. Between 0.9 and 0.99 the fetched
# bytes differ by less than a tenth, without a trend (`bench/experts/policy.py`).
_MEMORY = 0.95
# Priority of experts of the current layer, which later chunks may need, and of predicted experts.
_SOON = 2.0
# Maximum experts prefetched, relative to the experts per row. Further prefetches delay needed
# experts and evict equally useful experts: without a limit, passes took up to 25 % longer than
# without any prefetch (`bench/experts/policy.py`).
_AHEAD = 0.25


class ExpertCache(ABC):
    """Device slots for experts of all layers.

    The router of a layer determines the needed experts. Cached experts are computed while missing
    experts arrive, followed by experts predicted for the next layer. Evicted first are experts with
    the lowest usage: the share of rows routed to them, decaying per pass. Every needed expert is
    computed, for any number of slots.
    """

    host: HostExperts | None = None  # computes some missing experts

    def __init__(
        self, sizes: ExpertSizes, tier: Tier, view: MakeWeights, slots: list[Tensor]
    ) -> None:
        """tier: block `k * mixture.n_experts + e` is expert e of layer `mixture.layers[k]`."""
        self.mixture = sizes.mixture
        self.tier = tier
        self._view = view
        self._routers: dict[int, LayerWeights] = {}  # resident layers with experts
        self._slots = slots
        self._changed = threading.Condition()  # guards all attributes below
        self._held = np.full(len(slots), -1)  # block in, or being copied to, each slot; -1 for none
        self._slot_of: dict[int, int] = {}
        self._taken = np.zeros(len(slots), dtype=bool)  # slots in transfer or in use
        self._use, self._soon = np.zeros((2, sizes.n_blocks))
        self._needed: deque[int] = deque()  # needed blocks without a slot
        self._ahead: deque[int] = deque()  # predicted blocks, cached or not
        self._wanted: set[int] = set()  # blocks of the current layer, not computed yet
        self.n_fetched = 0  # blocks fetched, in transfer, or computed by the host

    def attach(self, streamer: Streamer, i: int, weights: LayerWeights) -> None:
        """Attach the experts of layer i to its weights; `streamer` provides the layers."""
        layers = self.mixture.layers
        if i not in layers:
            return
        k = layers.index(i)
        weights.experts = LayerExperts(
            partial(self.arrive, k),
            partial(self._following, streamer, k),
            partial(self.expect, (k + 1) % len(layers)),
            self.host is not None,
        )

    def _following(self, streamer: Streamer, k: int) -> LayerWeights | None:
        if k + 1 == len(self.mixture.layers):
            return None
        i = self.mixture.layers[k + 1]
        block = streamer.resident(i)
        if block is not None and i not in self._routers:
            self._routers[i] = self._view(block.layout, block.data)
            self.attach(streamer, i, self._routers[i])
        return self._routers.get(i)

    def arrive(
        self, k: int, n_rows: Mapping[int, int], work: HostWork | None = None
    ) -> Iterator[tuple[int, LayerWeights | Tensor]]:
        """See `LayerExperts.arrive`, for the k-th expert layer. Raises LinkError."""
        first = k * self.mixture.n_experts
        host = self.host
        try:
            host_blocks = self._request(first, n_rows, work)
            begun = host.begin(first, host_blocks, work) if host and work and host_blocks else None
            while self._wanted:
                block = self._await()
                slot = self._slot_of[block]
                yield block - first, self._view(self.tier.layout(block), self._slots[slot])
                self.release(block)
            if host and begun:
                numbers = (block - first for block in host_blocks)
                yield from zip(numbers, host.finish(begun), strict=True)
        finally:
            if self._wanted:
                self._abandon()

    def expect(self, k: int, experts: Sequence[int]) -> None:
        """See `LayerExperts.expect`, for the k-th expert layer. Applies to the next `arrive`.

        Without a prediction, prefetch the most used experts if their usage exceeds that of the next
        evicted expert.
        """
        n = self.mixture.n_experts
        use = self._use
        with self._changed:
            if not experts:
                likely = np.argsort(-use[k * n : (k + 1) * n], kind="stable")[: self.mixture.n_used]
                least = self._least_use()
                experts = [expert for expert in likely.tolist() if use[k * n + expert] > least]
            blocks = [k * n + expert for expert in experts]
            missing = [block for block in blocks if block not in self._slot_of]
            omitted = set(missing[ceil(_AHEAD * self.mixture.n_used) :])
            self._ahead = deque(block for block in blocks if block not in omitted)

    def release(self, block: int) -> None:
        """Mark a block as computed and free its slot for eviction."""
        with self._changed:
            slot = self._slot_of[block]
            self._computed(slot)
            self._wanted.discard(block)
            self._taken[slot] = False
            self._fill()

    @abstractmethod
    def close(self) -> None:
        """Stop all transfers and free the slots; idempotent."""

    @abstractmethod
    def _fetch(self, block: int, slot: int, is_needed: bool) -> None:
        """Start copying a block into a slot."""

    @abstractmethod
    def _await(self) -> int:
        """Return a wanted block that is present, or present before all further compute."""

    @abstractmethod
    def _in_transfer(self) -> tuple[set[int], int]:
        """Return wanted blocks in transfer, and the number of further blocks in transfer."""

    def _sort(self) -> None:  # default: copies start at once
        """Prioritize predicted blocks now wanted; cancel other prefetches not yet started."""

    def _computed(self, slot: int) -> None:  # default: compute has finished
        """Record that all compute on a slot is enqueued."""

    @abstractmethod
    def _drain(self) -> None:
        """Wait for running transfers, free slots of incomplete blocks, clear errors."""

    def _request(
        self, first: int, n_rows: Mapping[int, int], work: HostWork | None = None
    ) -> list[int]:
        """Start fetching missing blocks; return the blocks for the host to compute instead."""
        n = self.mixture.n_experts
        total = sum(n_rows.values())
        with self._changed:
            use = self._use[first : first + n]
            use *= _MEMORY
            for expert, rows in n_rows.items():
                use[expert] += (1 - _MEMORY) * rows / total
            self._soon.fill(0)
            self._soon[first : first + n] = self._soon[list(self._ahead)] = _SOON
            self._wanted = {first + expert for expert in n_rows}
            self._sort()
            host_blocks = []
            if self.host is not None and work is not None:
                host_blocks = self._select_for_host(self.host, first, n_rows, work)
            cached = self._wanted & self._slot_of.keys()
            self._needed = deque(sorted(self._wanted - cached))
            self._taken[[self._slot_of[block] for block in cached]] = True
            self._fill()
            return host_blocks

    def _select_for_host(
        self, host: HostExperts, first: int, n_rows: Mapping[int, int], work: HostWork
    ) -> list[int]:
        """Select missing blocks for the host; still prefetch the most used if worth a slot."""
        coming, n_before = self._in_transfer()
        missing = {
            block: n_rows[block - first]
            for block in self._on_host()
            if block in coming or block not in self._slot_of
        }
        if host.times is None and (blocks := self._timed(first, missing)):
            host.measure(first, blocks, work.rows(next(iter(n_rows)))[:1], work)
        host_blocks = host.select(missing, self._use, coming, n_before)
        self._wanted.difference_update(host_blocks)
        self.n_fetched += len(host_blocks)
        not_coming = (block for block in host_blocks if block not in coming)
        top = max(not_coming, key=lambda block: self._use[block], default=None)
        if top is not None and self._use[top] > self._least_use():
            self._ahead.append(top)
        return host_blocks

    def _on_host(self) -> Iterable[int]:
        """Return the wanted blocks in host memory; all without a disk."""
        return self._wanted

    def _timed(self, first: int, missing: Collection[int]) -> Sequence[int]:
        """Return blocks of a layer in host memory, to time the host."""
        return range(first, first + self.mixture.n_experts)

    def _least_use(self) -> float:
        return float(np.where(self._held < 0, 0.0, self._use[self._held]).min())

    def _fill(self) -> None:
        """Start fetches while slots are free: needed blocks, then predicted. Lock held."""
        while self._needed and (slot := self._room()) is not None:
            self._start_fetch(self._needed.popleft(), slot, True)
        while not self._needed and self._ahead:
            if self._ahead[0] not in self._slot_of:
                slot = self._room()
                if slot is None or (self._held[slot] >= 0 and self._soon[self._held[slot]]):
                    return
                self._start_fetch(self._ahead[0], slot, False)
            self._ahead.popleft()

    def _start_fetch(self, block: int, slot: int, is_needed: bool) -> None:
        self._slot_of.pop(int(self._held[slot]), None)
        self._held[slot] = block
        self._slot_of[block] = slot
        self._taken[slot] = True
        self.n_fetched += 1
        self._fetch(block, slot, is_needed)

    def _room(self) -> int | None:
        if self._taken.all():
            return None
        missed = np.where(self._held < 0, -1.0, self._use[self._held] + self._soon[self._held])
        return int(np.where(self._taken, np.inf, missed).argmin())

    def _free(self, block: int) -> None:
        slot = self._slot_of.pop(block)
        self.n_fetched -= 1
        self._held[slot] = -1
        self._taken[slot] = False

    def _abandon(self) -> None:
        """Abandon a layer: stop fetching, keep blocks that have arrived."""
        with self._changed:
            self._needed.clear()
            self._ahead.clear()
            self._wanted.clear()
            self._drain()
            self._taken.fill(False)
