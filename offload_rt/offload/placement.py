"""Which layer lives where, given the budgets."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload_rt.config import format_size
from offload_rt.errors import CapacityError
from offload_rt.kv.split import KVSplit
from offload_rt.models.architecture import Mixture
from offload_rt.system.machine import PassBytes, TouchedExperts

# Two slots let one layer arrive while another is computed; a third absorbs the jitter of link and compute.
_LEAST_SLOTS, BEST_SLOTS = 2, 3


@dataclass(frozen=True)
class ReservedMemory:
    """Bytes the device holds besides layers: of `cache` what is on the device, of `draft` all that a draft model takes.

    `libraries` is what those of a GPU take, `stand_in` the copy of a streamed layer that stays where the target drafts itself,
    `experts` the slots of experts that are no part of layers.
    """

    non_layer: int
    cache: int
    scratch: int
    draft: int = 0
    libraries: int = 0
    stand_in: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        """Their sum."""
        return self.non_layer + self.cache + self.scratch + self.draft + self.libraries + self.experts


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that may be used.

    host       0 where there is no tier between device and disk
    libraries  of those of the device
    has_card   the device has memory of its own, so what comes from the disk crosses the host's link as well
    buffers    of those of the host: what reading takes, and keys and values beyond the device
    """

    device: int
    host: int = 0
    libraries: int = 0
    has_card: bool = False
    buffers: int = 0

    def host_room(self, nbytes: int) -> int:
        """Blocks of so many bytes that the host has room for."""
        return max(self.host - self.buffers, 0) // nbytes


@dataclass(frozen=True)
class LinkSizes:
    """What layers take on their way, where that is not what they take when they are computed.

    layer_nbytes  of each layer, on the link and on the host
    slot_nbytes   of a slot on the device
    buffer        of the device, besides slots: where layers are decoded, or read to before
    """

    layer_nbytes: tuple[int, ...]
    slot_nbytes: int
    buffer: int

    @classmethod
    def of(cls, layer_nbytes: Sequence[int]) -> "LinkSizes":
        """Of layers that travel as they are."""
        return cls(tuple(layer_nbytes), max(layer_nbytes), 0)


@dataclass(frozen=True)
class ExpertSizes:
    """Experts that are blocks of their own.

    nbytes     of the longest, which a slot holds
    n_on_host  that memory of the host holds beside a card; the others are on the disk
    """

    mixture: Mixture
    nbytes: int
    n_on_host: int = 0

    @property
    def n_blocks(self) -> int:
        """Of all layers."""
        return len(self.mixture.layers) * self.mixture.n_experts

    @property
    def least(self) -> int:
        """Bytes of as many slots as a row takes, and one more for what arrives meanwhile."""
        return (self.mixture.n_used + 1) * self.nbytes


@dataclass(frozen=True)
class Plan:
    """Where everything lies.

    tiers         per layer "device", "host" or "disk"
    layer_nbytes  bytes of each layer
    n_slots       blocks of `slot_nbytes` that streamed layers pass through
    link          sizes of the layers that are streamed
    n_host_slots  as many slots on the host, beside a card, for layers of the disk on their way
    split         of the keys and values; None: all are on the device
    experts       that are no part of layers, and come as rows need them
    """

    tiers: tuple[str, ...]
    layer_nbytes: tuple[int, ...]
    n_slots: int
    reserved: ReservedMemory
    budget: MemoryBudget
    link: LinkSizes
    n_host_slots: int = 0
    split: KVSplit | None = None
    experts: ExpertSizes | None = None

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot: it fits the longest layer."""
        return self.link.slot_nbytes

    @property
    def host_slot_nbytes(self) -> int:
        """Bytes of one slot on the host."""
        return max(self.link.layer_nbytes)

    @property
    def device_nbytes(self) -> int:
        """Bytes the plan uses on the device."""
        buffer = self.link.buffer if self.n_slots else 0
        moving = self.n_slots * self.slot_nbytes + buffer + self.copies_nbytes
        return self.reserved.total + moving + self.on("device")

    @property
    def copies_nbytes(self) -> int:
        """Bytes of the copies of streamed layers by which the target drafts itself."""
        return self.reserved.stand_in * (len(self.tiers) - self.tiers.count("device"))

    @property
    def host_nbytes(self) -> int:
        """Bytes the plan uses on the host, beside a card."""
        return self.n_host_slots * self.host_slot_nbytes + self.on("host")

    def on(self, tier: str) -> int:
        """Bytes of the layers of a tier."""
        sizes = self.layer_nbytes if tier == "device" else self.link.layer_nbytes
        return sum(nbytes for name, nbytes in zip(self.tiers, sizes, strict=True) if name == tier)

    @property
    def streamed_nbytes(self) -> int:
        """Bytes that a pass brings to the device."""
        return self.on("host") + self.on("disk")

    @property
    def kv_tier(self) -> str:
        """Where keys and values are that are not on the device."""
        return "host" if self.budget.has_card else "disk"

    @property
    def is_resident(self) -> bool:
        """Whether no pass brings anything to the device."""
        return self.streamed_nbytes == 0 and self.split is None and self.experts is None

    @property
    def n_expert_slots(self) -> int:
        """Experts that the device holds."""
        return self.reserved.experts // self.experts.nbytes if self.experts else 0

    @property
    def touched(self) -> TouchedExperts | None:
        """What comes of experts."""
        if self.experts is None:
            return None
        mixture, tier = self.experts.mixture, "host" if self.budget.has_card else "disk"
        n_layers = len(mixture.layers)
        sizes = mixture.n_experts, mixture.n_used, self.experts.nbytes
        return TouchedExperts(tier, n_layers, *sizes, n_resident=self.n_expert_slots / n_layers)

    @property
    def pass_bytes(self) -> PassBytes:
        """What one pass moves over each link, and computes."""
        streamed = (
            ("host", self.streamed_nbytes if self.budget.has_card else self.on("host")),
            ("disk", self.on("disk")),
        )
        rows = None if self.split is None else self.split.streamed(self.kv_tier)
        computed, ahead = sum(self.layer_nbytes) + self.reserved.non_layer, self.n_slots * max(self.link.layer_nbytes)
        touched, far = self.touched, None
        computed += touched.n_layers * touched.n_used * touched.nbytes if touched else 0
        if touched and self.experts and touched.tier == "host" and self.experts.n_on_host < self.experts.n_blocks:
            n_there = touched.n_resident + self.experts.n_on_host / touched.n_layers  # hardly any is in both places
            far = replace(touched, tier="disk", n_resident=min(n_there, touched.n_experts))
        return PassBytes(streamed, computed, ahead, rows, touched, far=far)


def least_budget(layer_nbytes: Sequence[int], reserved: ReservedMemory, link: LinkSizes | None = None) -> int:
    """The smallest device budget that would do: two slots, or all layers where they are smaller than that."""
    link = link or LinkSizes.of(layer_nbytes)
    moving = _LEAST_SLOTS * link.slot_nbytes + link.buffer + len(layer_nbytes) * reserved.stand_in
    return reserved.total + min(sum(layer_nbytes), moving)


def place_layers(
    layer_nbytes: Sequence[int], reserved: ReservedMemory, budget: MemoryBudget, link: LinkSizes | None = None
) -> Plan:
    """Keep as many layers resident as fit, spread evenly among the streamed ones.

    link  sizes of streamed layers; None: as when they are computed
    Raises CapacityError, naming the smallest budget that would do, if not even two slots fit.
    """
    link = link or LinkSizes.of(layer_nbytes)
    n, largest, travelling = len(layer_nbytes), max(layer_nbytes), max(link.layer_nbytes)
    free = budget.device - reserved.total
    least = least_budget(layer_nbytes, reserved, link)
    if budget.device < least:
        raise CapacityError(
            "the device memory budget is too small",
            need=f"{format_size(least)} ({least} bytes) at least",
            have=format_size(budget.device),
            change=f"set --device-memory to {least} or more, or lower --max-model-len or --tree-size",
        )
    if free >= sum(layer_nbytes):
        return Plan(("device",) * n, tuple(layer_nbytes), 0, reserved, budget, link)
    free -= link.buffer + n * reserved.stand_in
    n_slots = min(BEST_SLOTS, n, free // link.slot_nbytes)
    n_resident = min((free - n_slots * link.slot_nbytes) // (largest - reserved.stand_in), n - 1)
    n_slots = min(n_slots, n - n_resident)
    resident = spread(n, n_resident)
    streamed = [i for i in range(n) if i not in resident]
    room = budget.host_room(travelling)
    n_host_slots = _host_slots(n_slots, travelling, budget) if budget.has_card and room < len(streamed) else 0
    n_host = min(room - n_host_slots, len(streamed))
    host = {streamed[k] for k in spread(len(streamed), n_host)}
    tiers = tuple("device" if i in resident else "host" if i in host else "disk" for i in range(n))
    return Plan(tiers, tuple(layer_nbytes), n_slots, reserved, budget, link, n_host_slots)


def with_expert_slots(plan: Plan, experts: ExpertSizes) -> Plan:
    """The same with as many slots for experts as there is room for; it has reserved the least."""
    more = (plan.budget.device - plan.device_nbytes) // experts.nbytes
    nbytes = min(plan.reserved.experts + more * experts.nbytes, experts.n_blocks * experts.nbytes)
    return replace(plan, reserved=replace(plan.reserved, experts=nbytes), experts=experts)


def with_host_slots(plan: Plan) -> Plan:
    """The same with slots on the host for layers that lie there as well; some of these are left to the disk where they must."""
    hosted = [i for i, tier in enumerate(plan.tiers) if tier == "host"]
    n_host_slots = _host_slots(plan.n_slots, plan.host_slot_nbytes, plan.budget)
    n_kept = min(plan.budget.host_room(plan.host_slot_nbytes) - n_host_slots, len(hosted))
    left = {hosted[k] for k in spread(len(hosted), len(hosted) - n_kept)}
    tiers = tuple("disk" if i in left else tier for i, tier in enumerate(plan.tiers))
    return replace(plan, tiers=tiers, n_host_slots=n_host_slots)


def _host_slots(n_slots: int, nbytes: int, budget: MemoryBudget) -> int:
    """How many slots of so many bytes there are on the host: as many as on the device where there is room."""
    least = budget.buffers + nbytes
    if budget.host < least:
        raise CapacityError(
            "the host memory budget is too small for layers on their way from the disk",
            need=f"{format_size(least)} ({least} bytes) at least",
            have=format_size(budget.host),
            change=f"set --host-memory to {least} or more, or raise --device-memory",
        )
    return min(n_slots, budget.host_room(nbytes))


def spread(n: int, k: int) -> set[int]:
    """k of the numbers [0, n), as evenly as they go, with as many others before the first as behind the last.

    A resident layer at the end of a pass would be computed while the slots are full already, and drafting comes next.
    """
    return {(2 * j + 1) * n // (2 * k) for j in range(k)}
