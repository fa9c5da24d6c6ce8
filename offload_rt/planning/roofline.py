"""What computing takes: the longer of reading and multiplying, by published rates or by products that were timed."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from offload_rt.models.architecture import Architecture
from offload_rt.planning.hardware import Card
from offload_rt.system.machine import ComputeTimes

# Part of the published rates that is reached. Products of 8192 by 8192 in torch, as users measured them: 158.6 of 165.2
# TFLOP/s on an RTX 4090, 215 of 312 on an A800 (github.com/mli/transformers-benchmarks, issue 4, where a copy on the latter
# reaches 1727 of 1935 GB/s); the lower of the two, since the products of a tree are lower and wider than these.
_OF_PRODUCTS, _OF_MEMORY = 0.7, 0.85
# Seconds to launch the kernels of a layer one by one from Python: about a dozen at 5 us each (remembered).
_LAUNCH_S = 6e-5
_WIDTHS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_CONTEXTS = (0, 1024, 4096, 16384, 65536, 131072)


@dataclass(frozen=True)
class Roof:
    """What a machine reaches.

    flops      operations a second in matrix products
    bandwidth  bytes a second of its memory
    launch_s   seconds a layer takes at least
    products   (rows, seconds for each weight that they are multiplied with), ascending; empty: not measured
    """

    flops: float
    bandwidth: float
    launch_s: float
    products: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, card: Card) -> "Roof":
        """Of a card, as part of what its vendor says."""
        return cls(_OF_PRODUCTS * card.tflops * 1e12, _OF_MEMORY * card.memory_gbps * 1e9, _LAUNCH_S)

    def seconds(self, flops: float, nbytes: float) -> float:
        """Of so many operations on so many bytes."""
        return max(flops / self.flops, nbytes / self.bandwidth)

    def product_s(self, n_weights: int, n_rows: int, itemsize: int) -> float:
        """Seconds of multiplying so many rows with so many weights."""
        if self.products and n_rows <= self.products[-1][0]:
            widths, seconds = zip(*self.products, strict=True)
            return n_weights * float(np.interp(n_rows, widths, seconds))
        return self.seconds(2 * n_rows * n_weights, n_weights * itemsize)

    def layer_s(self, spec: Architecture, n_rows: int, context: int, itemsize: int, i: int = 0) -> float:
        """Seconds of layer i on so many rows that look back on so many tokens, and of their attention."""
        n_weights = layer_weights(spec, i)
        kv_nbytes = (context + n_rows) * spec.kv_nbytes(itemsize) / spec.n_layers
        attention = self.seconds(spec.flops(i, n_rows, context) - 2 * n_rows * n_weights, kv_nbytes)
        return max(self.product_s(n_weights, n_rows, itemsize) + attention, self.launch_s)

    def compute_times(self, spec: Architecture, dtype: torch.dtype) -> ComputeTimes:
        """Seconds of all layers and the head by width and context."""
        # Layers that are alike are asked for once: the table has a hundred entries, a model as many layers.
        itemsize = dtype.itemsize
        alike: dict[object, list[int]] = {}
        for i in range(spec.n_layers):
            kind = (spec.layer_tensors(i), spec.flops(i, 1, 0), spec.flops(i, 1, _CONTEXTS[-1]))
            alike.setdefault(kind, []).append(i)

        def seconds(n_rows: int, context: int) -> float:
            layers = sum(len(same) * self.layer_s(spec, n_rows, context, itemsize, same[0]) for same in alike.values())
            return layers + self.product_s(spec.vocab_size * spec.hidden_size, n_rows, itemsize)

        table = tuple(tuple(seconds(n_rows, context) for n_rows in _WIDTHS) for context in _CONTEXTS)
        return ComputeTimes(_WIDTHS, _CONTEXTS, table)


def layer_weights(spec: Architecture, i: int) -> int:
    """Numbers in the weights of layer i."""
    return sum(math.prod(shape) for _, shape in spec.layer_tensors(i))


def head_share(spec: Architecture) -> float:
    """The head's part of a pass, by its part of the weights that are multiplied with."""
    layers = sum(layer_weights(spec, i) for i in range(spec.n_layers))
    head = spec.vocab_size * spec.hidden_size
    return head / (layers + head)
