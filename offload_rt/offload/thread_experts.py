"""Expert cache of a CPU: reader threads fill the slots."""

import time
from collections import deque
from collections.abc import Iterable

from offload_rt.offload.expert_cache import ExpertCache, MakeWeights
from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.placement import ExpertSizes
from offload_rt.offload.stream_threads import Fetch, ReadThreads
from offload_rt.offload.tier import Read, Tier
from offload_rt.system.numa import Cpus
from offload_rt.system.trace import EXPERTS, NOTHING_ASKED, Trace, span_name, waits
from offload_rt.weights.layout import host_block


class ThreadExperts(ReadThreads, ExpertCache):
    """CPU expert cache: threads read needed experts before predicted experts, part by part."""

    def __init__(
        self,
        sizes: ExpertSizes,
        n_slots: int,
        tier: Tier,
        view: MakeWeights,
        meter: LinkMeter,
        trace: Trace,
        cpus: Cpus = frozenset(),
    ) -> None:
        """meter: shared with the layers on the same link; cpus: CPU affinity, empty for any."""
        super().__init__(sizes, tier, view, [host_block(sizes.nbytes) for _ in range(n_slots)])
        self.meter = meter
        self._trace = trace
        self._link = EXPERTS
        self._cpus = cpus
        self._urgent: deque[Fetch] = deque()
        self._idle: deque[Fetch] = deque()
        self._coming: dict[int, Fetch] = {}
        self._start(tier.n_parallel)

    def close(self) -> None:
        self._end()
        self._slots.clear()

    def _reads(self, block: int, slot: int) -> list[Read]:
        return self.tier.reads(block, self._slots[slot])

    def _fetch(self, block: int, slot: int, is_needed: bool) -> None:
        parts = self._reads(block, slot)[::-1]
        self._coming[block] = Fetch(block, slot, parts, len(parts))
        (self._urgent if is_needed else self._idle).append(self._coming[block])
        self._changed.notify_all()

    def _first_present(self, blocks: Iterable[int]) -> int | None:
        present, coming = self._slot_of, self._coming
        return next((block for block in blocks if block in present and block not in coming), None)

    def _await(self) -> int:
        started = time.perf_counter()
        with self._changed:
            self._wait_for(lambda: self._first_present(self._wanted) is not None)
            block = self._first_present(self._wanted)
        assert block is not None
        self._count_wait(started, span_name(EXPERTS, block))
        return block

    def _in_transfer(self) -> tuple[set[int], int]:
        wanted = self._wanted & self._coming.keys()
        return wanted, len(self._coming) - len(wanted)

    def _sort(self) -> None:
        likely = [*self._idle]
        self._idle.clear()
        for fetch in likely:
            if fetch.i in self._wanted:
                self._urgent.append(fetch)
            elif len(fetch.parts) == fetch.n_missing > 0:
                self._free(self._coming.pop(fetch.i).i)
            else:
                self._idle.append(fetch)

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

    def _drain(self) -> None:
        self._urgent.clear()
        self._idle.clear()
        self._changed.wait_for(lambda: not self._n_reading)
        for block in self._coming:
            self._free(block)
        self._coming.clear()
        self._error = None

    def _note_standstill(self) -> None:
        self._trace.state(waits(EXPERTS), NOTHING_ASKED)
