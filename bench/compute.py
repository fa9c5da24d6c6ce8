"""How close to the ceilings of a CPU are products of stored weights? Is torch's attention the
fastest there?

    python -m bench.compute [--parts products pass attention] [--size 2100MB] [--rows 176]
    [--context 300]

Products: every weight format against the multiply-add peak and the memory bandwidth of the same
round, torch's product beside. Pass: the time of a pass over a tree by kernel of the CPU library,
all layers resident. Attention: implementations of attention, interleaved. With --avx2 torch, MKL
and oneDNN use AVX2 only.
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

from bench import products
from bench.gpu.shapes import random_tree
from bench.measure import (
    AVX2_ENVIRONMENT,
    Spread,
    commit,
    expanded_model,
    flag_parser,
    machine,
    print_result,
)
from bench.products import DENSE, QUANTIZED
from offload_rt import LLM, ops
from offload_rt.ops import cpu, reference
from offload_rt.tree.topology import Topology
from offload_rt.weights.checkpoint import open_checkpoint

PARTS = ("products", "pass", "attention")
# Kernels of the CPU library by kind; the rest of a pass is "else".
_KINDS = {
    "offload_rt_linear": "products",
    "offload_rt_tree_attention": "attention",
    "offload_rt_rms_norm": "norms",
    "offload_rt_silu_mul": "gates",
}
_ELSE = "else"
_N_PASSES = 3
_N_ROUNDS = 15
_ONE_ROW_KEYS = (256, 1024)
# Query heads, heads of keys, columns of each; the model's own come first.
_OTHER_HEADS = ((32, 8, 64), (32, 32, 64))


class TimedLibrary:
    """The CPU library with the seconds of each kind of kernel."""

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
    """Share of each kind of kernel in the time of passes. Needs the CPU library."""
    llm.time_passes(topology, context, 1)
    library = cpu.library()
    assert library is not None, "a C++ compiler builds it"
    timed = TimedLibrary(library)
    with patch.object(cpu, "library", lambda: timed):
        passes = llm.time_passes(topology, context, _N_PASSES)
    whole = sum(passes)
    timed.seconds[_ELSE] = whole - sum(
        part for kind, part in timed.seconds.items() if kind != _ELSE
    )
    return {kind: part / whole for kind, part in timed.seconds.items()}


def by_products(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Two products and a softmax, with the heads of a group as rows of one; scores are rounded to
    the dtype of `q`.
    """
    n = q.shape[0]
    n_groups = k.shape[0]
    head_dim = q.shape[2]
    rows = q.view(n, n_groups, -1, head_dim).permute(1, 2, 0, 3).reshape(n_groups, -1, head_dim)
    scores = torch.bmm(rows * scale, k.transpose(1, 2)).view(n_groups, -1, n, k.shape[1])
    weights = scores.float().masked_fill_(~visible, float("-inf")).softmax(-1).to(q.dtype)
    out = torch.bmm(weights.view(n_groups, -1, k.shape[1]), v)
    return out.view(n_groups, -1, n, head_dim).permute(2, 0, 1, 3).reshape(q.shape)


def interleaved_ms(ways: dict[str, Callable[[], Tensor]]) -> dict[str, Spread]:
    """Milliseconds of each implementation, interleaved."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for i in range(_N_ROUNDS + 1):
        for name, attend in ways.items():
            started = time.perf_counter()
            attend()
            if i > 0:  # the first round warms up
                found[name].append(1e3 * (time.perf_counter() - started))
    return {name: Spread.of(times) for name, times in found.items()}


def attention_ms(heads: tuple[int, int, int], n_rows: int, n_keys: int) -> dict[str, Spread]:
    """Milliseconds of implementations of attention in bfloat16, of a random tree or of one row.

    heads  query heads, heads of keys, columns of each
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
    ways = {"torch": partial(reference.torch_attention, q, k, v, visible, scale)}
    if visible is not None:
        ways["torch, grouped"] = partial(reference.grouped_attention, q, k, v, visible, scale)
        ways["products"] = partial(by_products, q, k, v, visible, scale)
    return interleaved_ms(ways | {"as used": partial(ops.tree_attention, q, k, v, mask, scale)})


def shares_of_pass(flags: argparse.Namespace) -> dict[str, float]:
    """Print the shares of the ops in a pass over a random tree."""
    limits = {
        "tree_size": flags.rows,
        "max_model_len": flags.context + flags.rows + 36,
        "device_memory": "6GB",
    }
    with LLM(str(expanded_model(flags.size)), device="cpu", drafter="ngram", **limits) as llm:
        found = shares(llm, random_tree(flags.rows), flags.context)
    print(
        f"a pass of {flags.rows} rows: "
        + ", ".join(f"{kind} {share:.0%}" for kind, share in found.items())
    )
    return found


def compare_attention(flags: argparse.Namespace) -> dict[str, object]:
    """Print the times of attention with the heads of the model and others."""
    spec = open_checkpoint(expanded_model(flags.size)).spec
    found: dict[str, object] = {}
    for heads in ((spec.n_heads, spec.n_kv_heads, spec.head_dim), *_OTHER_HEADS):
        for n_rows, n_keys in (
            (flags.rows, flags.context + flags.rows),
            *((1, n) for n in _ONE_ROW_KEYS),
        ):
            case = "{} rows to {} keys, {}/{} heads of {}".format(n_rows, n_keys, *heads)
            times = attention_ms(heads, n_rows, n_keys)
            found[case] = {name: vars(spread) for name, spread in times.items()}
            print(f"{case}, ms: " + "; ".join(f"{name} {spread}" for name, spread in times.items()))
    return found


def main() -> None:
    """Print the parts asked for and one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--formats", nargs="+", choices=[*DENSE, *QUANTIZED], default=[*DENSE, *QUANTIZED]
    )
    parser.add_argument("--rounds", type=int, default=5, help="of products")
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--size", default="2100MB")
    parser.add_argument("--rows", type=int, default=176)
    parser.add_argument("--context", type=int, default=300)
    flags = parser.parse_args()
    # libraries read it while they are loaded
    if flags.avx2 and not os.environ.keys() >= AVX2_ENVIRONMENT.keys():
        os.execve(
            sys.executable,
            [sys.executable, "-m", "bench.compute", *sys.argv[1:]],
            os.environ | AVX2_ENVIRONMENT,
        )
    print(f"{machine()}; commit {commit()}{'; AVX2 only' if flags.avx2 else ''}")
    found: dict[str, object] = {}
    if "products" in flags.parts:
        found |= products.report(flags.formats, flags.rounds)
    if "pass" in flags.parts:
        found["shares"] = shares_of_pass(flags)
    if "attention" in flags.parts:
        found["attention_ms"] = compare_attention(flags)
    print_result("compute", flags, **found)


if __name__ == "__main__":
    main()
