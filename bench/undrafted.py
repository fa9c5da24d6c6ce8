"""How many tokens does a pass give without a draft model?

    python -m bench.undrafted [--prompts 12] [--new-tokens 64]

Every way of drafting without a model continues the same held-out prompts with the demo target, in float32, with as many rows
as it is given, whatever they cost; for each prompt it begins with nothing learned. Tokens per pass are counted, not timed, so
other programs on the cores do no harm. Greedy texts are compared with plain decoding's. The last line is one JSON object.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.measure import Spread, commit, machine
from bench.methods import TARGET, Method
from bench.prompts import held_out_prompts
from bench.speculate import Counted, no_pair_stats, paired_p
from offload_rt import SamplingParams
from offload_rt.speculate.protocols import DraftParts
from offload_rt.speculate.select import drafter_type

TEMPERATURES = (0.0, 0.8)
# Drafters and rows of a pass; with 120 lookahead has the sizes of its authors, N = 5, W = 15, G = 15.
CASES = (
    ("none", 1), ("ngram", 64), ("ngram", 512), ("lookahead", 64), ("lookahead", 120), ("lookahead", 512),
    ("recycle", 64), ("recycle", 512),
)  # fmt: skip


@dataclass(frozen=True)
class Undrafted(Counted):
    """Tokens per pass, one per prompt, with up to `n_rows`; `rows` is the mean of those that were verified."""

    n_rows: int
    rows: float


def count(
    name: str, n_rows: int, prompts: Sequence[list[int]], n_new: int, plain: dict[int, list[int]]
) -> Iterator[Undrafted]:
    """Tokens per pass of a drafter at each temperature; `plain` takes the greedy texts of the first one counted."""
    with Method(name, name).open(TARGET, n_rows, "float32", "1GB", 512) as llm:
        engine = llm.engine
        parts = DraftParts(engine.drafter.limits, engine.cost.fixed(level_s=0.0), "without_replacement")
        for temperature in TEMPERATURES:
            runs = []
            for i, prompt in enumerate(prompts):
                engine.drafter = drafter_type(name).open(parts)
                params = SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=i)
                output = llm.generate(prompt, params)[0]
                if temperature == 0 and output.token_ids != plain.setdefault(i, output.token_ids):
                    raise RuntimeError(f"{name}, prompt {i}: the greedy text differs from plain decoding's")
                runs.append(output.stats)
            rates = tuple(run.tokens_per_pass for run in runs)
            rows = sum(run.nodes_per_tree for run in runs) / len(runs)
            yield Undrafted(name, temperature, rates, n_rows, rows)


def compare(found: Sequence[Undrafted]) -> list[tuple[str, str, float, float, float]]:
    """Of each drafter against each simpler one with as many rows: temperature, ratio of tokens per pass, p-value."""
    tests = []
    for worse, better in itertools.combinations(found, 2):
        if (worse.n_rows, worse.temperature) == (better.n_rows, better.temperature):
            ratio, names = better.mean / worse.mean, (f"{better.method}, {better.n_rows}", worse.method)
            tests.append((*names, better.temperature, ratio, paired_p(better, worse)))
    return tests


def table(found: Sequence[Undrafted]) -> Table:
    """A line for each drafter and number of rows."""
    lines = Table(
        title="tokens per pass without a draft model: mean (least, median, most of the prompts); rows verified"
    )
    for head in ("drafter", "rows", *(f"T = {temperature}" for temperature in TEMPERATURES)):
        lines.add_column(head)
    for (name, n_rows), group in itertools.groupby(found, lambda one: (one.method, one.n_rows)):
        cells = []
        for one in group:
            spread = Spread.of(one.tokens_per_pass)
            cells.append(
                f"{one.mean:.2f} ({spread.least:.2f}, {spread.median:.2f}, {spread.largest:.2f}); {one.rows:.0f}"
            )
        lines.add_row(name, str(n_rows), *cells)
    return lines


def main() -> None:
    """Print the table, the paired tests and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=64)
    flags = parser.parse_args()
    console = Console(width=max(Console().width, 120))
    console.print(f"{machine()}\ncommit {commit()}")
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), flags.prompts)
    found: list[Undrafted] = []
    plain: dict[int, list[int]] = {}
    with no_pair_stats():
        for name, n_rows in CASES:
            for one in count(name, n_rows, prompts, flags.new_tokens, plain):
                console.print(
                    f"{name}, {n_rows} rows, T={one.temperature}: {one.mean:.2f} tokens per pass", highlight=False
                )
                found.append(one)
    console.print(table(found))
    tests = compare(found)
    for better, worse, temperature, ratio, p in tests:
        console.print(f"{better} / {worse}, T={temperature}: {ratio:.3f}, p = {p:.4f}", highlight=False)
    result = {"bench": "undrafted", "machine": machine(), "commit": commit(), **vars(flags)}
    print(json.dumps(result | {"count": [asdict(one) for one in found], "ratios": tests}))


if __name__ == "__main__":
    main()
