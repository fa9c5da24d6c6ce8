"""How much faster are long texts if the target drafts with a view of its cache?

    python -m bench.speculate.long_drafts [triforce] [self_window] [--gbps 1.0] [--rounds 6]

Continue held-out texts of 16,000 tokens (triforce: a single sequence) or 8,000 tokens (self_window:
a batch of eight) with the resident demo target in float32. Most keys and values cross a paced link
in each pass. Texts, passes and acceptance are real; the model was trained for 1,024 positions and
is stretched by YaRN.

Plain and drafted turns alternate on the same sequences. The forecast uses the final state of the
cost model. The bound assumes free drafting.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from bench.common.checkpoints import DRAFT, TARGET
from bench.common.measure import Benchmark, Spread
from bench.common.pacing import PacedLink, PacedRows
from bench.common.prompts import held_out_modules
from offload_rt import LLM, SamplingParams
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.engine.engine import Engine
from offload_rt.executor.sequence import Sequence as TokenSequence
from offload_rt.offload.offloaded_cache import HostMemory
from offload_rt.speculate.draft.none import DRAFTER as NONE
from offload_rt.speculate.protocols import DraftParts
from offload_rt.speculate.select import drafter_type
from offload_rt.tree.topology import DraftTree

# Minimum tokens per sequence of drafted and plain turns, and room for all turns.
_TURN = 12
_PLAIN_TURN = 6
_ROOM = 600
_TRAINED = 1024
# Capacity in sequences: off-device blocks are not shared, and the last block is half empty.
_N_MOST = 12


@dataclass(frozen=True)
class Case:
    """Drafter, tokens per text, sequences of the batch, rows visible to the drafter.

    kv_memory  device memory for transfers and at most a twentieth of the keys and values
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
    """Seconds per token of each turn and of drafting, trees, and the forecast speedup."""

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
        """Speedup of drafted turns."""
        return mean(self.plain_s) / mean(self.drafted_s)

    @property
    def bound(self) -> float:
        """Speedup with free drafting."""
        return mean(self.plain_s) / (mean(self.drafted_s) - self.draft_s / self.tokens_per_pass)


@dataclass
class Watched:
    """Drafter wrapper that records nodes, levels and expected tokens of trees, and seconds."""

    drafter: Any
    trees: list[tuple[int, int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, sequences: Sequence[TokenSequence], n_nodes: int) -> list[DraftTree]:
        """Propose trees and record them."""
        started = time.perf_counter()
        trees: list[DraftTree] = self.drafter.propose(sequences, n_nodes)
        self.seconds.append(time.perf_counter() - started)
        self.trees += [(len(t.topology), t.topology.n_levels, t.expected) for t in trees]
        return trees


def stretched(folder: Path, n_tokens: int) -> str:
    """Write the demo target in float32 with RoPE stretched to n tokens, and return its folder."""
    shutil.copytree(TARGET, folder)
    weights = folder / "model.safetensors"
    save_file({name: tensor.float() for name, tensor in load_file(weights).items()}, weights)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": _TRAINED}
    config["rope_parameters"] |= yarn | {"factor": n_tokens / _TRAINED}
    config["max_position_embeddings"] = _N_MOST * (n_tokens + _ROOM)
    path.write_text(json.dumps(config))
    return str(folder)


def held_out_texts(n: int, n_tokens: int) -> list[list[int]]:
    """Return n evenly spaced parts of the concatenated held-out modules."""
    tokens = AutoTokenizer.from_pretrained(TARGET)("".join(held_out_modules())).input_ids
    starts = [i * (len(tokens) - n_tokens) // n for i in range(n)]
    return [tokens[start : start + n_tokens] for start in starts]


def count_new(sequences: Sequence[TokenSequence]) -> int:
    """Return the number of generated tokens."""
    return sum(sequence.n_new for sequence in sequences)


def turn(engine: Engine, sequences: Sequence[TokenSequence], drafter: Any, n_tokens: int) -> float:
    """Run a turn of at least n tokens per sequence; return seconds per token of a sequence."""
    engine.drafter = drafter
    before = count_new(sequences)
    started = time.perf_counter()
    while (n_new := count_new(sequences) - before) < n_tokens * len(sequences):
        engine.step()
    return (time.perf_counter() - started) * len(sequences) / n_new


def measure(case: Case, flags: argparse.Namespace, folder: Path) -> Outcome:
    """Prefill the prompts, then alternate plain and drafted turns."""
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
        cost = engine.cost
        runner = engine.runner
        split = llm.plan.split
        memory = runner.memory
        assert split and isinstance(memory, HostMemory), "keys and values are beyond the device"
        store = PacedRows(split, runner.spec.n_layers, runner.streamer, PacedLink(flags.gbps))
        memory.store = engine.closes.enter_context(closing(store))
        params = [SamplingParams(_ROOM, temperature=flags.temperature, seed=i) for i in range(n)]
        texts = zip(held_out_texts(n, context), params, strict=True)
        sequences = [TokenSequence(text, sampling, longest) for text, sampling in texts]
        plain = NONE.open(DraftParts(DraftLimits(1, 1), cost, "", 0.0))
        engine.drafter = watched = Watched(engine.drafter)
        for sequence in sequences:
            engine.add(sequence)
        engine.step()
        turn(engine, sequences, watched, 2 * _TURN)  # learns acceptance
        watched.trees.clear()
        watched.seconds.clear()
        seconds = []
        n_new = 0
        for _ in range(flags.rounds):
            plain_s = turn(engine, sequences, plain, _PLAIN_TURN)
            n_before = count_new(sequences)
            seconds.append((plain_s, turn(engine, sequences, watched, _TURN)))
            n_new += count_new(sequences) - n_before
        nodes, levels, expected = np.array(watched.trees).mean(0)
        draft_s = np.array([0.0, cost.level(n) * (levels - 1)])
        forecast_s = cost.seconds(np.array([n, n * nodes]), context, draft_s, n)
        plain_turns, drafted_turns = map(tuple, zip(*seconds, strict=True))
    tokens_per_pass = n_new / len(watched.trees)
    forecast = float(forecast_s[0] / forecast_s[1] * expected)
    trees = tokens_per_pass, float(nodes), float(levels), mean(watched.seconds)
    return Outcome(case, plain_turns, drafted_turns, *trees, forecast)


def main() -> None:
    """Print a line for each case."""
    bench = Benchmark("long_drafts", __doc__)
    bench.add("cases", nargs="*", default=list(CASES))
    bench.add("--gbps", type=float, default=1.0, help="rate of the link of keys and values")
    bench.add("--rounds", type=int, default=6)
    bench.add("--temperature", type=float, default=0.0)
    bench.add("--memory", default="2GB")
    flags = bench.start()
    console = Console(width=120, highlight=False)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in flags.cases:
            r = measure(CASES[name], flags, Path(folder))
            results.append(asdict(r) | {"speedup": r.speedup, "bound": r.bound})
            console.print(
                f"{name}: {r.speedup:.2f} times plain, forecast {r.forecast:.2f}, bound"
                f" {r.bound:.2f}; {r.tokens_per_pass:.2f} tokens a pass of {r.nodes:.1f} nodes in"
                f" {r.levels:.1f} levels, drafted in {r.draft_s:.3f} s; seconds per token of each"
                f" sequence: plain {Spread.of(r.plain_s)}, drafted {Spread.of(r.drafted_s)}"
            )
    bench.finish(results=results)


if __name__ == "__main__":
    main()
