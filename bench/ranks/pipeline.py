"""How much faster are two machines that together hold a model than a machine that streams it?

    OMP_NUM_THREADS=1 python -m bench.ranks.pipeline [--size 256MB] [--gbps 1] [--rounds 5]
    python -m bench.ranks.pipeline --ahead

Two processes represent the machines, connected by gloo, each with memory for 6 of 10 layers. A
process with the same budget streams over a paced link. The floor is a process with memory for all
layers. A prompt of 1,000 tokens consists of two chunks, so two ranks in parallel need 3/4 of its
time.

With --ahead, simulate an upper bound of the gain of sending rows before the verdict on the last
tree. Drafting is free, all stages take equal time, and useless rows still occupy their stages.
"""

import heapq
import json
import random
import time
from collections.abc import Container, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path

import torch

from bench.common.checkpoints import expanded_model
from bench.common.measure import Benchmark, Spread, interleaved
from bench.common.pacing import pace
from bench.common.processes import run_json
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig, parse_size
from offload_rt.tree.topology import Topology

WIDTHS = (1, 64, 256)
CONTEXT = 256
N_PROMPT = 1000
CASES = (*(f"pass of {n} rows" for n in WIDTHS), f"prompt of {N_PROMPT} tokens")
# Probabilities that the k-th most probable draft token is correct.
CHANCES = (
    (0.8, 0.08, 0.03, 0.02, 0.01),
    (0.6, 0.14, 0.07, 0.04, 0.03),
    (0.45, 0.15, 0.08, 0.05, 0.04),
)

# A path from the root: rank of each token among its siblings, most probable first.
Node = tuple[int, ...]


def config(model: Path, nbytes: int, **more: int) -> EngineConfig:
    """Return settings with this memory budget."""
    more |= {"tree_size": WIDTHS[-1], "max_model_len": 1024}
    return EngineConfig(str(model), device="cpu", device_memory=nbytes, drafter="recycle", **more)


def seconds(llm: LLM, generator: torch.Generator) -> list[float]:
    """Time a pass of each width, and a new prompt."""
    passes = [min(llm.time_passes(Topology.chain(n), CONTEXT)) for n in WIDTHS]
    n_vocab = llm.spec.target.checkpoint.spec.vocab_size
    prompt = torch.randint(n_vocab, (N_PROMPT,), generator=generator).tolist()
    started = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    return [*passes, time.perf_counter() - started]


def most_likely(root: Node, chances: Sequence[float], sent: Container[Node], n: int) -> list[Node]:
    """Return the n most probable nodes at and below the root, without sent nodes."""
    nodes: list[Node] = []
    heap = [(-1.0, root)]
    while len(nodes) < n:
        chance, node = heapq.heappop(heap)
        nodes += [] if node in sent else [node]
        for k, of_child in enumerate(chances):
            heapq.heappush(heap, (chance * of_child, (*node, k)))
    return nodes


def tokens_per_turn(
    chances: Sequence[float], n_stages: int, n_rows: int, ahead: bool, n_turns: int = 4000
) -> float:
    """Simulate tokens per turn of a stage, with a tree per verdict, or with rows in every turn."""
    draw = random.Random(0)
    n_tokens = 0
    root = Node()
    sent: dict[Node, int] = {}  # turn at the end of which the logits are known
    for turn in range(n_turns):
        if ahead or not sent:
            nodes = most_likely(root, chances, sent, n_rows)
            sent |= dict.fromkeys(nodes, turn + n_stages - 1)
        while sent.get(root, turn + 1) <= turn:
            n_tokens += 1
            (k,) = draw.choices(range(len(chances) + 1), [*chances, 1 - sum(chances)])
            root = (*root, k)
            sent = {node: end for node, end in sent.items() if node[: len(root)] == root}
            root = root if sent else Node()
    return n_tokens / n_turns


def gains() -> dict[str, float]:
    """Print the gain of sending rows ahead."""
    result = {}
    for chances, n_stages, n_rows in product(CHANCES, (2, 4, 8), (16, 64)):
        waiting, ahead = (
            tokens_per_turn(chances, n_stages, n_rows, is_ahead) for is_ahead in (False, True)
        )
        case = f"{chances[0]:.2f}, {n_stages} stages, {n_rows} rows"
        result[case] = ahead / waiting
        print(f"{case}: {waiting:.3f} -> {ahead:.3f}, {ahead / waiting:.2f}")
    return result


def main() -> None:
    """Compare the machines, or measure as a rank."""
    bench = Benchmark("pipeline", __doc__)
    bench.add("--size", default="256MB")
    bench.add("--gbps", type=float, default=1.0, help="rate of the streaming machine's link")
    bench.add("--rounds", type=int, default=5)
    bench.add("--rank-of", type=Path, help="checkpoint; print measurements as a rank")
    bench.add("--budget", type=int, help="bytes of memory of the rank")
    bench.add("--ahead", action="store_true", help="simulate rows sent ahead")
    flags = bench.parse()
    generator = torch.Generator().manual_seed(time.time_ns())
    if flags.rank_of:
        with LLM.from_config(config(flags.rank_of, flags.budget, pipeline=2)) as llm:
            assert llm.plan.is_resident, "each rank holds its layers"
            return print(json.dumps(seconds(llm, generator)))
    bench.print_header()
    if flags.ahead:
        return bench.finish(gains=gains())
    model = expanded_model(flags.size)
    with ExitStack() as closes:
        memory = 3 * parse_size(flags.size) + (1 << 29)
        whole = closes.enter_context(LLM.from_config(config(model, memory)))
        budget = whole.plan.reserved.total + int(0.6 * sum(whole.plan.layer_nbytes))
        streaming = closes.enter_context(LLM.open(config(model, budget)))
        pace(streaming, flags.gbps)
        streaming.load()
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        rank = ["-m", "bench.ranks.pipeline", "--rank-of", str(model), "--budget", str(budget)]
        works = {
            "floor": partial(seconds, whole, generator),
            "streaming": partial(seconds, streaming, generator),
            "ranks": lambda: run_json([*ranks, *rank]).result,
        }
        runs = interleaved(works, flags.rounds, warm_up=0)
        print(f"{sum(whole.plan.layer_nbytes) / 1e6:.0f} MB of layers, link {flags.gbps} GB/s")
    print(f"{'':28}{'2 ranks / streaming':>32}{'2 ranks / floor':>32}")
    table = {}
    for i, case in enumerate(CASES):
        times = {name: [run[i] for run in results] for name, results in runs.items()}
        over_streaming = Spread.of_ratios(times["ranks"], times["streaming"])
        over_floor = Spread.of_ratios(times["ranks"], times["floor"])
        table[case] = {"over_streaming": over_streaming, "over_floor": over_floor}
        print(f"{case:28}{over_streaming!s:>32}{over_floor!s:>32}")
    bench.finish(**table)


if __name__ == "__main__":
    main()
