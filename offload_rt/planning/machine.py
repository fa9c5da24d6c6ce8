"""Machines of a forecast: memory, links, and compute times of a model."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from offload_rt.cost.card import Card
from offload_rt.cost.decoding import PairTimes
from offload_rt.cost.pass_times import DECODE_GBPS, ComputeTimes, PassBytes, transfer_s
from offload_rt.cost.roofline import Roof
from offload_rt.dtypes import DType
from offload_rt.engine.memory_plan import DRIVER, LIBRARIES, less_margin
from offload_rt.engine.model_sizes import Sizes
from offload_rt.offload.placement import MemoryBudget, Plan
from offload_rt.planning.ranks import ALONE, Parallelism
from offload_rt.planning.sizes import decoded_nbytes
from offload_rt.weights.formats import Matrix

# Seconds of a GPU pass outside layers and head: embedding, sampling, verification (assumed).
_FIXED_S = 0.01
# Seconds between two levels of a draft on a GPU (assumed): the host wakes up, chooses nodes, and
# launches the next level. Trees of 256 nodes needed 1.25 ms of CPU time per level on busy cores,
# including products and sorting that a GPU computes itself.
LEVEL_S = 5e-4
# GB/s of decoded weights (assumed); a CPU thread decodes lossless layers at 2.8 to 5.4.
CPU_DECODE_GBPS = 3.0
# GB/s at which a CPU computes experts from its memory (assumed): two channels of DDR5-5600 have
# 89.6. Sixteen threads multiply MXFP4 and 4-bit integers at that rate, about 7 billion weights per
# second each (`python -m bench.compute`).
RAM_GBPS = 60.0
# Minimum columns of a timed narrow matrix. From hidden size `_WIDE` on, a large matrix is timed.
_NARROW, _WIDE = 512, 2048


@dataclass(frozen=True)
class Machine:
    """A machine to plan for.

    links        ("disk", GB/s) and ("host", GB/s)
    roof         compute and memory rates by dtype, and by the measured products of a quantised
                 matrix or of a plain one of a shape
    times_codes  whether `roof` measures products of quantised matrices, which then need no decoding
    ram_gbps     GB/s at which a GPU machine's CPU computes experts; 0: the GPU computes all
    ranks        division of the model; all figures are for a single rank
    passes       measured pass times of the target; None to derive them from `roof`
    sources      origin of the figures, a sentence each
    """

    title: str
    budget: MemoryBudget
    links: tuple[tuple[str, float], ...]
    roof: Callable[[DType, Matrix | tuple[int, int] | None], Roof]
    fixed_s: float = 0.0
    level_s: float = 0.0
    decode_gbps: float = DECODE_GBPS
    times_codes: bool = False
    ram_gbps: float = RAM_GBPS
    ranks: Parallelism = ALONE
    passes: ComputeTimes | None = None
    sources: tuple[str, ...] = ()

    @classmethod
    def with_card(
        cls,
        card: Card,
        ram: int,
        disk_gbps: float,
        device_memory: int | None = None,
        link_gbps: float | None = None,
    ) -> "Machine":
        """Describe a machine with a GPU, by host memory in bytes and disk rate.

        device_memory  budget on the GPU; None: its memory less a margin
        link_gbps      GB/s of its link; None: the published rate of the link type
        """
        free = card.free_nbytes
        device = less_margin(free) if device_memory is None else device_memory
        host = less_margin(ram)
        link = "host link: set by --link" if link_gbps else f"{card.link.name}: {card.link.source}"
        return cls(
            title=card.title,
            budget=MemoryBudget(device, host, LIBRARIES, has_card=True, most=free - DRIVER),
            links=(("disk", disk_gbps), ("host", link_gbps or card.link.gbps)),
            roof=lambda *_: Roof.from_card(card),
            fixed_s=_FIXED_S,
            level_s=LEVEL_S,
            sources=(f"card: {card.source}", link),
        )

    def costs(self, target: Sizes, draft: Sizes | None, plan: Plan) -> PairTimes:
        """Return the compute times. CUDA graphs replay draft models and resident native targets."""
        is_encoded = [target.link is not None and tier != "device" for tier in plan.tiers]
        decode_s = transfer_s(decoded_nbytes(target, is_encoded), self.decode_gbps)
        target_times = self.passes or self._times(
            target, plan.is_resident, self.ranks, sum(target.layer_nbytes), decode_s=decode_s
        )
        draft_times, n_at_once = None, 1
        if draft is not None:
            n_at_once = draft.spec.n_at_once
            coded = 1 - plan.tiers.count("device") / len(plan.tiers) if draft.stand_in else 1.0
            ranks = self.ranks if draft.stand_in or self.ranks.split_draft else ALONE
            draft_times = self._times(draft, True, ranks, draft_nbytes(draft, plan), coded=coded)
        return PairTimes(target_times, draft_times, self.level_s, n_at_once)

    def with_host_experts(self, moved: PassBytes) -> PassBytes:
        """Compute experts of host memory on the CPU of a GPU machine."""
        experts = moved.experts
        if experts is None or experts.tier != "host" or not self.ram_gbps:
            return moved
        times = ComputeTimes((1,), (0,), ((transfer_s(experts.nbytes, self.ram_gbps),),))
        return replace(moved, experts=replace(experts, host=times))

    def _times(
        self,
        sizes: Sizes,
        is_replayed: bool,
        ranks: Parallelism,
        nbytes: int,
        decode_s: float = 0.0,
        coded: float = 1.0,
    ) -> ComputeTimes:
        """Return the compute times of a rank's shard.

        nbytes    stored bytes of the layers
        decode_s  seconds of decoding lossless layers
        coded     share of the layers with quantised matrices, if any
        """
        spec = ranks.with_part_of_head(sizes.spec)
        itemsize = sizes.dtype.itemsize
        plain = layers = self.roof(sizes.dtype, None)
        if sizes.matrix is None and self.times_codes and spec.hidden_size < _WIDE:
            # Short rows and small matrices are slower. Powers of two: models share measurements.
            width = max(1 << (spec.hidden_size.bit_length() - 1), _NARROW)
            layers = self.roof(sizes.dtype, (4 * width, width))
        share = 1.0
        if sizes.matrix is not None and self.times_codes:
            layers = plain.mixed(self.roof(sizes.dtype, sizes.matrix), coded)
        elif sizes.matrix is not None:
            share = nbytes / decoded_nbytes(sizes)
            layers = replace(
                plain,
                decode_s=transfer_s(itemsize, self.decode_gbps),
                n_coded_rows=sizes.matrix.n_coded_rows(sizes.dtype),
            )
        return plain.compute_times(
            spec, sizes.dtype, is_replayed and spec.supports_graphs, share,
            lambda n_rows: decode_s + ranks.exchange_s(sizes.spec, itemsize, n_rows),
            sizes.head_share, layers,
        )  # fmt: skip

    def of_rank(self, ranks: Parallelism) -> "Machine":
        """Return the share of each GPU; for a pipeline, total memory and a single link."""
        if ranks.n == 1:
            return self
        n = ranks.n_parts
        n_cards = ranks.n // n
        links = dict(self.links)
        budget = replace(
            self.budget,
            device=n_cards * self.budget.device,
            libraries=n_cards * self.budget.libraries,
            host=self.budget.host // n,
            most=self.budget.most and n_cards * self.budget.most,
        )
        n_sharing = 2 if ranks.shared_link and n > 1 else 1
        return replace(
            self, title=f"{ranks.n} x {self.title}", budget=budget, ranks=ranks,
            links=(("disk", links["disk"] / n), ("host", links["host"] / n_sharing)),
            sources=(*self.sources, ranks.source),
        )  # fmt: skip


def draft_nbytes(draft: Sizes, plan: Plan) -> int:
    """Return the layer bytes of a draft level; self-drafting reads resident layers and copies."""
    return plan.on("device") + plan.copies_nbytes if draft.stand_in else sum(draft.layer_nbytes)
