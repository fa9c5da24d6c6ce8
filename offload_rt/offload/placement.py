"""Placement of layers on device, host and disk within memory budgets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload_rt.config import format_size
from offload_rt.cost.pass_times import PassBytes, TouchedExperts
from offload_rt.errors import CapacityError
from offload_rt.kv.split import KVSplit
from offload_rt.models.layers import Mixture

# Two slots overlap transfer and compute; a third device slot absorbs jitter.
_LEAST_SLOTS = 2
BEST_SLOTS = 3


@dataclass(frozen=True)
class ReservedMemory:
    """Device bytes besides layers."""

    non_layer: int
    cache: int
    scratch: int
    draft: int = 0  # everything a draft model needs
    libraries: int = 0
    stand_in: int = 0  # resident copy of a streamed layer for self-drafting, per layer
    experts: int = 0  # slots of experts loaded on demand
    graphs: int = 0  # memory pool and logits of captured passes
    images: int = 0  # vision tower or two blocks of it, its activations and features
    streamed_images: int = 0  # vision tower on disk, read for each image; not on the device

    @property
    def total(self) -> int:
        """Sum of all fixed parts; `stand_in` depends on the number of streamed layers."""
        model = self.non_layer + self.cache + self.scratch + self.experts
        return model + self.draft + self.libraries + self.graphs + self.images


@dataclass(frozen=True)
class MemoryBudget:
    """Memory budgets in bytes."""

    device: int
    host: int = 0  # 0 without a tier between device and disk
    libraries: int = 0
    has_card: bool = False  # a GPU, so disk reads pass through host memory
    is_unified: bool = False  # the GPU shares the host's memory: layers on the device or on disk
    buffers: int = 0  # host memory for reading, and for off-device KV rows
    most: int | None = None  # largest `device` that a setting can allow; None if unknown

    def host_room(self, nbytes: int) -> int:
        """Return the number of blocks of `nbytes` bytes that fit on the host."""
        return max(self.host - self.buffers, 0) // nbytes


@dataclass(frozen=True)
class LinkSizes:
    """Sizes of streamed layers, if different from the sizes in compute."""

    layer_nbytes: tuple[int, ...]  # of each layer on link and host
    slot_nbytes: int  # of a device slot
    buffer: int  # further device bytes, e.g. for decoding

    @classmethod
    def unchanged(cls, layer_nbytes: Sequence[int]) -> "LinkSizes":
        """Return the sizes of layers streamed unchanged."""
        return cls(tuple(layer_nbytes), max(layer_nbytes), 0)


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of experts that are separate blocks."""

    mixture: Mixture
    nbytes: int  # of the largest expert, which determines the slot size
    n_on_host: int = 0  # in host memory of a GPU machine; further experts are on disk

    @property
    def n_blocks(self) -> int:
        """Number of experts in all layers."""
        return len(self.mixture.layers) * self.mixture.n_experts

    @property
    def least(self) -> int:
        """Minimum slot bytes: the experts of a row, and a slot for the next transfer."""
        return (self.mixture.n_used + 1) * self.nbytes


@dataclass(frozen=True)
class Plan:
    """Placement of all memory."""

    tiers: tuple[str, ...]  # "device", "host" or "disk" per layer
    layer_nbytes: tuple[int, ...]
    n_slots: int
    reserved: ReservedMemory
    budget: MemoryBudget
    link: LinkSizes
    n_host_slots: int = 0  # for disk layers on the way to a GPU
    split: KVSplit | None = None  # placement of KV rows; None if all are on the device
    experts: ExpertSizes | None = None  # loaded on demand, or None

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a device slot, sized for the largest layer."""
        return self.link.slot_nbytes

    @property
    def host_slot_nbytes(self) -> int:
        """Bytes of a host slot."""
        return max(self.link.layer_nbytes)

    @property
    def device_nbytes(self) -> int:
        """Device bytes of the plan."""
        buffer = self.link.buffer if self.n_slots else 0
        moving = self.n_slots * self.slot_nbytes + buffer + self.copies_nbytes
        return self.reserved.total + moving + self.on("device")

    @property
    def copies_nbytes(self) -> int:
        """Bytes of resident copies of streamed layers for self-drafting."""
        return self.reserved.stand_in * (len(self.tiers) - self.tiers.count("device"))

    @property
    def host_nbytes(self) -> int:
        """Host bytes of the plan, on a GPU machine."""
        return self.n_host_slots * self.host_slot_nbytes + self.on("host")

    def on(self, tier: str) -> int:
        """Return the bytes of all layers of a tier."""
        sizes = self.layer_nbytes if tier == "device" else self.link.layer_nbytes
        return sum(nbytes for name, nbytes in zip(self.tiers, sizes, strict=True) if name == tier)

    @property
    def streamed_nbytes(self) -> int:
        """Layer bytes streamed per pass."""
        return self.on("host") + self.on("disk")

    @property
    def kv_tier(self) -> str:
        """Tier of off-device KV rows."""
        return "host" if self.budget.has_card else "disk"

    @property
    def is_resident(self) -> bool:
        """Whether passes need no transfers."""
        return self.streamed_nbytes == 0 and self.split is None and self.experts is None

    @property
    def n_expert_slots(self) -> int:
        """Number of expert slots on the device."""
        return self.reserved.experts // self.experts.nbytes if self.experts else 0

    @property
    def touched(self) -> TouchedExperts | None:
        """Description of experts loaded on demand, for the cost model."""
        if self.experts is None:
            return None
        mixture = self.experts.mixture
        n = len(mixture.layers)
        sizes = mixture.n_experts, mixture.n_used, self.experts.nbytes, self.n_expert_slots / n
        return TouchedExperts(self.kv_tier, n, *sizes, n_on_host=self.experts.n_on_host / n)

    @property
    def pass_bytes(self) -> PassBytes:
        """Bytes per link and compute bytes of a pass, for the cost model."""
        on_link = self.streamed_nbytes if self.budget.has_card else self.on("host")
        streamed = (("host", on_link), ("disk", self.on("disk")))
        rows = None if self.split is None else self.split.streamed(self.kv_tier)
        computed = sum(self.layer_nbytes) + self.reserved.non_layer
        ahead = self.n_slots * self.host_slot_nbytes
        touched = self.touched
        disk_experts = None
        if touched is not None:
            computed += touched.n_layers * touched.n_used * touched.nbytes
            if touched.tier == "host" and touched.n_on_host < touched.n_experts:
                # Few experts are both on the device and on the host.
                n_there = min(touched.n_resident + touched.n_on_host, touched.n_experts)
                disk_experts = replace(touched, tier="disk", n_resident=n_there)
        return PassBytes(streamed, computed, ahead, rows, touched, disk_experts=disk_experts)


def least_budget(
    layer_nbytes: Sequence[int], reserved: ReservedMemory, link: LinkSizes | None = None
) -> int:
    """Return the minimum device budget: two slots, or all layers if smaller."""
    link = link or LinkSizes.unchanged(layer_nbytes)
    moving = _LEAST_SLOTS * link.slot_nbytes + link.buffer + len(layer_nbytes) * reserved.stand_in
    return reserved.total + min(sum(layer_nbytes), moving)


def place_layers(
    layer_nbytes: Sequence[int],
    reserved: ReservedMemory,
    budget: MemoryBudget,
    link: LinkSizes | None = None,
) -> Plan:
    """Keep as many layers resident as possible, spread evenly between streamed layers.

    link  sizes of streamed layers; None for the sizes in compute
    Raises CapacityError with the minimum budget if two slots do not fit.
    """
    link = link or LinkSizes.unchanged(layer_nbytes)
    n = len(layer_nbytes)
    travelling = max(link.layer_nbytes)
    free = budget.device - reserved.total
    least = least_budget(layer_nbytes, reserved, link)
    if budget.device < least:
        is_possible = budget.most is None or least <= budget.most
        change = f"set --device-memory to {least} or more" if is_possible else "use a larger device"
        change += ", or lower --max-model-len or --tree-size"
        raise _too_small("the device memory budget is too small", least, budget.device, change)
    if free >= sum(layer_nbytes):
        return Plan(("device",) * n, tuple(layer_nbytes), 0, reserved, budget, link)
    free -= link.buffer + n * reserved.stand_in
    n_slots = min(BEST_SLOTS, n, free // link.slot_nbytes)
    gained = [nbytes - reserved.stand_in for nbytes in layer_nbytes]
    resident = fill(range(n), gained, free - n_slots * link.slot_nbytes, n - 1)
    n_slots = min(n_slots, n - len(resident))
    streamed = [i for i in range(n) if i not in resident]
    room = 0 if budget.is_unified else budget.host - budget.buffers
    host = fill(streamed, link.layer_nbytes, room, n)
    n_host_slots = 0
    if budget.has_card and len(host) < len(streamed):
        n_host_slots = _host_slots(n_slots, travelling, budget)
        host = fill(streamed, link.layer_nbytes, room - n_host_slots * travelling, n)
    tiers = tuple("device" if i in resident else "host" if i in host else "disk" for i in range(n))
    return Plan(tiers, tuple(layer_nbytes), n_slots, reserved, budget, link, n_host_slots)


def with_expert_slots(plan: Plan, experts: ExpertSizes) -> Plan:
    """Extend a plan with reserved minimum slots to as many expert slots as fit."""
    more = (plan.budget.device - plan.device_nbytes) // experts.nbytes
    nbytes = min(plan.reserved.experts + more * experts.nbytes, experts.n_blocks * experts.nbytes)
    return replace(plan, reserved=replace(plan.reserved, experts=nbytes), experts=experts)


def with_host_slots(plan: Plan) -> Plan:
    """Add host slots to a plan for layers; move host layers to disk if necessary."""
    hosted = [i for i, tier in enumerate(plan.tiers) if tier == "host"]
    n_host_slots = _host_slots(plan.n_slots, plan.host_slot_nbytes, plan.budget)
    room = plan.budget.host - plan.budget.buffers - n_host_slots * plan.host_slot_nbytes
    left = {*hosted} - fill(hosted, plan.link.layer_nbytes, room, len(hosted))
    tiers = tuple("disk" if i in left else tier for i, tier in enumerate(plan.tiers))
    return replace(plan, tiers=tiers, n_host_slots=n_host_slots)


def _host_slots(n_slots: int, nbytes: int, budget: MemoryBudget) -> int:
    """Return the number of host slots of `nbytes`: two, for reads and copies at the same time."""
    least = budget.buffers + nbytes
    if budget.host < least:
        problem = "the host memory budget is too small for host slots of disk layers"
        raise _too_small(problem, least, budget.host, "raise --host-memory or --device-memory")
    return min(n_slots, _LEAST_SLOTS, budget.host_room(nbytes))


def _too_small(problem: str, least: int, have: int, change: str) -> CapacityError:
    need = f"{format_size(least)} ({least} bytes) at least"
    return CapacityError(problem, need=need, have=format_size(have), change=change)


def fill(layers: Sequence[int], nbytes: Sequence[int], room: int, n_most: int) -> set[int]:
    """Select as many evenly spread layers as fit into `room` bytes, at most `n_most`."""
    for n in range(min(n_most, len(layers)), 0, -1):
        selected = {layers[k] for k in spread(len(layers), n)}
        if sum(nbytes[i] for i in selected) <= room:
            return selected
    return set()


def spread(n: int, k: int) -> set[int]:
    """Select k of the numbers [0, n), evenly spread and centred.

    A resident layer at the end of a pass would be computed while all slots are full; drafting
    follows there anyway.
    """
    return {(2 * j + 1) * n // (2 * k) for j in range(k)}
