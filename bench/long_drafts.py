"""How much faster does a long text go on when the target drafts it by a part of its own cache?

    python -m bench.long_drafts [triforce] [self_window] [--gbps 1.0] [--rounds 6] [--temperature
    0.0]

The demo target, resident, in float32, goes on with held-out text of 16,000 tokens (triforce: one
sequence) or 8,000 (self_window: a batch of eight). Little of the keys and values is on the device;
the others come over a link of a set speed in each pass. Real are the texts, the passes, and the
acceptance, which is that of a model far beyond the 1,024 positions it was trained for, its rope
stretched by yarn.

Plain turns and drafted ones follow each other on the same sequences. The forecast is the cost
model's, by what it knew in the end. The bound is what the same trees would give if drafting took no
time. The last line is one JSON object.
"""

import argparse
import json
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from bench.measure import ROOT, Spread, commit, flag_parser, machine, print_result
from bench.methods import DRAFT, TARGET
from bench.paced import PacedLink, PacedRows
from offload_rt import LLM, SamplingParams
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.engine.engine import Engine
from offload_rt.executor.sequence import Sequence as TokenSequence
from offload_rt.speculate.draft.none import DRAFTER as NONE
from offload_rt.speculate.protocols import DraftParts
from offload_rt.speculate.select import drafter_type
from offload_rt.tree.topology import DraftTree

# Tokens that a drafted turn brings to each sequence at least, those of a plain one, and room for
# all turns.
_TURN = 12
_PLAIN_TURN = 6
_ROOM = 600
_TRAINED = 1024
# Sequences that there is room for: blocks beyond the device are not shared, and the last one of
# each is half empty.
_N_MOST = 12


@dataclass(frozen=True)
class Case:
    """A drafter, the tokens of a text, the sequences of the batch, the rows that the drafter sees.

    kv_memory  of the device for keys and values: what brings them, and a twentieth of them or less
    """

    drafter: str
    n_tokens: int
    n_sequences: int
    draft_context: int
    kv_memory: str


CASES = {
    "triforce": Case("triforce", 16_000, 1, 2048, "75MB"),
    "self_window": Case("self_window", 8_000, 8, 512, "265MB"),
}


@dataclass(frozen=True)
class Outcome:
    """Seconds for a token of a sequence in each turn and for drafting, trees, and the ratio that
    was forecast.
    """

    case: Case
    plain_s: tuple[float, ...]
    drafted_s: tuple[float, ...]
    tokens_per_pass: float
    nodes: float
    levels: float
    draft_s: float
    forecast: float

    @property
    def speedup(self) -> float:
        """How many times faster drafted turns were."""
        return mean(self.plain_s) / mean(self.drafted_s)

    @property
    def bound(self) -> float:
        """And would have been, had drafting been for nothing."""
        return mean(self.plain_s) / (mean(self.drafted_s) - self.draft_s / self.tokens_per_pass)


@dataclass
class Watched:
    """A drafter whose trees are counted, nodes, levels and expected tokens of each, and its
    seconds.
    """

    drafter: Any
    trees: list[tuple[int, int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, sequences: Sequence[TokenSequence], n_nodes: int) -> list[DraftTree]:
        """See `Drafter.propose`."""
        started = time.perf_counter()
        trees: list[DraftTree] = self.drafter.propose(sequences, n_nodes)
        self.seconds.append(time.perf_counter() - started)
        self.trees += [
            (len(tree.topology), tree.topology.n_levels, tree.expected) for tree in trees
        ]
        return trees


def stretched(folder: Path, n_tokens: int) -> str:
    """The demo target in float32, with its rope stretched to so many tokens, and positions for all
    of a batch.
    """
    shutil.copytree(TARGET, folder)
    weights = folder / "model.safetensors"
    save_file({name: one.float() for name, one in load_file(weights).items()}, weights)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = {
        "rope_type": "yarn",
        "factor": n_tokens / _TRAINED,
        "original_max_position_embeddings": _TRAINED,
    }
    config["rope_parameters"] |= rope
    config["max_position_embeddings"] = _N_MOST * (n_tokens + _ROOM)
    path.write_text(json.dumps(config))
    return str(folder)


def held_out_texts(n: int, n_tokens: int) -> list[list[int]]:
    """Parts of the held-out modules, one behind the other, which begin at n places."""
    names = (ROOT / "models/held_out.txt").read_text(encoding="utf-8").split()
    modules = (
        (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8") for name in names
    )
    tokens = AutoTokenizer.from_pretrained(TARGET)("".join(modules)).input_ids
    starts = [i * (len(tokens) - n_tokens) // n for i in range(n)]
    return [tokens[start : start + n_tokens] for start in starts]


def turn(engine: Engine, sequences: Sequence[TokenSequence], drafter: Any, n_tokens: int) -> float:
    """Seconds for a token of each sequence, in a turn of at least so many."""
    engine.drafter, before, started = (
        drafter,
        sum(one.n_new for one in sequences),
        time.perf_counter(),
    )
    while (n_new := sum(one.n_new for one in sequences) - before) < n_tokens * len(sequences):
        engine.step()
    return (time.perf_counter() - started) * len(sequences) / n_new


def measure(case: Case, flags: argparse.Namespace, folder: Path) -> Outcome:
    """Compute the prompts, then let plain and drafted turns follow each other."""
    n = case.n_sequences
    context = case.n_tokens
    longest = context + _ROOM
    draft = DRAFT if drafter_type(case.drafter).resources.needs_checkpoint else None
    with LLM(
        stretched(folder / case.drafter, context), draft, dtype="float32", drafter=case.drafter,
        draft_context=case.draft_context, max_model_len=longest if n == 1 else _N_MOST * longest,
        device_memory=flags.memory,
        kv_memory=case.kv_memory,
    ) as llm:  # fmt: skip
        engine = llm.engine
        cost = llm.engine.cost
        runner = llm.engine.runner
        split = llm.plan.split
        assert split is not None and runner.offloaded_rows is not None, (
            "keys and values are beyond the device"
        )
        runner.offloaded_rows.close()
        runner.offloaded_rows = PacedRows(
            split, runner.spec.n_layers, runner.streamer, PacedLink(flags.gbps)
        )
        params = [SamplingParams(_ROOM, temperature=flags.temperature, seed=i) for i in range(n)]
        texts = held_out_texts(n, context)
        sequences = [
            TokenSequence(text, one, longest) for text, one in zip(texts, params, strict=True)
        ]
        plain = NONE.open(DraftParts(DraftLimits(1, 1), cost, "", 0.0))
        engine.drafter = watched = Watched(engine.drafter)
        for one in sequences:
            engine.add(one)
        engine.step()
        turn(engine, sequences, watched, 2 * _TURN)  # until it has learned what is accepted
        watched.trees.clear()
        watched.seconds.clear()
        seconds = []
        n_new = 0
        for _ in range(flags.rounds):
            plain_s = turn(engine, sequences, plain, _PLAIN_TURN)
            n_before = sum(one.n_new for one in sequences)
            seconds.append((plain_s, turn(engine, sequences, watched, _TURN)))
            n_new += sum(one.n_new for one in sequences) - n_before
        nodes, levels, expected = np.array(watched.trees).mean(0)
        draft_s = np.array([0.0, cost.level(n) * (levels - 1)])
        forecast_s = cost.seconds(np.array([n, n * nodes]), context, draft_s, n)
        plain_turns, drafted_turns = map(tuple, zip(*seconds, strict=True))
    tokens_per_pass = n_new / len(watched.trees)
    forecast = float(forecast_s[0] / forecast_s[1] * expected)
    trees = tokens_per_pass, float(nodes), float(levels), mean(watched.seconds)
    return Outcome(case, plain_turns, drafted_turns, *trees, forecast)


def main() -> None:
    """Print a line for each case and one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument(
        "--gbps", type=float, default=1.0, help="of the link that keys and values come over"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--memory", default="2GB")
    flags = parser.parse_args()
    console = Console(width=120, highlight=False)
    found = []
    console.print(f"{machine()}\ncommit {commit()}")
    with tempfile.TemporaryDirectory() as folder:
        for name in flags.cases:
            one = measure(CASES[name], flags, Path(folder))
            found.append(asdict(one) | {"speedup": one.speedup, "bound": one.bound})
            console.print(
                f"{name}: {one.speedup:.2f} times plain, forecast {one.forecast:.2f}, bound"
                f" {one.bound:.2f}; {one.tokens_per_pass:.2f} tokens a pass of {one.nodes:.1f}"
                f" nodes in {one.levels:.1f} levels, drafted in {one.draft_s:.3f} s; seconds for a"
                f" token of each sequence: plain {Spread.of(one.plain_s)}, drafted"
                f" {Spread.of(one.drafted_s)}"
            )
    print_result("long_drafts", flags, found=found)


if __name__ == "__main__":
    main()
