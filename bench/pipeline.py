"""What do two machines that together hold a model save one that streams it?

    OMP_NUM_THREADS=1 python -m bench.pipeline [--size 256MB] [--gbps 1] [--rounds 5]

Two processes stand for the machines, joined by gloo, each with a budget for some 6 of 10 layers; so
no weight moves. One process with this budget streams over a link of a set rate. The floor is a
process with memory for all: every layer computed once, nothing moved. A prompt of 1,000 tokens is
two chunks, so two ranks that compute at the same time are to take 3/4 of its time. Ratios are of
the same round; the last line is one JSON object.

    python -m bench.pipeline --ahead

tells by simulation what sending rows before the verdict on the last tree could gain at most:
drafting takes no time, a part of a pass takes a stage as long as any other, and whatever is in the
stages when a verdict makes it useless still takes its turn.
"""

import argparse
import heapq
import json
import random
import sys
import time
from collections.abc import Container, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path

import torch

from bench.measure import (
    Spread,
    commit,
    expanded_model,
    flag_parser,
    machine,
    print_result,
    run_json,
)
from bench.paced import pace
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig, parse_size
from offload_rt.tree.topology import Topology

WIDTHS = (1, 64, 256)
CONTEXT = 256
N_PROMPT = 1000


def config(model: Path, nbytes: int, **more: int) -> EngineConfig:
    """Of an engine with so much memory, that knows what its passes take."""
    more |= {"tree_size": WIDTHS[-1], "max_model_len": 1024}
    return EngineConfig(str(model), device="cpu", device_memory=nbytes, drafter="recycle", **more)


def seconds(llm: LLM, chance: torch.Generator) -> list[float]:
    """Of a pass of each width, and of a prompt that nobody has seen."""
    found = [min(llm.time_passes(Topology.chain(n), CONTEXT)) for n in WIDTHS]
    prompt = torch.randint(
        llm.spec.target.checkpoint.spec.vocab_size, (N_PROMPT,), generator=chance
    ).tolist()
    started = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    return [*found, time.perf_counter() - started]


# The place of each token, from the root on, among the children of the one before, likely ones
# first.
Node = tuple[int, ...]


def likely(root: Node, chances: Sequence[float], besides: Container[Node], n: int) -> list[Node]:
    """The n nodes at and below the root, without those named, that are most likely to be
    accepted.
    """
    found = list[Node]()
    heap = [(-1.0, root)]
    while len(found) < n:
        chance, node = heapq.heappop(heap)
        found += [] if node in besides else [node]
        for k, of_child in enumerate(chances):
            heapq.heappush(heap, (chance * of_child, (*node, k)))
    return found


def tokens_a_turn(
    chances: Sequence[float], n_stages: int, n_rows: int, ahead: bool, n_turns: int = 4000
) -> float:
    """Tokens for each turn of a stage, with a tree behind each verdict, or more rows of it in every
    turn.
    """
    chance = random.Random(0)
    n_tokens = 0
    root = Node()
    sent = dict[Node, int]()  # the turn at whose end a node's logits are there
    for turn in range(n_turns):
        if ahead or not sent:
            sent |= dict.fromkeys(likely(root, chances, sent, n_rows), turn + n_stages - 1)
        while sent.get(root, turn + 1) <= turn:
            n_tokens += 1
            (k,) = chance.choices(range(len(chances) + 1), [*chances, 1 - sum(chances)])
            root = (*root, k)
            sent = {node: end for node, end in sent.items() if node[: len(root)] == root}
            root = root if sent else Node()
    return n_tokens / n_turns


def print_gains() -> None:
    """A line for each chance that the first guess for a token is right, with smaller ones for
    others.
    """
    for chances in (
        (0.8, 0.08, 0.03, 0.02, 0.01),
        (0.6, 0.14, 0.07, 0.04, 0.03),
        (0.45, 0.15, 0.08, 0.05, 0.04),
    ):
        for n_stages, n_rows in product((2, 4, 8), (16, 64)):
            waiting, ahead = (
                tokens_a_turn(chances, n_stages, n_rows, way) for way in (False, True)
            )
            print(
                f"{chances[0]:.2f} {n_stages} stages, {n_rows:2} rows: {waiting:.3f} ->"
                f" {ahead:.3f}, {ahead / waiting:.2f}"
            )


def main() -> None:
    """Measure and print, or be one of the ranks."""
    parser = flag_parser(__doc__)
    parser.add_argument("--size", default="256MB")
    parser.add_argument("--gbps", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ahead", action="store_true")
    flags = parser.parse_args()
    if flags.ahead:
        return print_gains()
    chance = torch.Generator().manual_seed(time.time_ns())
    if flags.rank_of:
        with LLM.from_config(config(flags.rank_of, flags.budget, pipeline=2)) as llm:
            assert llm.plan.is_resident, "each holds what it has"
            return print(json.dumps(seconds(llm, chance)))
    model = expanded_model(flags.size)
    rounds: list[dict[str, list[float]]] = []
    with ExitStack() as closes:
        whole = closes.enter_context(
            LLM.from_config(config(model, 3 * parse_size(flags.size) + (1 << 29)))
        )
        plan = whole.plan
        budget = plan.reserved.total + int(0.6 * sum(plan.layer_nbytes))
        one = closes.enter_context(LLM.open(config(model, budget)))
        pace(one, flags.gbps)
        one.load()
        ranks = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "bench.pipeline",
        ]
        for _ in range(flags.rounds):
            found = {"floor": seconds(whole, chance), "one": seconds(one, chance)}
            result = run_json([*ranks, "--rank-of", str(model), "--budget", str(budget)]).result
            rounds.append(found | {"two": result})  # type: ignore[dict-item]  # a list
    print(
        f"{machine()}, commit {commit()}; {sum(plan.layer_nbytes) / 1e6:.0f} MB of layers, link"
        f" {flags.gbps} GB/s"
    )
    print(f"{'':28}{'two / one that streams':>32}{'two / floor':>32}")
    table = {}
    for i, what in enumerate(
        (*(f"pass of {n} rows" for n in WIDTHS), f"prompt of {N_PROMPT} tokens")
    ):
        ratios = [
            Spread.of([one["two"][i] / one[other][i] for one in rounds])
            for other in ("one", "floor")
        ]
        table[what] = dict(
            zip(("two_over_one", "two_over_floor"), map(asdict, ratios), strict=True)
        )
        print(f"{what:28}{ratios[0]!s:>32}{ratios[1]!s:>32}")
    print_result("pipeline", flags, **table)


if __name__ == "__main__":
    sys.exit(main())
