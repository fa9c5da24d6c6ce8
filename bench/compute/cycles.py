"""Cycles per 32 weights of products from the L2 cache, and their limit by instructions."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from bench.common.measure import ROOT, timed
from bench.common.peaks import fma_gflops, read_gbps
from bench.compute.limits import count_instructions, least_cycles
from bench.compute.products import CACHED, MATRICES, TRACED, Weights, all_weights
from offload_rt.ops import cpu
from offload_rt.ops.dequantize import BlockMatrix, CodedMatrix
from offload_rt.ops.linear_cpu import MatrixStack, linear_groups

ROWS = (1, 8)
_N_CACHED = 64  # products with the cached matrix in one call
_N_TIMES = 20
_FLOPS_OF_A_CYCLE = 32  # of float32: a multiply-add of 16 lanes, or two of 8 lanes, as on Zen 4


def report(names: Sequence[str], has_limits: bool) -> dict[str, object]:
    """Print cycles of one and of eight rows, and the limit of the memory share of one row.

    One thread multiplies. The limit of the share holds if all threads multiplied weights from
    memory in the same time.
    has_limits  count instructions, too: ten seconds or more for a format and row count
    """
    with TemporaryDirectory(dir=ROOT / "build") as folder:
        weights = all_weights(Path(folder), names)
    n_threads = torch.get_num_threads()
    gbps = read_gbps()
    torch.set_num_threads(1)
    hertz = fma_gflops() * 1e9 / _FLOPS_OF_A_CYCLE
    print(f"clock {hertz / 1e9:.2f} GHz, memory {gbps:.1f} GB/s; cycles per 32 weights")
    columns = ("1 row", "8 rows", "bytes", "share", *(("least, 1", "8 rows") if has_limits else ()))
    print(f"{'':20}" + "".join(f"{name:>10}" for name in columns))
    n_weights = sum(n_out * n_in for n_out, n_in in MATRICES.values())
    results: dict[str, object] = {}
    for format, each in weights.items():
        cycles = [_seconds(each, n_rows) * hertz for n_rows in ROWS]
        nbytes = 32 * each.nbytes / n_weights
        share = nbytes / cycles[0] * hertz * n_threads / 1e9 / gbps
        least = [_least(each, n_rows) for n_rows in ROWS] if has_limits else []
        figures = (*cycles, nbytes, share, *least)
        print(f"{format:20}" + "".join(f"{x:10.2f}" for x in figures), flush=True)
        results[format] = {"cycles": cycles, "share": share, "least_cycles": least}
    torch.set_num_threads(n_threads)
    return {"cycles_per_32_weights": results, "gbps": gbps}


def _product(
    matrix: Tensor | CodedMatrix | BlockMatrix, n_times: int, n_rows: int, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Return the product of random rows with a matrix, several times in one call."""
    x = torch.randn(n_rows, matrix.shape[1]).to(dtype)
    return partial(linear_groups, x, [n_rows], MatrixStack.of([[matrix] * n_times]), [0])


def _seconds(weights: Weights, n_rows: int) -> float:
    """Return the least time per 32 weights of the cached matrix."""
    ((name, (n_out, n_in)),) = CACHED.items()
    product = _product(_stored(weights, name), _N_CACHED, n_rows, weights.dtype)
    return min(timed(product) for _ in range(_N_TIMES)) / _N_CACHED / (n_out * n_in / 32)


def _least(weights: Weights, n_rows: int) -> float:
    """Return the least cycles per 32 weights by the instructions of a product."""
    ((name, (n_out, n_in)),) = TRACED.items()
    matrix = deepcopy(_stored(weights, name))  # child processes inherit the copy only
    product = _product(matrix, 1, n_rows, weights.dtype)
    product()
    library = cpu.library()
    assert library is not None, "a C++ compiler builds it"
    counts = count_instructions(Path(library._name), product)
    return least_cycles(counts) / (n_out * n_in / 32)


def _stored(weights: Weights, name: str) -> Tensor | CodedMatrix | BlockMatrix:
    stored = weights.views[0].stored(name)
    assert stored is not None
    return stored[0]
