"""How many tokens does a pass give by each system of the field, with equally many rows?

    python -m bench.systems [--rows 64 512] [--temperatures 0 0.8] [--prompts 24] [--systems recycle
    "static, traversal"] python -m bench.systems --long 4096 --prompts 6 python -m bench.systems
    --table bench/results/systems.jsonl

The same held-out prompts are continued by the demonstration pair in float32, with trees of as many
rows as there may be, whatever they cost, so nothing hangs on the clock and other programs do no
harm. Greedy texts are compared with plain decoding's. What has no draft model begins every prompt
with nothing learned. With --long the target is stretched to texts of so many tokens, of which
drafters see 512. The table is one of means, each with its mean difference to the best of its
column, prompt by prompt, and that one's standard error. Runs print a JSON line each; --table joins
the lines of a file.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.long_drafts import held_out_texts, stretched
from bench.measure import commit, flag_parser, machine, print_result
from bench.methods import DRAFT, LONG, SYSTEMS, TARGET, Method, no_pair_stats
from bench.prompts import held_out_prompts
from offload_rt import SamplingParams
from offload_rt.speculate.protocols import DraftParts
from offload_rt.speculate.select import drafter_type
from offload_rt.speculate.tree_drafter import TreeDrafter

ASSISTED = "transformers, assisted"
# Its drafts are passes of the target by rounded weights, which no other is held against.
COSTLY = "self"


@dataclass(frozen=True)
class Counted:
    """Tokens per pass, one figure a prompt, with trees of up to `n_rows`; `rows` is the mean of
    those that were verified.
    """

    system: str
    n_rows: int
    temperature: float
    tokens_per_pass: tuple[float, ...]
    rows: float

    @property
    def mean(self) -> float:
        """Over the prompts."""
        return mean(self.tokens_per_pass)

    def against(self, best: "Counted") -> str:
        """The mean, and its difference to another one's."""
        pairs = zip(self.tokens_per_pass, best.tokens_per_pass, strict=True)
        differences = [one - other for one, other in pairs]
        error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        return (
            f"**{self.mean:.2f}**"
            if self is best
            else f"{self.mean:.2f} ({mean(differences):+.2f} ± {error:.2f})"
        )


@dataclass(frozen=True)
class Texts:
    """What is continued: prompts of a model, by so many tokens, at temperatures."""

    model: str
    prompts: Sequence[list[int]]
    n_new: int
    temperatures: Sequence[float]

    @cached_property
    def longest(self) -> int:
        """Tokens of prompt and answer."""
        return max(map(len, self.prompts)) + self.n_new + 1

    @cached_property
    def plain(self) -> list[list[int]]:
        """What plain decoding makes of each at temperature 0."""
        params = SamplingParams(max_new_tokens=self.n_new)
        with Method("none", "none").open(self.model, 1, "float32", "2GB", self.longest) as llm:
            return [llm.generate(prompt, params)[0].token_ids for prompt in self.prompts]

    def count(self, method: Method, n_rows: int) -> Iterator[Counted]:
        """By a method, at each temperature."""
        runs: dict[float, list[tuple[float, float]]] = {}
        with method.open(self.model, n_rows, "float32", "2GB", self.longest) as llm:
            engine = llm.engine
            parts = DraftParts(
                engine.drafter.limits, engine.cost.fixed(level_s=0.0), "without_replacement"
            )
            for i, prompt in enumerate(self.prompts):
                for temperature in self.temperatures:
                    if not isinstance(engine.drafter, TreeDrafter):
                        engine.drafter = drafter_type(method.drafter).open(parts)
                    params = SamplingParams(
                        max_new_tokens=self.n_new, temperature=temperature, seed=i
                    )
                    (output,) = llm.generate(prompt, params)
                    if temperature == 0 and output.token_ids != self.plain[i]:
                        raise RuntimeError(
                            f"{method.name}, prompt {i}: the greedy text differs from plain"
                            " decoding's"
                        )
                    runs.setdefault(temperature, []).append(
                        (output.stats.tokens_per_pass, output.stats.nodes_per_tree)
                    )
        for temperature, run in runs.items():
            rates, rows = zip(*run, strict=True)
            yield Counted(method.name, n_rows, temperature, rates, mean(rows))

    def assisted(self, n_rows: int) -> Iterator[Counted]:
        """By transformers' assisted generation, with chains as long as it chooses, whatever the
        rows.
        """
        target, draft = (
            AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)
            for one in (self.model, DRAFT)
        )
        widths: list[int] = []
        target.get_input_embeddings().register_forward_pre_hook(
            lambda _, given: widths.append(given[0].shape[1])
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


def table(found: Sequence[Counted]) -> str:
    """A line for each system, a column for each number of rows and temperature."""
    cells = {(one.system, (one.n_rows, one.temperature)): one for one in found}
    columns = sorted({column for _, column in cells})
    best = {
        column: max(
            (one for one in found if (one.n_rows, one.temperature) == column),
            key=lambda one: (one.system != COSTLY, one.mean),
        )
        for column in columns
    }
    lines = [
        ["", *(f"{n_rows} rows, T = {temperature:g}" for n_rows, temperature in columns)],
        ["---"] * (1 + len(columns)),
    ]
    for system in dict.fromkeys(one.system for one in found):
        of_system = [(cells.get((system, column)), best[column]) for column in columns]
        lines.append([system, *(one.against(other) if one else "" for one, other in of_system)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(flags: argparse.Namespace) -> list[Counted]:
    """Count what the flags ask for."""
    found: list[Counted] = []
    with no_pair_stats(), tempfile.TemporaryDirectory() as folder:
        model = TARGET
        prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), flags.prompts)
        if flags.long:
            model = stretched(Path(folder) / "long", flags.long)
            prompts = held_out_texts(flags.prompts, flags.long)
        texts = Texts(model, prompts, flags.new_tokens, flags.temperatures)
        for n_rows in flags.rows:
            for method in LONG if flags.long else SYSTEMS:
                if not flags.systems or method.name in flags.systems:
                    found += texts.count(method, n_rows)
                    print(
                        table(found[-len(flags.temperatures) :]).splitlines()[-1],
                        n_rows,
                        flush=True,
                    )
        if not flags.long and (not flags.systems or ASSISTED in flags.systems):
            found += texts.assisted(flags.rows[0])
    return found


def main() -> None:
    """Print a table and one JSON line, or the table of earlier lines."""
    parser = flag_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--systems", nargs="+", help="some of them, by name")
    parser.add_argument(
        "--long",
        type=int,
        default=0,
        help="tokens of the texts, for systems that draft by a part of a long text",
    )
    parser.add_argument(
        "--table",
        type=Path,
        help="of the lines in a file, with the same prompts each; nothing is measured",
    )
    flags = parser.parse_args()
    if flags.table:
        lines = [json.loads(line) for line in flags.table.read_text().splitlines()]
        same = [
            one
            for one in lines
            if all(one[name] == getattr(flags, name) for name in ("long", "prompts", "new_tokens"))
        ]
        found = [Counted(**one) for line in same for one in line["found"]]
        wanted = (flags.rows, flags.temperatures)
        print(
            table(
                [one for one in found if one.n_rows in wanted[0] and one.temperature in wanted[1]]
            )
        )
        return
    print(f"{machine()}\ncommit {commit()}")
    found = measured(flags)
    print(table(found))
    print_result("systems", flags, found=[asdict(one) for one in found])


if __name__ == "__main__":
    main()
