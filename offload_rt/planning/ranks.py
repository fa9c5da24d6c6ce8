"""Several cards for one model: what each holds, what they exchange, and how long that takes.

In tensor parallelism a rank has what `TensorParallelModel` gives it: its part of each matrix, of
the keys and values by heads, and of embedding and head, some experts of each mixture. In a pipeline
each card has layers of its own; one is at work at a time, and only its link is busy.
"""

from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from offload_rt.cost.card import Card
from offload_rt.cost.pass_times import transfer_s
from offload_rt.cost.roofline import layer_weights, n_weights
from offload_rt.engine.memory_plan import Sizes
from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import Architecture

# Seconds of a collective of few bytes: NCCL among four V100 on one PCIe switch, in a graph, took 19
# to 24 us for up to 32 KB (github.com/haohervchb/sglang-V100, pull request 2). It is assumed for
# other paths, too.
_LATENCY_S = 20e-6
# Part of a link's rate at which ranks without NVLink exchange: by the host's memory, where one
# writes and another reads (assumed). And the part of NVLink's rate that is reached (assumed).
_OF_LINK = 0.5
_OF_NVLINK = 0.8


@dataclass(frozen=True)
class Parallelism:
    """How many cards compute one model, and how.

    gbps         GB/s at which each receives what others send
    via_link     whether that crosses the link of the layers as well
    shared_link  whether every two of them hang on one link
    split_draft  whether the draft model is divided as well; else it is on the first
    """

    n: int = 1
    gbps: float = 1.0
    via_link: bool = False
    exact: bool = False
    pipeline: bool = False
    shared_link: bool = False
    split_draft: bool = False

    @classmethod
    def of(
        cls, n: int, card: Card, link_gbps: float, gbps: float | None, **how: bool
    ) -> "Parallelism":
        """So many of a card, by its NVLink or through the host's memory; gbps: of another
        network.
        """
        through_host = _OF_LINK * link_gbps / (2 if how.get("shared_link") else 1)
        return cls(
            n,
            gbps or _OF_NVLINK * card.nvlink_gbps or through_host,
            not (gbps or card.nvlink_gbps),
            **how,
        )

    @property
    def source(self) -> str:
        """Where its figures are from, in words."""
        whose = "all cards are shown as one" if self.pipeline else "the first rank is shown"
        path = "through the host's memory" if self.via_link else "not over their links"
        return (
            f"{whose}; ranks exchange at {self.gbps:g} GB/s {path}, and {1e6 * _LATENCY_S:.0f} us"
            " each time: assumed"
        )

    @property
    def n_parts(self) -> int:
        """Of each layer."""
        return 1 if self.pipeline else self.n

    def part(self, sizes: Sizes) -> Sizes:
        """Of the first rank's part of a model. Raises UnsupportedModelError where it cannot be
        divided so.
        """
        n = self.n_parts
        spec = sizes.spec
        if n == 1:
            return sizes
        if spec.taps:
            problem = f"a head of type {spec.family} is not divided among ranks"
            raise UnsupportedModelError(problem, change="leave --split-draft out")
        # needs torch; one rank does not
        from offload_rt.parallel.tensor_parallel import TensorParallelModel

        first: Any = SimpleNamespace(rank=0, size=n)
        part = TensorParallelModel.for_rank(spec, first, self.exact)
        shares = [(layer_weights(part, i), layer_weights(spec, i)) for i in range(spec.n_layers)]
        layers = tuple(
            nbytes * own // whole
            for nbytes, (own, whole) in zip(sizes.layer_nbytes, shares, strict=True)
        )
        of_part, of_all = (n_weights(one.non_layer_tensors()) for one in (part, spec))
        return replace(
            sizes,
            spec=part,
            layer_nbytes=layers,
            divided=None,
            non_layer_nbytes=sizes.non_layer_nbytes * of_part // of_all,
        )

    def with_part_of_head(self, spec: Architecture) -> Architecture:
        """The same with a rank's part of embedding and head."""
        return replace(spec, vocab_size=-(-spec.vocab_size // self.n_parts))

    def received(self, spec: Architecture, itemsize: int) -> int:
        """Bytes that a rank whose part this is receives for each row of a pass; in a pipeline those
        of all hand-overs.

        In a sum each receives the others' addends of its part, and their parts of the sum; in a
        gathering their parts.
        """
        if self.n_parts == 1:
            return (self.n - 1) * spec.hidden_size * itemsize
        return (self.n - 1) * sum(_collectives(spec, itemsize)) // self.n

    def exchange_s(self, spec: Architecture, itemsize: int, n_rows: int) -> float:
        """Seconds of a pass in which ranks exchange and compute nothing."""
        n_times = self.n - 1 if self.n_parts == 1 else len(_collectives(spec, itemsize))
        received_s = transfer_s(n_rows * self.received(spec, itemsize), self.gbps)
        return n_times * _LATENCY_S + received_s

    def crossing(self, spec: Architecture, itemsize: int) -> int:
        """What of `received` crosses the link of the layers; of a pipeline's hand-overs one does,
        and is left out.
        """
        return self.received(spec, itemsize) if self.via_link and not self.pipeline else 0


ALONE = Parallelism()


@cache
def _collectives(spec: Any, itemsize: int) -> list[int]:
    """Of each exchange of a pass of a `TensorParallelModel` the bytes of a row, those of sums,
    which are in float32, twice.
    """
    exchanges = [one for i in range(spec.n_layers) for one in spec.exchanges(i)]
    found = [2 * width * 4 if adds else width * spec.size * itemsize for adds, width in exchanges]
    return [2 * spec.hidden_size * 4, spec.vocab_size * itemsize, *found]
