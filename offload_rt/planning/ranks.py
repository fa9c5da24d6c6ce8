"""Memory, traffic and exchange times of a model on several GPUs.

Tensor parallelism: each rank stores its shard of every matrix, of the KV heads, of embedding and
head, and some experts of each mixture, as `TensorParallelModel` shards them. Pipeline: each GPU
stores different layers; a single GPU computes at a time, and only its link is busy.
"""

from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from offload_rt.cost.card import Card
from offload_rt.cost.pass_times import transfer_s
from offload_rt.cost.roofline import layer_weights, n_weights
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import UnsupportedModelError
from offload_rt.models.architecture import Architecture

# Seconds of a small collective: NCCL on four V100 behind a PCIe switch, in a graph, needed 19 to
# 24 us for up to 32 KB (github.com/haohervchb/sglang-V100, pull request 2). Assumed for all paths.
_LATENCY_S = 20e-6
# Share of the link's rate for an exchange without NVLink: the sender writes to host memory and the
# receiver reads from it (assumed).
_LINK_SHARE = 0.5
# Reached share of NVLink's rate (assumed).
_NVLINK_SHARE = 0.8


@dataclass(frozen=True)
class Parallelism:
    """Number of GPUs, and division of the model among them.

    gbps         GB/s received by each rank in an exchange
    via_link     whether exchanges cross the host-to-card link of the layers
    exact        whether sharded sums keep the summation order of a single rank
    shared_link  whether each pair of GPUs shares a host-to-card link
    split_draft  whether the draft model is sharded; else the first rank computes it
    """

    n: int = 1
    gbps: float = 1.0
    via_link: bool = False
    exact: bool = False
    pipeline: bool = False
    shared_link: bool = False
    split_draft: bool = False

    @classmethod
    def for_cards(
        cls, n: int, card: Card, link_gbps: float, gbps: float | None, **division: bool
    ) -> "Parallelism":
        """Describe n GPUs of a kind, connected by NVLink or through host memory.

        gbps      GB/s of another network
        division  the boolean fields, except `via_link`
        """
        through_host = _LINK_SHARE * link_gbps / (2 if division.get("shared_link") else 1)
        rate = gbps or _NVLINK_SHARE * card.nvlink_gbps
        return cls(n, rate or through_host, not rate, **division)

    @property
    def source(self) -> str:
        """Return the assumptions in words."""
        scope = "the table adds up all cards" if self.pipeline else "the table shows the first rank"
        path = "through host memory" if self.via_link else "without their host links"
        return (
            f"{scope}; assumed: ranks exchange at {self.gbps:g} GB/s {path}, plus"
            f" {1e6 * _LATENCY_S:.0f} us per exchange"
        )

    @property
    def n_parts(self) -> int:
        """Number of shards of each layer."""
        return 1 if self.pipeline else self.n

    def part(self, sizes: Sizes) -> Sizes:
        """Return the sizes of the first rank's shard; raises UnsupportedModelError."""
        n = self.n_parts
        spec = sizes.spec
        if n == 1:
            return sizes
        if spec.taps:
            problem = f"a draft head of type {spec.family} cannot be sharded"
            raise UnsupportedModelError(problem, change="omit --split-draft")
        # Imported here: a plan for a single rank does not need torch.
        from offload_rt.parallel.tensor_parallel import TensorParallelModel

        first: Any = SimpleNamespace(rank=0, size=n)
        part = TensorParallelModel.for_rank(spec, first, self.exact)
        layers = tuple(
            nbytes * layer_weights(part, i) // layer_weights(spec, i)
            for i, nbytes in enumerate(sizes.layer_nbytes)
        )
        n_part, n_whole = (n_weights(model.non_layer_tensors()) for model in (part, spec))
        rest = sizes.non_layer_nbytes * n_part // n_whole
        return replace(sizes, spec=part, layer_nbytes=layers, divided=None, non_layer_nbytes=rest)

    def with_part_of_head(self, spec: Architecture) -> Architecture:
        """Return the architecture with a rank's shard of embedding and head."""
        return replace(spec, vocab_size=-(-spec.vocab_size // self.n_parts))

    def received(self, spec: Architecture, itemsize: int) -> int:
        """Return the bytes that a rank receives per row; in a pipeline, of all hand-overs.

        spec  a rank's shard of the model
        All-reduce: a rank receives the addends of its shard, then the summed shards of all ranks.
        All-gather: a rank receives the shards of all ranks.
        """
        if self.n_parts == 1:
            return (self.n - 1) * spec.hidden_size * itemsize
        return (self.n - 1) * sum(_collectives(spec, itemsize)) // self.n

    def exchange_s(self, spec: Architecture, itemsize: int, n_rows: int) -> float:
        """Return the seconds of a pass spent in exchanges, without computing."""
        n_times = self.n - 1 if self.n_parts == 1 else len(_collectives(spec, itemsize))
        received_s = transfer_s(n_rows * self.received(spec, itemsize), self.gbps)
        return n_times * _LATENCY_S + received_s

    def crossing(self, spec: Architecture, itemsize: int) -> int:
        """Return the part of `received` that crosses the layers' link; none in pipelines."""
        return self.received(spec, itemsize) if self.via_link and not self.pipeline else 0


ALONE = Parallelism()


@cache
def _collectives(spec: Any, itemsize: int) -> list[int]:
    """Return the bytes per row of each collective; all-reduces in float32 count twice."""
    exchanges = [exchange for i in range(spec.n_layers) for exchange in spec.exchanges(i)]
    layers = [2 * width * 4 if adds else width * spec.size * itemsize for adds, width in exchanges]
    return [2 * spec.hidden_size * 4, spec.vocab_size * itemsize, *layers]
