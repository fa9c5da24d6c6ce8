"""Matrix products of a 7B draft model's shapes by format and rows, against reading the weights.

Calls alternate between copies of a matrix: a single one in int4 would stay in the card's cache.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.timing import CARD, captured, device_gbps, in_turn
from offload_rt.dtypes import DType
from offload_rt.ops.dequantize import Weight
from offload_rt.ops.linear import dequantize, linear
from offload_rt.weights.layout import PackedLayer, packed_layout
from offload_rt.weights.rounding import ROUNDINGS, rounded

EXPECTED_S = 25
_NAME = "matrix.weight"
_N_COPIES = 8


@dataclass(frozen=True)
class Shapes:
    """Sizes of a matrix (n_out, n_in) and numbers of rows; a test makes them small."""

    n_out: int = 11008
    n_in: int = 4096
    rows: tuple[int, ...] = (1, 16, 32, 64, 128, 256)


def measure(shapes: Shapes = Shapes()) -> Iterator[dict[str, object]]:
    """Seconds of a product by format and rows, and of reading the weights once."""
    gbps = device_gbps()
    dense = torch.randn(shapes.n_out, shapes.n_in, dtype=torch.bfloat16)
    weights: dict[str, list[tuple[Weight, int]]] = {
        "bf16": [(dense.to(CARD), dense.nbytes) for _ in range(_N_COPIES)]
    }
    weights |= {name: [coded(dense, name) for _ in range(_N_COPIES)] for name in ROUNDINGS}
    results: dict[str, object] = {"device_gbps": gbps}
    for n in shapes.rows:
        x = torch.randn(n, shapes.n_in, dtype=torch.bfloat16, device=CARD)
        replays = {name: captured(product(x, copies)) for name, copies in weights.items()}
        # The kernels multiply few rows by the codes; many rows decode the matrix before.
        replays |= {
            f"{name}, decoded": captured(product(x, copies, decoded))
            for name, copies in weights.items()
            if name != "bf16"
        }
        results[str(n)] = {
            name: {"median": spread.median, "floor_s": _nbytes(weights, name) / gbps / 1e9}
            for name, spread in in_turn(replays).items()
        }
        yield results


def _nbytes(weights: dict[str, list[tuple[Weight, int]]], name: str) -> int:
    return weights[name.partition(",")[0]][0][1]


def decoded(x: Tensor, weight: Weight) -> Tensor:
    """Decode a matrix and multiply x by it."""
    assert not isinstance(weight, Tensor)
    return F.linear(x, dequantize(weight, x.new_empty(math.prod(weight.shape))))


def product(
    x: Tensor,
    copies: Sequence[tuple[Weight, int]],
    multiply: Callable[[Tensor, Weight], Tensor] = linear,
) -> Callable[[], Tensor]:
    """Return a function that multiplies x by the next copy of a matrix."""
    weights = cycle(weight for weight, _ in copies)
    return lambda: multiply(x, next(weights))


def coded(dense: Tensor, rounding: str) -> tuple[Weight, int]:
    """Quantise a matrix as a draft model is, and return its bytes."""
    layout = packed_layout([(_NAME, tuple(dense.shape), DType.BFLOAT16)], {})
    block = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.views(block)[_NAME].copy_(dense)
    layer = rounded(PackedLayer(block, layout), rounding, CARD)
    (matrix,) = layer.layout.matrices.values()
    return matrix.weight(layer.layout.views(layer.block)), layer.layout.nbytes
