"""Roofline compute times: the longer of reading and multiplying, by published or measured rates."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from offload_rt.chunks import CHUNK_ROWS
from offload_rt.cost.card import Card
from offload_rt.cost.pass_times import ComputeTimes
from offload_rt.dtypes import DType
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import TensorShape
from offload_rt.packing import coded_reads

# Reached share of published rates. Products of 8192 by 8192 in torch: 158.6 of 165.2 TFLOP/s on an
# RTX 4090, 215 of 312 on an A800 (github.com/mli/transformers-benchmarks, issue 4). The lower share
# applies, since tree products have fewer rows. Memory, the least of: a copy on that A800 1727 of
# 1935 GB/s, reading on an RTX 4090 921 of 1008 (github.com/krrishnarraj/clpeak, issue 106), on an
# RTX 3090 854 of 936 (github.com/ashalliants/ninfer-3090, pull request 50).
_FLOPS_SHARE = 0.7
_BANDWIDTH_SHARE = 0.89
# Kernels of a layer (docs/kernels.md): products for q, k and v together, o, gate and up together,
# down; two norms, rotation, attention and its reduction, SiLU, the last sum.
_N_LAUNCHES = 11
# Overhead of a kernel in a captured graph, in seconds. A sum of 1024 numbers took 1.1 to 1.3 us in
# a graph (github.com/pytorch/pytorch, issue 161104), an empty kernel 0.58 us
# (github.com/ahrefs/ocannl, issue 488).
_GAP_S = 1.25e-6
# Host seconds to launch a kernel without a graph: 4 to 6 us
# (susun-blog.com/blog/pegainfer-3-cuda-graph).
_LAUNCH_S = 5e-6
_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_CONTEXTS = (0, 1024, 4096, 16384, 65536, 131072)


@dataclass(frozen=True)
class Roof:
    """Reached rates of a device.

    flops      FLOP/s of matrix products
    bandwidth  bytes/s of device memory
    gap_s      seconds between two kernels of a layer
    launch_s   host seconds per kernel launch; the host runs ahead of the device
    products   (rows, seconds per weight) of measured products, ascending; empty if not measured
    decode_s   seconds to decode a quantised weight before a product
    n_coded_rows  most rows that are multiplied by the codes without decoding
    """

    flops: float
    bandwidth: float
    gap_s: float = 0.0
    launch_s: float = 0.0
    products: tuple[tuple[int, float], ...] = ()
    decode_s: float = 0.0
    n_coded_rows: float = math.inf

    @classmethod
    def from_card(cls, card: Card) -> "Roof":
        """Derive the rates of a GPU from its specification."""
        flops = _FLOPS_SHARE * card.tflops * 1e12
        return cls(flops, _BANDWIDTH_SHARE * card.memory_gbps * 1e9).on_card()

    def on_card(self) -> "Roof":
        """Add the kernel overheads of a GPU to measured rates."""
        return replace(self, gap_s=_GAP_S, launch_s=_LAUNCH_S)

    def mixed(self, coded: "Roof", share: float) -> "Roof":
        """Replace this share of the weights by weights with the measured products of `coded`."""
        products = tuple(
            (n_rows, (1 - share) * plain_s + share * coded_s)
            for (n_rows, plain_s), (_, coded_s) in zip(self.products, coded.products, strict=False)
        )
        flops = 1 / ((1 - share) / self.flops + share / coded.flops)
        return replace(self, flops=flops, products=products)

    def seconds(self, flops: float, nbytes: float) -> float:
        """Return the seconds of `flops` operations on `nbytes` bytes."""
        return max(flops / self.flops, nbytes / self.bandwidth)

    def product_s(
        self, n_weights: float, n_rows: float, itemsize: float, share: float = 1.0
    ) -> float:
        """Return the seconds of multiplying `n_rows` rows with `n_weights` weights.

        itemsize  bytes of a weight in the dtype of the computation
        share     stored bytes of the weights relative to `itemsize`, read by products with codes
        """
        flops = 2 * n_rows * n_weights
        decode_s = 0.0
        if n_rows > self.n_coded_rows:
            decode_s = self.decode_s * n_weights
            share = 1.0
        elif self.n_coded_rows < math.inf:
            share *= coded_reads(n_rows)
        if self.products and n_rows <= self.products[-1][0]:
            widths, seconds = zip(*self.products, strict=True)
            measured_s = share * n_weights * float(np.interp(n_rows, widths, seconds))
            return max(measured_s, flops / self.flops) + decode_s
        return self.seconds(flops, share * n_weights * itemsize) + decode_s

    def layer_s(
        self, spec: Architecture, n_rows: int, context: int, itemsize: int, i: int = 0,
        is_replayed: bool = True,
        share: float = 1.0,
    ) -> float:  # fmt: skip
        """Return the seconds of layer i after `context` tokens; `share` as in `product_s`.

        Kernels run in sequence: products, attention, elementwise kernels, and a gap after each. A
        mixture reads the experts of all rows; each row selects equally likely experts.
        is_replayed  captured graph; otherwise the host launches all kernels per chunk of rows
        """
        n_touched = touched_weights(spec, i, n_rows)
        n_active = active_weights(spec, i)
        states = 2 * sum(state.nbytes(itemsize) for state in spec.state_shapes)
        kv_nbytes = ((context + n_rows) * spec.kv_nbytes(itemsize) + states) / spec.n_layers
        attention = self.seconds(spec.flops(i, n_rows, context) - 2 * n_rows * n_active, kv_nbytes)
        # The kernels around a product write its input and read its output.
        widths = sum(sum(shape) for _, shape in spec.layer_tensors(i) if len(shape) == 2)
        elementwise = self.seconds(0.0, 2 * n_rows * widths * itemsize)
        products = self.product_s(n_touched, n_rows * n_active / n_touched, itemsize, share)
        device_s = products + attention + elementwise + _N_LAUNCHES * self.gap_s
        n_chunks = 0 if is_replayed else math.ceil(n_rows / CHUNK_ROWS)
        return max(device_s, _N_LAUNCHES * n_chunks * self.launch_s)

    def compute_times(
        self, spec: Architecture, dtype: DType, is_replayed: bool = True, share: float = 1.0,
        more_s: Callable[[int], float] = lambda _: 0.0, head_share: float = 1.0,
        layers: "Roof | None" = None,
    ) -> ComputeTimes:  # fmt: skip
        """Return the seconds of all layers and the head by rows and context.

        share       of the layers, see `product_s`
        more_s      further seconds of a pass, by rows
        head_share  of the output matrix, see `product_s`
        layers      rates of quantised layers; None for the rates of the head
        """
        # Compute equal layers once: the table has a hundred entries, and a model as many layers.
        itemsize = dtype.itemsize
        groups: dict[object, list[int]] = {}
        for i in range(spec.n_layers):
            kind = (spec.layer_tensors(i), spec.flops(i, 1, 0), spec.flops(i, 1, _CONTEXTS[-1]))
            groups.setdefault(kind, []).append(i)

        def seconds(n_rows: int, context: int) -> float:
            n_head = spec.vocab_size * spec.hidden_size
            head = self.product_s(n_head, n_rows, itemsize, head_share)
            roof = layers or self
            total = head + more_s(n_rows)
            for i, *more in groups.values():
                layer_s = roof.layer_s(spec, n_rows, context, itemsize, i, is_replayed, share)
                total += (1 + len(more)) * layer_s
            return total

        rows = (tuple(seconds(n_rows, context) for n_rows in _WIDTHS) for context in _CONTEXTS)
        return ComputeTimes(_WIDTHS, _CONTEXTS, tuple(rows))


def n_weights(tensors: Iterable[TensorShape]) -> int:
    """Return the number of weights in all tensors."""
    return sum(math.prod(shape) for _, shape in tensors)


def layer_weights(spec: Architecture, i: int) -> int:
    """Return the number of weights of layer i."""
    return n_weights(spec.layer_tensors(i))


def touched_weights(spec: Architecture, i: int, n_rows: int) -> float:
    """Return the expected number of weights of layer i that `n_rows` rows use."""
    n = layer_weights(spec, i)
    return n * (1 - (1 - active_weights(spec, i) / n) ** n_rows)


def active_weights(spec: Architecture, i: int) -> float:
    """Return the number of weights of layer i that a row uses: all, or its experts in a mixture."""
    return min(spec.flops(i, 1, 0) / 2, layer_weights(spec, i))
