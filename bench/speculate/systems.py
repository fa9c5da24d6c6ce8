"""How many tokens per pass does each published system accept with equally many rows?

    python -m bench.speculate.systems [--rows 64 512] [--temperatures 0 0.8] [--systems recycle]
    python -m bench.speculate.systems --long 4096 --prompts 6
    python -m bench.speculate.systems --table bench/results/systems.jsonl

Continue held-out prompts with the demonstration pair in float32, with trees of a fixed number of
rows. Counts are independent of time. Greedy texts must equal plain decoding. Drafters without a
model start every prompt untrained. With --long, the target is stretched to long texts, and drafters
see 512 tokens. The table shows means, with mean difference to the best of a column, prompt by
prompt, and its standard error. --table joins the JSON lines of a file.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.common.checkpoints import DRAFT, TARGET, no_pair_stats
from bench.common.measure import Benchmark
from bench.common.prompts import held_out_prompts
from bench.speculate.long_drafts import held_out_texts, stretched
from bench.speculate.methods import LONG, SYSTEMS, Method
from offload_rt import SamplingParams
from offload_rt.speculate.protocols import DraftParts
from offload_rt.speculate.select import drafter_type
from offload_rt.speculate.tree_drafter import TreeDrafter

ASSISTED = "transformers, assisted"
# Drafts are passes of the target with rounded weights; excluded from the best of a column.
COSTLY = "self"


@dataclass(frozen=True)
class Counted:
    """Tokens per pass of each prompt with trees of up to `n_rows`; `rows` is the verified mean."""

    system: str
    n_rows: int
    temperature: float
    tokens_per_pass: tuple[float, ...]
    rows: float

    @property
    def mean(self) -> float:
        """Mean over the prompts."""
        return mean(self.tokens_per_pass)

    def against(self, best: "Counted") -> str:
        """Format the mean and its difference to the best."""
        pairs = zip(self.tokens_per_pass, best.tokens_per_pass, strict=True)
        differences = [a - b for a, b in pairs]
        error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        if self is best:
            return f"**{self.mean:.2f}**"
        return f"{self.mean:.2f} ({mean(differences):+.2f} ± {error:.2f})"


@dataclass(frozen=True)
class Texts:
    """Prompts of a model, new tokens and temperatures.

    depth  levels of trees, see `Method.open`
    """

    model: str
    prompts: Sequence[list[int]]
    n_new: int
    temperatures: Sequence[float]
    depth: int | None

    @cached_property
    def longest(self) -> int:
        """Tokens of prompt and answer."""
        return max(map(len, self.prompts)) + self.n_new + 1

    @cached_property
    def plain(self) -> list[list[int]]:
        """Greedy continuations of plain decoding."""
        params = SamplingParams(max_new_tokens=self.n_new)
        with Method("none", "none").open(self.model, 1, "float32", "2GB", self.longest) as llm:
            return [llm.generate(prompt, params)[0].token_ids for prompt in self.prompts]

    def count(self, method: Method, n_rows: int) -> Iterator[Counted]:
        """Measure a method at each temperature."""
        runs: dict[float, list[tuple[float, float]]] = {}
        with method.open(self.model, n_rows, "float32", "2GB", self.longest, self.depth) as llm:
            engine = llm.engine
            cost = engine.cost.fixed(level_s=0.0)
            parts = DraftParts(engine.drafter.limits, cost, "without_replacement")
            for (i, prompt), temperature in product(enumerate(self.prompts), self.temperatures):
                if not isinstance(engine.drafter, TreeDrafter):
                    engine.drafter = drafter_type(method.drafter).open(parts)
                params = SamplingParams(max_new_tokens=self.n_new, temperature=temperature, seed=i)
                (output,) = llm.generate(prompt, params)
                if temperature == 0 and output.token_ids != self.plain[i]:
                    raise RuntimeError(f"{method.name}, prompt {i}: not plain decoding's text")
                figures = output.stats.tokens_per_pass, output.stats.nodes_per_tree
                runs.setdefault(temperature, []).append(figures)
        for temperature, run in runs.items():
            rates, rows = zip(*run, strict=True)
            yield Counted(method.name, n_rows, temperature, rates, mean(rows))

    def assisted(self, n_rows: int) -> Iterator[Counted]:
        """Measure transformers' assisted generation with its default chain lengths."""
        target, draft = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            for path in (self.model, DRAFT)
        )
        widths: list[int] = []
        target.get_input_embeddings().register_forward_pre_hook(
            lambda _, inputs: widths.append(inputs[0].shape[1])
        )
        for temperature in self.temperatures:
            rates = []
            rows = []
            for i, prompt in enumerate(self.prompts):
                torch.manual_seed(i)
                widths.clear()
                ids = torch.tensor([prompt])
                sampling = {"temperature": temperature, "top_k": 0} if temperature else {}
                out = target.generate(
                    ids, attention_mask=torch.ones_like(ids), assistant_model=draft,
                    max_new_tokens=self.n_new, pad_token_id=0,
                    do_sample=temperature > 0, **sampling,
                )  # fmt: skip
                rates.append((out.shape[1] - len(prompt)) / len(widths))
                rows.append(mean(widths[1:]))
            yield Counted(ASSISTED, n_rows, temperature, tuple(rates), mean(rows))


def table(counts: Sequence[Counted]) -> str:
    """Format a row per system, and a column per number of rows and temperature."""
    cells = {(count.system, (count.n_rows, count.temperature)): count for count in counts}
    columns = sorted({column for _, column in cells})
    best = {
        column: max(
            (count for count in counts if (count.n_rows, count.temperature) == column),
            key=lambda count: (count.system != COSTLY, count.mean),
        )
        for column in columns
    }
    heads = (f"{n_rows} rows, T = {temperature:g}" for n_rows, temperature in columns)
    lines = [["", *heads], ["---"] * (1 + len(columns))]
    for system in dict.fromkeys(count.system for count in counts):
        pairs = [(cells.get((system, column)), best[column]) for column in columns]
        lines.append([system, *(count.against(best) if count else "" for count, best in pairs)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(flags: argparse.Namespace) -> list[Counted]:
    """Measure the selected systems."""
    counts: list[Counted] = []
    with no_pair_stats(), tempfile.TemporaryDirectory() as folder:
        model = TARGET
        prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), flags.prompts)
        if flags.long:
            model = stretched(Path(folder) / "long", flags.long)
            prompts = held_out_texts(flags.prompts, flags.long)
        texts = Texts(model, prompts, flags.new_tokens, flags.temperatures, flags.depth)
        for n_rows, method in product(flags.rows, LONG if flags.long else SYSTEMS):
            if not flags.systems or method.name in flags.systems:
                counts += texts.count(method, n_rows)
                line = table(counts[-len(flags.temperatures) :]).splitlines()[-1]
                print(line, n_rows, flush=True)
        if not flags.long and (not flags.systems or ASSISTED in flags.systems):
            counts += texts.assisted(flags.rows[0])
    return counts


def main() -> None:
    """Print a table of new or of recorded counts."""
    bench = Benchmark("systems", __doc__)
    bench.add("--rows", type=int, nargs="+", default=[64, 512])
    bench.add("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    bench.add("--prompts", type=int, default=24)
    bench.add("--new-tokens", type=int, default=64)
    bench.add("--systems", nargs="+", help="names; default: all")
    bench.add("--depth", type=int, help="tree levels, the root included")
    bench.add("--long", type=int, default=0, help="tokens of long texts, seen in part by drafters")
    bench.add("--table", type=Path, help="join the lines of a file with equal prompts")
    flags = bench.parse()
    if flags.table:
        lines = [json.loads(line) for line in flags.table.read_text().splitlines()]
        keys = ("long", "prompts", "new_tokens", "depth")
        same = [line for line in lines if all(line.get(key) == getattr(flags, key) for key in keys)]
        counts = [Counted(**count) for line in same for count in line["found"]]
        columns = {*product(flags.rows, flags.temperatures)}
        print(table([count for count in counts if (count.n_rows, count.temperature) in columns]))
        return
    bench.print_header()
    counts = measured(flags)
    print(table(counts))
    bench.finish(found=counts)


if __name__ == "__main__":
    main()
