"""How long does tree attention take on a card, beside the same attention without a mask and with a dense one?

    python -m bench.attention [--nodes 768] [--prefix 4096] [--heads 64] [--kv-heads 8] [--head-dim 128]

The floor is torch's flash attention with no mask over as many keys, which cannot know the tree; the peer is torch's attention
given the tree as a dense mask. All three are interleaved, and timed by events.
"""

import argparse
import json

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench._measure import Spread, commit, machine
from offload_rt import ops
from offload_rt.tree.choose import Acceptance
from offload_rt.tree.search import best_tree

_LEVELS, _N_WARM = 18, 3


def milliseconds(call) -> float:
    """Of one call on the current stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def contenders(flags: argparse.Namespace) -> dict:
    """What is timed: a function for each name."""
    topology, _ = best_tree(Acceptance().by_rank(), flags.nodes, _LEVELS)
    n, n_keys, scale = len(topology), flags.prefix + len(topology), flags.head_dim**-0.5
    q = torch.randn(n, flags.heads, flags.head_dim, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(flags.kv_heads, n_keys, flags.head_dim, dtype=q.dtype, device="cuda") for _ in range(2))
    mask = ops.TreeMask(*ops.tree_masks(torch.from_numpy(topology.parents).cuda()), 0, n, flags.prefix, 0)

    def unmasked():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], scale=scale, enable_gqa=True)

    def masked():
        ops.reference.tree_attention(q, k, v, mask.dense(), scale)

    return {"tree": lambda: ops.tree_attention(q, k, v, mask, scale), "unmasked": unmasked, "dense mask": masked}


def main() -> None:
    """Print a line for each contender and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nodes", 768), ("prefix", 4096), ("heads", 64), ("kv-heads", 8), ("head-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=30)
    flags = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(3, "there is no card to measure on\n")
    print(f"{machine()}, {torch.cuda.get_device_name()}; milliseconds; commit {commit()}")
    calls = contenders(flags)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(_N_WARM + flags.rounds):
        for name, call in calls.items():
            took = milliseconds(call)
            if i >= _N_WARM:
                times[name].append(took)
    spreads = {name: Spread.of(found) for name, found in times.items()}
    for name, spread in spreads.items():
        print(f"{name:>12} {spread}")
    print(json.dumps({"settings": vars(flags), "ms": {name: spread.median for name, spread in spreads.items()}}))


if __name__ == "__main__":
    main()
