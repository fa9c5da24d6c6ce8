"""How close to the ceilings of a CPU are products of stored weights and attention?

    python -m bench.compute [--parts products cycles pass attention] [--size 2100MB] [--rows 176]
        [--context 300]

products: every weight format, and torch's product, against the multiply-add peak and the memory
bandwidth of the same round. cycles: one and eight rows of a matrix in the L2 cache; --limits adds
the least cycles of the executed instructions. pass: shares of the CPU kernels in a resident tree
pass, and attention's share of the multiply-adds. attention: implementations of attention,
interleaved. --avx2 restricts torch, MKL and oneDNN to AVX2. --activations int8 also measures types
of GGUF with inputs rounded to 8 bits.
"""

import argparse
import ctypes
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from bench.common.checkpoints import expanded_model
from bench.common.measure import AVX2_ENVIRONMENT, Benchmark, Spread, interleaved, timed
from bench.compute import cycles, products
from bench.compute.products import FORMATS
from bench.gpu.shapes import random_tree
from offload_rt import LLM, ops
from offload_rt.ops import cpu, reference
from offload_rt.tree.topology import Topology
from offload_rt.weights.checkpoint import open_checkpoint

PARTS = ("products", "cycles", "pass", "attention")
# Kernels of the CPU library by kind.
_KINDS = {
    "offload_rt_linear": "products",
    "offload_rt_tree_attention": "attention",
    "offload_rt_rms_norm": "norms",
    "offload_rt_silu_mul": "gates",
    "offload_rt_rotate_and_store": "rotary embedding",
}
_ELSE = "else"
_N_PASSES = 3
_N_POSITIONS = 1024  # of the demonstration target
_N_ROUNDS = 15
_ONE_ROW_KEYS = (256, 1024)
# Query heads, KV heads and head dimension, in addition to the model's.
_OTHER_HEADS = ((32, 8, 64), (32, 32, 64))


class TimedLibrary:
    """CPU library wrapper that measures each kind of kernel."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._library = library

    def __getattr__(self, name: str) -> Callable[..., object]:
        kernel = getattr(self._library, name)

        def timed(*arguments: object) -> object:
            started = time.perf_counter()
            result = kernel(*arguments)
            self.seconds[_KINDS.get(name, _ELSE)] += time.perf_counter() - started
            return result

        return timed


def shares(llm: LLM, topology: Topology, context: int) -> dict[str, float]:
    """Return the share of each kind of kernel in passes. Needs the CPU library."""
    llm.time_passes(topology, context, 1)
    library = cpu.library()
    assert library is not None, "a C++ compiler builds it"
    timed = TimedLibrary(library)
    with patch.object(cpu, "library", lambda: timed):
        started = time.perf_counter()
        llm.time_passes(topology, context, _N_PASSES)
        whole = time.perf_counter() - started
    timed.seconds[_ELSE] += whole - sum(timed.seconds.values())
    return {kind: part / whole for kind, part in timed.seconds.items()}


def by_products(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Compute attention by two products and a softmax, with scores in the dtype of `q`."""
    n = q.shape[0]
    n_groups = k.shape[0]
    head_dim = q.shape[2]
    rows = q.view(n, n_groups, -1, head_dim).permute(1, 2, 0, 3).reshape(n_groups, -1, head_dim)
    scores = torch.bmm(rows * scale, k.transpose(1, 2)).view(n_groups, -1, n, k.shape[1])
    weights = scores.float().masked_fill_(~visible, float("-inf")).softmax(-1).to(q.dtype)
    out = torch.bmm(weights.view(n_groups, -1, k.shape[1]), v)
    return out.view(n_groups, -1, n, head_dim).permute(2, 0, 1, 3).reshape(q.shape)


def attention_ms(heads: tuple[int, int, int], n_rows: int, n_keys: int) -> dict[str, Spread]:
    """Measure implementations of bfloat16 attention of a random tree.

    heads  query heads, KV heads, head dimension
    """
    n_heads, n_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(n_rows, n_heads, head_dim, generator=generator).bfloat16()
    k, v = (
        torch.randn(n_kv_heads, n_keys, head_dim, generator=generator).bfloat16() for _ in range(2)
    )
    scale = head_dim**-0.5
    tree = random_tree(n_rows)
    mask = tree.mask(0, n_rows, n_keys - n_rows)
    visible = mask.dense()
    ways = {"torch": partial(reference.tree_attention, q, k, v, visible, scale)}
    if visible is not None:
        ways["products"] = partial(by_products, q, k, v, visible, scale)
    ways["as used"] = partial(ops.tree_attention, q, k, v, mask, scale)
    works = {name: partial(timed, attend) for name, attend in ways.items()}
    seconds = interleaved(works, _N_ROUNDS)
    return {name: Spread.of([1e3 * time for time in times]) for name, times in seconds.items()}


def shares_of_pass(flags: argparse.Namespace) -> dict[str, float]:
    """Print the shares of kernels in a pass over a random tree."""
    n_positions = flags.context + flags.rows + 36
    limits = {"tree_size": flags.rows, "max_model_len": n_positions, "device_memory": "6GB"}
    model = expanded_model(
        flags.size, n_positions=n_positions if n_positions > _N_POSITIONS else None
    )
    with LLM(str(model), device="cpu", drafter="ngram", **limits) as llm:
        result = shares(llm, random_tree(flags.rows), flags.context)
        spec = llm.engine.runner.spec
    all_flops = spec.flops(0, flags.rows, flags.context)
    share_of_flops = 1 - spec.flops(0, flags.rows, -flags.rows) / all_flops
    print(
        f"a pass of {flags.rows} rows after {flags.context}: "
        + ", ".join(f"{kind} {share:.0%}" for kind, share in result.items())
        + f"; attention has {share_of_flops:.0%} of the multiply-adds of a layer"
    )
    return result


def compare_attention(flags: argparse.Namespace) -> dict[str, object]:
    """Print attention times with the heads of the model and of `_OTHER_HEADS`."""
    spec = open_checkpoint(expanded_model(flags.size)).spec
    results: dict[str, object] = {}
    for heads in ((spec.n_heads, spec.n_kv_heads, spec.head_dim), *_OTHER_HEADS):
        for n_rows, n_keys in (
            (flags.rows, flags.context + flags.rows),
            *((1, n) for n in _ONE_ROW_KEYS),
        ):
            case = "{} rows to {} keys, {}/{} heads of {}".format(n_rows, n_keys, *heads)
            times = attention_ms(heads, n_rows, n_keys)
            results[case] = times
            print(f"{case}, ms: " + "; ".join(f"{name} {spread}" for name, spread in times.items()))
    return results


def main() -> None:
    """Run the selected parts."""
    bench = Benchmark("compute", __doc__)
    bench.add("--parts", nargs="+", choices=PARTS, default=PARTS)
    bench.add("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    bench.add("--rounds", type=int, default=5, help="of products")
    bench.add("--limits", action="store_true")
    bench.add("--avx2", action="store_true")
    bench.add("--activations", choices=("exact", "int8"), default="exact")
    bench.add("--size", default="2100MB")
    bench.add("--rows", type=int, default=176)
    bench.add("--context", type=int, default=300)
    flags = bench.parse()
    # Libraries read the variables while they are loaded.
    if flags.avx2 and not os.environ.keys() >= AVX2_ENVIRONMENT.keys():
        command = [sys.executable, "-m", "bench.compute", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | AVX2_ENVIRONMENT)
    bench.print_header()
    results: dict[str, object] = {}
    if "products" in flags.parts:
        results |= products.report(flags.formats, flags.rounds, flags.activations == "int8")
    if "cycles" in flags.parts:
        results |= cycles.report(flags.formats, flags.limits)
    if "pass" in flags.parts:
        results["shares"] = shares_of_pass(flags)
    if "attention" in flags.parts:
        results["attention_ms"] = compare_attention(flags)
    bench.finish(**results)


if __name__ == "__main__":
    main()
