"""The loop on a virtual clock: links, slots, layers and drafting as events, for machines that are not at hand.

It moves no byte and computes no number. It keeps the rules by which one thing waits for another in the engine: a link carries
one layer at a time, in the order of the sweep, and on into the next pass; a layer may start to arrive when a slot is free, and
a slot is free when the layer that was in it has been computed; with a card, a layer from the disk crosses the disk's link into
a pinned slot and then the host's; the device drafts, computes the layers in order, and ends with the head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload_rt.offload.placement import Plan
from offload_rt.system.machine import ComputeTimes
from offload_rt.tree.search import expected_tokens
from offload_rt.tree.topology import Topology

# Passes until the slots are as full at the start of one as at the start of the next.
_N_SETTLING = 2


@dataclass(frozen=True)
class StreamSchedule:
    """How layers reach the device.

    paths       per layer the links it crosses, in order; none where it is resident. All paths end with the same link
    nbytes      per layer
    links       name and GB/s of each link, in the order in which they are crossed
    n_slots     blocks at the end of each link
    contention  part of the device's speed that is lost for each GB/s that comes in: copies take memory traffic, or a core
    ahead       whether layers of the next pass come in before it begins; Sequoia's own engine waits
    """

    paths: tuple[tuple[str, ...], ...]
    nbytes: tuple[int, ...]
    links: tuple[tuple[str, float], ...]
    n_slots: int
    contention: float = 0.0
    ahead: bool = True

    @classmethod
    def of(cls, plan: Plan, links: tuple[tuple[str, float], ...], contention: float = 0.0) -> "StreamSchedule":
        """The streaming of a plan."""
        disk = ("disk", "host") if plan.budget.has_card else ("disk",)
        paths = {"device": (), "host": ("host",), "disk": disk}
        crossed = tuple(link for link in links if any(link[0] in paths[tier] for tier in plan.tiers))
        return cls(tuple(paths[tier] for tier in plan.tiers), plan.layer_nbytes, crossed, plan.n_slots, contention)


@dataclass(frozen=True)
class Work:
    """Seconds the device is busy in one pass: drafting, all layers, and what comes after them."""

    draft_s: float
    layers_s: float
    after_s: float


@dataclass(frozen=True)
class Timeline:
    """When each of some passes was through, (n_passes,) seconds of the virtual clock."""

    ends: NDArray[np.float64]

    @property
    def pass_s(self) -> NDArray[np.float64]:
        """Seconds of each pass once the slots have settled; of all, where there are hardly more."""
        seconds = np.diff(self.ends, prepend=0.0)
        return seconds[_N_SETTLING:] if len(seconds) > _N_SETTLING else seconds


class _Link:
    """A link and the slots behind it. Item j is the j-th layer that crosses it, counted on through all passes.

    n_freed  items that have left their slots
    left     bytes of the item under way
    """

    def __init__(self, name: str, gbps: float, schedule: StreamSchedule) -> None:
        self.rate = gbps * 1e9
        self.layers = [i for i, path in enumerate(schedule.paths) if name in path]
        self.place = {layer: j for j, layer in enumerate(self.layers)}
        self.n_started = self.n_ended = self.n_freed = 0
        self.left = 0.0

    @property
    def is_busy(self) -> bool:
        return self.n_started > self.n_ended

    def item(self, n_pass: int, layer: int) -> int:
        """The number of a layer in a pass."""
        return n_pass * len(self.layers) + self.place[layer]


class _Device:
    """What is computed: per pass the draft, each layer, and the end, as jobs; -1 and n_layers stand for the first and the last.

    left  seconds of the job under way
    """

    def __init__(self, works: Sequence[Work], n_layers: int) -> None:
        self._works, self._n_layers = works, n_layers
        self.n_pass, self.job = 0, -1
        self.is_busy = False
        self.left = 0.0

    @property
    def is_through(self) -> bool:
        return self.n_pass == len(self._works)

    def start(self) -> None:
        work = self._works[self.n_pass]
        layer_s = work.layers_s / self._n_layers
        self.left = {-1: work.draft_s, self._n_layers: work.after_s}.get(self.job, layer_s)
        self.is_busy = True

    def end(self) -> bool:
        """Go on to the next job; returns whether a pass is through."""
        self.is_busy = False
        self.job += 1
        if self.job <= self._n_layers:
            return False
        self.n_pass, self.job = self.n_pass + 1, -1
        return True


class _Simulation:
    """The state between two events."""

    def __init__(self, schedule: StreamSchedule, works: Sequence[Work]) -> None:
        self.schedule = schedule
        self.links = [_Link(name, gbps, schedule) for name, gbps in schedule.links]
        self.device = _Device(works, len(schedule.paths))
        self.now = 0.0

    def run(self) -> Timeline:
        ends = []
        while not self.device.is_through:
            self._start()
            self._advance()
            if self._end():
                ends.append(self.now)
        return Timeline(np.array(ends))

    def _start(self) -> None:
        """Let everything begin that waits for nothing more."""
        for before, link in zip([None, *self.links], self.links, strict=False):
            if not link.is_busy and self._may_start(before, link):
                link.left = self.schedule.nbytes[link.layers[link.n_started % len(link.layers)]]
                link.n_started += 1
        device = self.device
        if not device.is_busy and self._has_arrived(device.job):
            device.start()

    def _may_start(self, before: _Link | None, link: _Link) -> bool:
        j = link.n_started
        n_pass, layer = j // len(link.layers), link.layers[j % len(link.layers)]
        if j >= link.n_freed + self.schedule.n_slots:
            return False
        if before is not None and layer in before.place and before.n_ended <= before.item(n_pass, layer):
            return False
        return self.schedule.ahead or (n_pass, 0) <= (self.device.n_pass, self.device.job)

    def _has_arrived(self, job: int) -> bool:
        if not self.links or job not in self.links[-1].place:
            return True
        return self.links[-1].n_ended > self.links[-1].item(self.device.n_pass, job)

    def _speed(self) -> float:
        """Of the device, as part of its full speed."""
        last = self.links[-1] if self.links else None
        return 1.0 / (1.0 + self.schedule.contention * last.rate / 1e9) if last is not None and last.is_busy else 1.0

    def _advance(self) -> None:
        """To the next event."""
        speed = self._speed()
        waits = [link.left / link.rate for link in self.links if link.is_busy]
        if self.device.is_busy:
            waits.append(self.device.left / speed)
        step = min(waits)
        self.now += step
        for link in self.links:
            if link.is_busy:
                link.left -= step * link.rate
        if self.device.is_busy:
            self.device.left -= step * speed

    def _end(self) -> bool:
        """End what has come to its end; returns whether a pass is through."""
        device = self.device
        for before, link in zip([None, *self.links], self.links, strict=False):
            # Less than a byte, and less than a nanosecond: what is left over of sums of fractions.
            if link.is_busy and link.left < 0.5:
                layer = link.layers[link.n_ended % len(link.layers)]
                link.n_ended += 1
                if before is not None and layer in before.place:
                    before.n_freed += 1
        if not device.is_busy or device.left > 1e-10:
            return False
        if self.links and device.job in self.links[-1].place:
            self.links[-1].n_freed += 1
        return device.end()


def simulate(schedule: StreamSchedule, works: Sequence[Work]) -> Timeline:
    """Run passes of so much work, one after the other, on a virtual clock."""
    return _Simulation(schedule, works).run()


@dataclass(frozen=True)
class Costs:
    """What computing takes.

    target   of all layers and the head of the target
    draft    of the draft model; None where nothing is drafted by a model
    head     share of the target's time that is the head's
    fixed_s  of a pass besides: embedding, sampling, verification
    """

    target: ComputeTimes
    draft: ComputeTimes | None = None
    head: float = 0.0
    fixed_s: float = 0.0

    def work(self, topology: Topology, context: int) -> Work:
        """Of drafting a tree after so many tokens, and of the pass that verifies it."""
        seconds = float(self.target.at(np.array([len(topology)]), context)[0])
        layers = (1 - self.head) * seconds
        return Work(self.draft_s(topology, context), layers, seconds - layers + self.fixed_s)

    def draft_s(self, topology: Topology, context: int) -> float:
        """Seconds of drafting: a pass of the draft model for each level, over the nodes of it that have children."""
        if self.draft is None or len(topology) == 1:
            return 0.0
        inner = topology.depths[np.unique(topology.parents[1:])]
        return float(self.draft.at(np.bincount(inner), context).sum())


@dataclass(frozen=True)
class Generation:
    """A text that was generated on the virtual clock, after its prompt.

    tokens_per_pass  as expected of its tree
    works            of each pass
    """

    tokens_per_pass: float
    works: tuple[Work, ...]
    timeline: Timeline

    @property
    def pass_s(self) -> float:
        """Mean seconds of a pass once the slots have settled."""
        return float(self.timeline.pass_s.mean())

    @property
    def seconds_per_token(self) -> float:
        """Once the slots have settled."""
        return self.pass_s / self.tokens_per_pass


def generate(
    schedule: StreamSchedule, costs: Costs, tree: tuple[Topology, NDArray[np.float64]], span: tuple[int, int]
) -> Generation:
    """Generate with a tree of a fixed shape at each pass, each giving as many tokens as expected.

    tree  its shape, and the acceptance of its nodes by rank, (ranks,)
    span  tokens before the first pass, and after the last
    """
    first, last = span
    tokens = expected_tokens(*tree)
    n_passes = max(math.ceil((last - first) / tokens), _N_SETTLING + 1)
    works = tuple(costs.work(tree[0], int(first + i * tokens)) for i in range(n_passes))
    return Generation(tokens, works, simulate(schedule, works))
