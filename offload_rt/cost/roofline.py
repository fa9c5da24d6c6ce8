"""What computing takes: the longer of reading and multiplying, by published rates or by products
that were timed.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from offload_rt.chunks import CHUNK_ROWS
from offload_rt.cost.card import Card
from offload_rt.cost.pass_times import ComputeTimes
from offload_rt.dtypes import DType
from offload_rt.models.architecture import Architecture, TensorShape

# Part of the published rates that is reached. Products of 8192 by 8192 in torch, as users measured
# them: 158.6 of 165.2 TFLOP/s on an RTX 4090, 215 of 312 on an A800
# (github.com/mli/transformers-benchmarks, issue 4); the lower of the two, since the products of a
# tree are lower and wider than these. Of memory the least of these: a copy on that A800 1727 of
# 1935 GB/s, reading on an RTX 4090 921 of 1008 (github.com/krrishnarraj/clpeak, issue 106), on an
# RTX 3090 854 of 936 (github.com/ashalliants/ninfer-3090, pull request 50).
_OF_PRODUCTS = 0.7
_OF_MEMORY = 0.89
# Kernels of a layer (docs/kernels.md): products for q, k and v together, o, gate and up together,
# down; two norms, rotation, attention and the joining of its parts, SiLU, the last sum.
_N_LAUNCHES = 11
# Seconds by which each kernel of a captured graph ends later than its work says. A sum of 1024
# numbers took 1.1 to 1.3 us in a graph (github.com/pytorch/pytorch, issue 161104), a kernel that
# does nothing 0.58 (github.com/ahrefs/ocannl, issue 488).
_GAP_S = 1.25e-6
# Seconds of the host for each kernel that it launches itself: 4 to 6 us
# (susun-blog.com/blog/pegainfer-3-cuda-graph).
_LAUNCH_S = 5e-6
_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_CONTEXTS = (0, 1024, 4096, 16384, 65536, 131072)


@dataclass(frozen=True)
class Roof:
    """What a machine reaches.

    flops      operations a second in matrix products
    bandwidth  bytes a second of its memory
    gap_s      seconds between two kernels of a layer
    launch_s   seconds of the host for each kernel that is launched; it goes ahead of the device,
               which waits where it is faster
    products   (rows, seconds for each weight that they are multiplied with), ascending; empty: not
               measured
    """

    flops: float
    bandwidth: float
    gap_s: float = 0.0
    launch_s: float = 0.0
    products: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, card: Card) -> "Roof":
        """Of a card, as part of what its vendor says."""
        return cls(
            _OF_PRODUCTS * card.tflops * 1e12,
            _OF_MEMORY * card.memory_gbps * 1e9,
            _GAP_S,
            _LAUNCH_S,
        )

    def on_card(self) -> "Roof":
        """The same rates, on a card that computes by kernels."""
        return replace(self, gap_s=_GAP_S, launch_s=_LAUNCH_S)

    def seconds(self, flops: float, nbytes: float) -> float:
        """Of so many operations on so many bytes."""
        return max(flops / self.flops, nbytes / self.bandwidth)

    def product_s(
        self, n_weights: float, n_rows: float, itemsize: float, share: float = 1.0
    ) -> float:
        """Seconds of multiplying so many rows with so many weights, which have `share` of their
        bytes where they are read.
        """
        flops = 2 * n_rows * n_weights
        if self.products and n_rows <= self.products[-1][0]:
            widths, seconds = zip(*self.products, strict=True)
            return max(
                share * n_weights * float(np.interp(n_rows, widths, seconds)), flops / self.flops
            )
        return self.seconds(flops, share * n_weights * itemsize)

    def layer_s(
        self, spec: Architecture, n_rows: int, context: int, itemsize: int, i: int = 0,
        is_replayed: bool = True,
        share: float = 1.0,
    ) -> float:  # fmt: skip
        """Seconds of layer i on so many rows that look back on so many tokens.

        Its kernels run one after the other: products, attention, what lies between them, and a gap
        behind each. Of a mixture the experts that some row meets are read; each row meets its own
        as if by chance.

        is_replayed  as a captured graph; else the host launches every kernel, for each chunk of the
                     rows
        share        see `product_s`
        """
        n_read = read_weights(spec, i, n_rows)
        n_met = met_weights(spec, i)
        states = 2 * sum(one.nbytes(itemsize) for one in spec.state_shapes)
        kv_nbytes = ((context + n_rows) * spec.kv_nbytes(itemsize) + states) / spec.n_layers
        attention = self.seconds(spec.flops(i, n_rows, context) - 2 * n_rows * n_met, kv_nbytes)
        # What a product reads and writes besides its weights, a kernel before or behind it writes
        # or reads.
        widths = sum(sum(shape) for _, shape in spec.layer_tensors(i) if len(shape) == 2)
        between = self.seconds(0.0, 2 * n_rows * widths * itemsize)
        products = self.product_s(n_read, n_rows * n_met / n_read, itemsize, share)
        device_s = products + attention + between + _N_LAUNCHES * self.gap_s
        host_s = (
            0.0 if is_replayed else _N_LAUNCHES * math.ceil(n_rows / CHUNK_ROWS) * self.launch_s
        )
        return max(device_s, host_s)

    def compute_times(
        self, spec: Architecture, dtype: DType, is_replayed: bool = True, share: float = 1.0,
        decode_s: float = 0.0, more_s: Callable[[int], float] = lambda _: 0.0,
    ) -> ComputeTimes:  # fmt: skip
        """Seconds of all layers and the head by width and context.

        share     see `product_s`
        decode_s  of each weight that is read
        more_s    of a pass of so many rows
        """
        # Layers that are alike are asked for once: the table has a hundred entries, a model as many
        # layers.
        itemsize = dtype.itemsize
        alike: dict[object, list[int]] = {}
        for i in range(spec.n_layers):
            kind = (spec.layer_tensors(i), spec.flops(i, 1, 0), spec.flops(i, 1, _CONTEXTS[-1]))
            alike.setdefault(kind, []).append(i)

        def seconds(n_rows: int, context: int) -> float:
            asked = n_rows, context, itemsize
            head = self.product_s(spec.vocab_size * spec.hidden_size, n_rows, itemsize)
            layers = 0.0
            for i, *others in alike.values():
                decoding = decode_s * read_weights(spec, i, n_rows)
                layers += (1 + len(others)) * (
                    self.layer_s(spec, *asked, i, is_replayed, share) + decoding
                )
            return layers + head + more_s(n_rows)

        table = tuple(
            tuple(seconds(n_rows, context) for n_rows in _WIDTHS) for context in _CONTEXTS
        )
        return ComputeTimes(_WIDTHS, _CONTEXTS, table)


def n_weights(tensors: Iterable[TensorShape]) -> int:
    """Numbers in all of them."""
    return sum(math.prod(shape) for _, shape in tensors)


def layer_weights(spec: Architecture, i: int) -> int:
    """Numbers in the weights of layer i."""
    return n_weights(spec.layer_tensors(i))


def read_weights(spec: Architecture, i: int, n_rows: int) -> float:
    """How many of them some of so many rows is multiplied with."""
    n = layer_weights(spec, i)
    return n * (1 - (1 - met_weights(spec, i) / n) ** n_rows)


def met_weights(spec: Architecture, i: int) -> float:
    """How many of them a row is multiplied with: of a mixture those of its experts, else all."""
    return min(spec.flops(i, 1, 0) / 2, layer_weights(spec, i))
