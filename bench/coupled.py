"""Which rule gives more tokens per pass, at which temperature and size of tree?

    python -m bench.coupled [--nodes 64 192 768] [--temperatures 0.3 0.6 0.8 1.0 1.2] [--prompts 12]

Counted on the demonstration pair, whose passes give the same on any machine. The same held-out prompts are continued by every
method, prompt by prompt, so that differences are paired; the error is that of the mean difference to the method called first.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import mean, stdev

from transformers import AutoTokenizer

from bench.measure import commit, machine
from bench.methods import TARGET, Method
from bench.prompts import held_out_prompts
from bench.speculate import no_pair_stats
from offload_rt import SamplingParams

METHODS = (
    Method("coupled", "dynamic_tree", "coupled"),
    Method("coupled, Sequoia tree", "static_tree", "coupled"),
    Method("traversal", "static_tree", "traversal"),
    Method("sequoia", "static_tree", "sequoia"),
    Method("match", "dynamic_tree", "match"),
)


@dataclass(frozen=True)
class Compared:
    """Tokens per pass of a method, one figure a prompt, and its mean difference to the first method with that one's error."""

    nodes: int
    temperature: float
    method: str
    tokens_per_pass: tuple[float, ...]
    difference: float
    error: float

    @classmethod
    def of(cls, at: tuple[int, float], name: str, rates: Sequence[float], first: Sequence[float]) -> "Compared":
        """At a size and temperature."""
        differences = [rate - other for rate, other in zip(rates, first, strict=True)]
        error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
        return cls(*at, name, tuple(rates), mean(differences), error)

    def __str__(self) -> str:
        figures = f"{mean(self.tokens_per_pass):.2f}  {self.difference:+.2f} +- {self.error:.2f}"
        return f"{self.nodes:4} nodes, T={self.temperature}: {self.method:22} {figures}"


def compare(
    n_nodes: int, temperatures: Sequence[float], prompts: Sequence[list[int]], n_new: int, methods: Sequence[Method]
) -> list[Compared]:
    """Every method at one size of tree, in float32."""
    rates: dict[tuple[float, str], list[float]] = {}
    with ExitStack() as stack:
        llms = [(one.name, stack.enter_context(one.open(TARGET, n_nodes, "float32", "1GB", 512))) for one in methods]
        for i, prompt in enumerate(prompts):
            for temperature in temperatures:
                for name, llm in llms:
                    params = SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=i)
                    rate = llm.generate(prompt, params)[0].stats.tokens_per_pass
                    rates.setdefault((temperature, name), []).append(rate)
            so_far = {key: round(mean(one), 3) for key, one in rates.items()}
            print(f"{n_nodes} nodes, prompt {i + 1}", so_far, flush=True)
    first = methods[0].name
    return [Compared.of((n_nodes, t), name, one, rates[t, first]) for (t, name), one in rates.items()]


def main() -> None:
    """Print a line for each method, size and temperature, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[64, 192, 768])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.6, 0.8, 1.0, 1.2])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--methods", nargs="+", default=[one.name for one in METHODS], help="to be compared")
    flags = parser.parse_args()
    print(f"{machine()}\ncommit {commit()}")
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), flags.prompts)
    methods = [one for one in METHODS if one.name in flags.methods]
    found: list[Compared] = []
    for n_nodes in flags.nodes:
        with no_pair_stats():
            found += compare(n_nodes, flags.temperatures, prompts, flags.new_tokens, methods)
    for one in found:
        print(one)
    result = {"bench": "coupled", "machine": machine(), "commit": commit(), **vars(flags)}
    print(json.dumps({**result, "found": [asdict(one) for one in found]}))


if __name__ == "__main__":
    main()
