"""The loop on a virtual clock: links, slots, layers and drafting as events, for machines that are
not at hand.

It moves no byte and computes no number. It keeps the rules by which one thing waits for another in
the engine: a link carries one layer at a time, in the order of the sweep, and on into the next
pass; a layer may start to arrive when a slot is free, and a slot is free when the layer that was in
it has been computed; with a card, a layer from the disk crosses the disk's link into a pinned slot
and then the host's; the device drafts, computes the layers in order, and ends with the head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload_rt.cost.pass_times import ComputeTimes, StreamedRows
from offload_rt.offload.placement import Plan
from offload_rt.tree.search import expected_tokens
from offload_rt.tree.topology import Topology

# Passes until the slots are as full at the start of one as at the start of the next.
_N_SETTLING = 2
# Passes that stand for all of a text; what they cost changes evenly with the context.
_MOST_PASSES = 12
# Layers on their way where only keys and values are: they come in small blocks, ahead of the layer
# that needs them.
_LEAST_SLOTS = 2


@dataclass(frozen=True)
class StreamSchedule:
    """How layers reach the device.

    paths       per layer the links it crosses, in order; none where it is resident. All paths end
                with the same link
    nbytes      per layer
    links       name and GB/s of each link, in the order in which they are crossed
    n_slots     blocks at the end of each link
    contention  part of the device's speed that is lost for each GB/s that comes in: copies take
                memory traffic, or a core
    ahead       whether layers of the next pass come in before it begins; Sequoia's own engine waits
    rows        keys and values that come with each layer, over the last link
    exchanged   bytes from other ranks for each row of a pass, over the last link
    """

    paths: tuple[tuple[str, ...], ...]
    nbytes: tuple[int, ...]
    links: tuple[tuple[str, float], ...]
    n_slots: int
    contention: float = 0.0
    ahead: bool = True
    rows: StreamedRows | None = None
    exchanged: int = 0

    @classmethod
    def of(
        cls, plan: Plan, links: tuple[tuple[str, float], ...], contention: float = 0.0
    ) -> "StreamSchedule":
        """The streaming of a plan. Of a layer that is resident only keys and values cross a link,
        if they do.
        """
        rows = plan.pass_bytes.rows
        disk = ("disk", "host") if plan.budget.has_card else ("disk",)
        paths = {"device": () if rows is None else (rows.tier,), "host": ("host",), "disk": disk}
        crossed = tuple(
            link for link in links if any(link[0] in paths[tier] for tier in plan.tiers)
        )
        nbytes = tuple(
            0 if tier == "device" else n
            for tier, n in zip(plan.tiers, plan.link.layer_nbytes, strict=True)
        )
        n_slots = plan.n_slots if rows is None else max(plan.n_slots, _LEAST_SLOTS)
        return cls(
            tuple(paths[tier] for tier in plan.tiers),
            nbytes,
            crossed,
            n_slots,
            contention,
            rows=rows,
        )


@dataclass(frozen=True)
class Work:
    """Seconds the device is busy in one pass: drafting, all layers, and what comes after them; its
    context and its rows.
    """

    draft_s: float
    layers_s: float
    after_s: float
    context: int = 0
    n_rows: int = 1


def simulate(schedule: StreamSchedule, works: Sequence[Work]) -> NDArray[np.float64]:
    """When each pass of so much work was through, one after the other: (n_passes,) seconds of the
    virtual clock.
    """
    return _Simulation(schedule).run(works)


def mean_pass_s(ends: NDArray[np.float64]) -> float:
    """Mean seconds of a pass once the slots have settled; of all passes, where there are hardly
    more.
    """
    seconds = np.diff(ends, prepend=0.0)
    return float((seconds[_N_SETTLING:] if len(seconds) > _N_SETTLING else seconds).mean())


class _Simulation:
    """When each link has carried, and the device at last has computed, each layer of each pass.

    layers    per link those that cross it
    ends      per link, and for the device: (pass, layer) -> moment. Layers -1 and n_layers are
              drafting and the head
    arriving  start and end of every layer on the last link
    """

    def __init__(self, schedule: StreamSchedule) -> None:
        self.schedule = schedule
        self.layers = [
            [i for i, path in enumerate(schedule.paths) if name in path]
            for name, _ in schedule.links
        ]
        self.ends: list[dict[tuple[int, int], float]] = [{} for _ in (*schedule.links, "device")]
        self.arriving: list[tuple[float, float]] = []
        self.works: Sequence[Work] = ()

    def run(self, works: Sequence[Work]) -> NDArray[np.float64]:
        """The moments at which passes of so much work end."""
        n_layers = len(self.schedule.paths)
        now = 0.0
        self.works = works
        for n_pass, work in enumerate(works):
            for job, seconds in enumerate(
                (work.draft_s, *[work.layers_s / n_layers] * n_layers, work.after_s), -1
            ):
                # What is on no link yet waits for this job or a later one, so nothing that comes is
                # unknown meanwhile.
                while any(self._carry(k) for k in range(len(self.layers))):
                    pass
                arrived = self.ends[-2].get((n_pass, job), 0.0) if self.layers else 0.0
                now = self._computed(max(now, arrived), seconds)
                self.ends[-1][n_pass, job] = now
        return np.array([self.ends[-1][n_pass, n_layers] for n_pass in range(len(works))])

    def _carry(self, k: int) -> bool:
        """Let link k carry its next layer; returns whether all that it waits for is known."""
        layers = self.layers[k]
        ends = self.ends
        j = len(self.ends[k])

        def item(j: int) -> tuple[int, int]:
            return j // len(layers), layers[j % len(layers)]

        n_pass, layer = item(j)
        awaited = [(k, item(j - 1))] if j else []
        if j >= self.schedule.n_slots:
            awaited.append((k + 1, item(j - self.schedule.n_slots)))
        if k and self.schedule.links[k - 1][0] in self.schedule.paths[layer]:
            awaited.append((k - 1, (n_pass, layer)))
        if not self.schedule.ahead:
            awaited.append((-1, (n_pass, -1)))
        if any(what not in ends[of] for of, what in awaited):
            return False
        start = max((ends[of][what] for of, what in awaited), default=0.0)
        nbytes = self.schedule.nbytes[layer]
        is_last = k == len(self.layers) - 1
        if is_last:
            work = self.works[min(n_pass, len(self.works) - 1)]
            nbytes += work.n_rows * self.schedule.exchanged // len(layers)
            if self.schedule.rows is not None:
                nbytes += self.schedule.rows.of_layer(layer, work.context, work.n_rows)
        ends[k][n_pass, layer] = start + nbytes / (self.schedule.links[k][1] * 1e9)
        if is_last:
            self.arriving.append((start, ends[k][n_pass, layer]))
        return True

    def _computed(self, now: float, left_s: float) -> float:
        """The end of so much computing from now on, which is slower while a layer arrives."""
        while self.arriving and self.arriving[0][1] <= now:
            self.arriving.pop(0)
        for start, end in self.arriving:
            slowed = 1.0 + self.schedule.contention * self.schedule.links[-1][1]
            alone_s = max(start - now, 0.0)
            together_s = (end - now - alone_s) / slowed
            if left_s <= alone_s:
                break
            if left_s <= alone_s + together_s:
                return now + alone_s + (left_s - alone_s) * slowed
            now = end
            left_s = left_s - alone_s - together_s
        return now + left_s


@dataclass(frozen=True)
class Costs:
    """What computing takes.

    target   of all layers and the head of the target
    draft    of the draft model; None where nothing is drafted by a model
    head     share of the target's time that is the head's
    fixed_s  of a pass besides: embedding, sampling, verification
    level_s  of a level of the draft besides: the host's wait for it, and what it does before the
             next
    """

    target: ComputeTimes
    draft: ComputeTimes | None = None
    head: float = 0.0
    fixed_s: float = 0.0
    level_s: float = 0.0

    def work(self, topology: Topology, context: int) -> Work:
        """Of drafting a tree after so many tokens, and of the pass that verifies it."""
        seconds = float(self.target.at(np.array([len(topology)]), context)[0])
        layers = (1 - self.head) * seconds
        after_s = seconds - layers + self.fixed_s
        return Work(self.draft_s(topology, context), layers, after_s, context, len(topology))

    def draft_s(self, topology: Topology, context: int) -> float:
        """Seconds of drafting: a pass of the draft model for each level, over the nodes of it that
        have children.
        """
        if self.draft is None or len(topology) == 1:
            return 0.0
        inner = topology.depths[np.unique(topology.parents[1:])]
        return float((self.draft.at(np.bincount(inner), context) + self.level_s).sum())


@dataclass(frozen=True)
class Generation:
    """A text that was generated on the virtual clock: tokens as expected of its trees, seconds once
    the slots have settled.
    """

    tokens_per_pass: float
    pass_s: float

    @property
    def seconds_per_token(self) -> float:
        """Their ratio."""
        return self.pass_s / self.tokens_per_pass


def generate(
    schedule: StreamSchedule,
    costs: Costs,
    tree: tuple[Topology, NDArray[np.float64]],
    span: tuple[int, int],
) -> Generation:
    """Generate with a tree of a fixed shape at each pass, each giving as many tokens as expected.

    tree  its shape, and the acceptance of its nodes by rank, (ranks,)
    span  tokens before the first pass, and after the last
    """
    first, last = span
    tokens = expected_tokens(*tree)
    n_passes = min(math.ceil((last - first) / tokens), _MOST_PASSES)
    contexts = [first] * _N_SETTLING + np.linspace(
        first, max(last - tokens, first), n_passes
    ).astype(int).tolist()
    works = [costs.work(tree[0], context) for context in contexts]
    return Generation(tokens, mean_pass_s(simulate(schedule, works)))
