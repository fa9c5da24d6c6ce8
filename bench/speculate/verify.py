"""How long does verification of a large tree take, compared with the softmax of its logits?

    python -m bench.speculate.verify [--nodes 768] [--vocabulary 32000]

Random distributions are as sharp as a language model's. Draft distributions add noise for realistic
acceptance. Each rule is interleaved with the softmax of the same logits.
"""

import time
from statistics import mean

import numpy as np
import torch

from bench.common.measure import Benchmark, Spread
from offload_rt import SamplingParams
from offload_rt.cost.tree_size import Acceptance
from offload_rt.executor.sequence import Sequence
from offload_rt.speculate import child_sampling
from offload_rt.speculate.select import load_rule
from offload_rt.speculate.static_builder import shape_of
from offload_rt.system import registry
from offload_rt.tree.search import search
from offload_rt.tree.topology import DraftTree, SampledNodes

_SHARPNESS = 3.5
_DISAGREEMENT = 1.0
_LEVELS = 18


def drawn_tree(
    n_nodes: int, vocabulary: int, probs: str, generator: torch.Generator
) -> tuple[DraftTree, torch.Tensor]:
    """Draw a tree by a child distribution. Return it with the target logits (n, vocabulary)."""
    topology = search(Acceptance().by_rank(), n_nodes, _LEVELS).topology(n_nodes, _LEVELS)
    shape = shape_of(topology)
    logits = _SHARPNESS * torch.randn(len(topology), vocabulary, generator=generator)
    inner = np.flatnonzero(shape.row_of >= 0)
    noise = _DISAGREEMENT * torch.randn(len(inner), vocabulary, generator=generator)
    draft_probs = torch.softmax(logits[inner] + noise, -1)
    counts = np.bincount(topology.parents[1:], minlength=len(topology))[inner]
    if probs == "independent":
        children = torch.multinomial(
            draft_probs, int(counts.max()), replacement=True, generator=generator
        )
    else:
        children = child_sampling.without_replacement(draft_probs, int(counts.max()), generator)
    tokens = torch.zeros(len(topology), dtype=torch.int64)
    tokens[1:] = children[shape.row_of[topology.parents[1:]], topology.ranks[1:]]
    is_sampled = np.arange(len(topology)) > 0
    sampled = SampledNodes(is_sampled, draft_probs, shape.row_of, probs == "independent")
    return DraftTree(topology, tokens, sampled), logits


def main() -> None:
    """Print a line for each rule."""
    bench = Benchmark("verify", __doc__)
    bench.add("--nodes", type=int, default=768)
    bench.add("--vocabulary", type=int, default=32000)
    bench.add("--rounds", type=int, default=20)
    flags = bench.start()
    print(f"{flags.nodes} nodes, vocabulary {flags.vocabulary}; milliseconds")
    generator = torch.Generator().manual_seed(0)
    sequence = Sequence([0], SamplingParams(seed=0), 1_000_000)
    results = {}
    for name in registry.names("speculate.verify"):
        rule = load_rule(name)
        probs = rule.child_sampling or "without_replacement"
        softmax_ms = []
        verify_ms = []
        lengths = []
        for i in range(flags.rounds + 1):
            tree, logits = drawn_tree(flags.nodes, flags.vocabulary, probs, generator)
            moments = [time.perf_counter()]
            target = torch.softmax(logits, -1)
            moments.append(time.perf_counter())
            verdict = rule.verify(tree, target, sequence)
            sequence.tokens += [0] * (len(verdict.path) + 1)
            moments.append(time.perf_counter())
            if i > 0:  # the first compiles
                softmax_ms.append(1e3 * (moments[1] - moments[0]))
                verify_ms.append(1e3 * (moments[2] - moments[1]))
                lengths.append(len(verdict.path) + 1)
        times = {"verify_ms": Spread.of(verify_ms), "softmax_ms": Spread.of(softmax_ms)}
        results[name] = times
        spreads = "; softmax ".join(map(str, times.values()))
        print(f"{name:10} {spreads}; {mean(lengths):.2f} tokens a pass")
    bench.finish(rules=results)


if __name__ == "__main__":
    main()
