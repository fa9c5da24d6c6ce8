"""Several cards for one model: what each holds, what they exchange, and how long that takes.

In tensor parallelism every rank has its part of each matrix, of the keys and values by heads, and of the rows of embedding and
head. By default `o` and `down` are divided by columns and their outputs summed in float32 (Megatron-LM, arXiv 1909.08053). With
`exact` all matrices are divided by rows and their outputs gathered, so numbers are those of one rank, bit for bit. In a
pipeline each card has layers of its own; one is at work at a time, and only its link is busy.
"""

from dataclasses import dataclass, replace

from offload_rt.engine.memory_plan import Sizes
from offload_rt.errors import SettingsError, UnsupportedModelError
from offload_rt.models.architecture import Architecture
from offload_rt.models.native import NativeDecoder
from offload_rt.planning.hardware import Card
from offload_rt.planning.roofline import layer_weights, n_weights

# Seconds of a collective of few bytes: NCCL among four V100 on one PCIe switch, in a graph, took 19 to 24 us for up to 32 KB
# (github.com/haohervchb/sglang-V100, pull request 2). It is assumed for other paths, too.
_LATENCY_S = 20e-6
# Part of a link's rate at which ranks without NVLink exchange: by the host's memory, where one writes and another reads
# (assumed). And the part of NVLink's rate that is reached (assumed).
_OF_LINK, _OF_NVLINK = 0.5, 0.8


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
    def of(cls, n: int, card: Card, link_gbps: float, gbps: float | None, **how: bool) -> "Parallelism":
        """So many of a card, by its NVLink or through the host's memory; gbps: of another network."""
        through_host = _OF_LINK * link_gbps / (2 if how.get("shared_link") else 1)
        return cls(n, gbps or _OF_NVLINK * card.nvlink_gbps or through_host, not (gbps or card.nvlink_gbps), **how)

    @property
    def source(self) -> str:
        """Where its figures are from, in words."""
        whose = "all cards are shown as one" if self.pipeline else "the first rank is shown"
        path = "through the host's memory" if self.via_link else "not over their links"
        return f"{whose}; ranks exchange at {self.gbps:g} GB/s {path}, and {1e6 * _LATENCY_S:.0f} us each time: assumed"

    @property
    def n_parts(self) -> int:
        """Of each layer."""
        return 1 if self.pipeline else self.n

    def part(self, sizes: Sizes) -> Sizes:
        """Of a rank's part of a model; its logits are gathered. Raises SettingsError where it cannot be divided so."""
        n, spec = self.n_parts, sizes.spec
        if n == 1:
            return sizes
        if not isinstance(spec, NativeDecoder) or spec.taps:
            problem = f"a model of type {spec.family} is not divided among ranks"
            raise UnsupportedModelError(problem, change="use --pipeline")
        n_heads, n_kv_heads, width = spec.n_heads, spec.n_kv_heads, spec.intermediate_size
        if n_heads % n or width % n or (n_kv_heads % n and n % n_kv_heads):
            have = f"{n_heads} heads, {n_kv_heads} of keys and values, and an MLP of {width} columns"
            raise SettingsError(f"--ranks {n}", need="a number that divides the model", have=have, change="use another")
        # Fewer heads of keys and values than ranks: several ranks have the same.
        part = replace(spec, n_heads=n_heads // n, n_kv_heads=max(n_kv_heads // n, 1), intermediate_size=width // n)
        layers = tuple(nbytes * layer_weights(part, 0) // layer_weights(spec, 0) for nbytes in sizes.layer_nbytes)
        of_part, of_all = (n_weights(one.non_layer_tensors()) for one in (self.with_part_of_head(spec), spec))
        non_layer = sizes.non_layer_nbytes * of_part // of_all
        return replace(sizes, spec=part, layer_nbytes=layers, non_layer_nbytes=non_layer)

    def with_part_of_head(self, spec: Architecture) -> Architecture:
        """The same with a rank's part of embedding and head."""
        return replace(spec, vocab_size=-(-spec.vocab_size // self.n_parts))

    def received(self, spec: Architecture, itemsize: int) -> int:
        """Bytes that a rank whose part this is receives for each row of a pass; in a pipeline those of all hand-overs.

        In a sum each receives the others' addends of its part, and their parts of the sum; in a gathering their parts.
        """
        n, d = self.n, spec.hidden_size
        if self.pipeline or not isinstance(spec, NativeDecoder):
            return (n - 1) * d * itemsize
        gathered = (n * (spec.n_heads * spec.head_dim + spec.intermediate_size) + 2 * d) * itemsize
        layer = gathered if self.exact else 2 * 2 * d * 4
        return (n - 1) * (spec.n_layers * layer + 2 * d * 4 + spec.vocab_size * itemsize) // n

    def exchange_s(self, spec: Architecture, itemsize: int, n_rows: int) -> float:
        """Seconds of a pass in which ranks exchange and compute nothing."""
        n_collectives = (4 if self.exact else 2) * spec.n_layers + 2
        n_times = self.n - 1 if self.pipeline or self.n == 1 else n_collectives
        return n_times * _LATENCY_S + n_rows * self.received(spec, itemsize) / self.gbps / 1e9

    def crossing(self, spec: Architecture, itemsize: int) -> int:
        """What of `received` crosses the link of the layers; of a pipeline's hand-overs one does, and is left out."""
        return self.received(spec, itemsize) if self.via_link and not self.pipeline else 0


ALONE = Parallelism()
