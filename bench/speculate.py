"""How much faster is a streamed model with a draft model?

    python -m bench.speculate [--size 2100MB] [--prompts 12] [--timed-prompts 8]

Part "steps": seconds of a step of each method at equal size on the expanded model, streamed from the disk in a quarter of its
size; tokens per pass are counted on the small model, which computes the same function (`bench/systems.py` counts more of
them). Part "chosen": whole generations with nothing configured, plain passes interleaved.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.measure import commit, drop_from_page_cache, expanded_model, machine
from bench.methods import DRAFT, SYSTEMS, TARGET, Method, no_pair_stats
from bench.prompts import held_out_prompts
from bench.systems import Texts
from offload_rt import LLM, SamplingParams
from offload_rt.config import parse_size
from offload_rt.llm import Stats

TEMPERATURES = (0.0, 0.6, 1.0)
METHODS = ("one chain", "SpecInfer's chains", "static, sequoia", "static, traversal", "dynamic, match")
# Prompts at each temperature before timing starts, from which statistics of the pair are learned; passes timed of each method.
_N_FIRST, _N_STEPS = 2, 8


@dataclass(frozen=True)
class Shares:
    """Shares of the time of some runs: link busy, layers computed, drafting, verifying."""

    link: float
    compute: float
    draft: float
    verify: float

    @classmethod
    def of(cls, runs: Sequence[Stats]) -> "Shares":
        """Of all these runs together."""
        seconds = sum(run.seconds for run in runs)
        draft, verify, waited = (
            sum(getattr(run, name) for run in runs) / seconds
            for name in ("draft_seconds", "verify_seconds", "wait_seconds")
        )
        link = sum(run.link_busy * run.seconds for run in runs) / seconds
        return cls(link, 1 - draft - verify - waited, draft, verify)


@dataclass(frozen=True)
class Timed:
    """Steps on the expanded model, with the tokens per pass that were counted."""

    method: str
    temperature: float
    plain_s: float
    step_s: float
    tokens_per_pass: float
    shares: Shares

    @property
    def seconds_per_token(self) -> float:
        """Of drafting, the pass and verification."""
        return self.step_s / self.tokens_per_pass

    @property
    def times_faster(self) -> float:
        """Than plain passes between the runs."""
        return self.plain_s / self.seconds_per_token


def steps(size: str, texts: Texts, n_nodes: int, methods: Sequence[Method]) -> Iterator[Timed]:
    """A few steps of each method on the expanded model at equal size."""
    model, prompt = expanded_model(size), texts.prompts[0]
    for method in methods:
        rates = {one.temperature: one.mean for one in texts.count(method, n_nodes)}
        with method.open(str(model), n_nodes, "auto", parse_size(size) // 4, 256) as llm:
            for temperature in TEMPERATURES:
                n_new = math.ceil((_N_STEPS + 1) * rates[temperature])
                params = SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=0)
                run = llm.generate(prompt, params)[0].stats
                step_s = run.measured_seconds_per_token * run.measured_tokens_per_pass
                plain_s = median(llm.time_plain(len(prompt), 3))
                yield Timed(method.name, temperature, plain_s, step_s, rates[temperature], Shares.of([run]))


@dataclass(frozen=True)
class Chosen(Timed):
    """Whole generations with nothing configured, after the first pass of each.

    faster_by_prompt  one figure a prompt
    """

    predicted_seconds_per_token: float
    predicted_tokens_per_pass: float
    nodes: float
    levels: float
    faster_by_prompt: tuple[float, ...]


def chosen(size: str, prompts: list[list[int]], n_new: int) -> Iterator[Chosen]:
    """Time generation with automatic settings on the expanded model, plain passes after each prompt."""
    model = expanded_model(size)
    with LLM(str(model), draft_model=DRAFT, device_memory=parse_size(size) // 4, max_model_len=256) as llm:
        for temperature in TEMPERATURES:
            drop_from_page_cache(model)
            runs: list[Stats] = []
            plain: list[float] = []
            for i, prompt in enumerate(prompts):
                params = SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=i)
                stats = llm.generate(prompt, params)[0].stats
                if i >= _N_FIRST:
                    runs.append(stats)
                    plain += llm.time_plain(len(prompt), 3)
            yield _summary(temperature, runs, median(plain))


def _summary(temperature: float, runs: Sequence[Stats], plain_s: float) -> Chosen:
    n_passes = np.array([run.n_passes - 1 for run in runs])
    tokens = n_passes @ np.array([run.measured_tokens_per_pass for run in runs])
    expected = n_passes @ np.array([run.predicted_tokens_per_pass for run in runs])
    seconds = n_passes @ np.array([run.measured_seconds_per_token * run.measured_tokens_per_pass for run in runs])
    predicted_s = n_passes @ np.array([run.predicted_seconds_per_token * run.predicted_tokens_per_pass for run in runs])
    return Chosen(
        method="chosen",
        temperature=temperature,
        plain_s=plain_s,
        step_s=seconds / n_passes.sum(),
        tokens_per_pass=tokens / n_passes.sum(),
        shares=Shares.of(runs),
        predicted_seconds_per_token=predicted_s / expected,
        predicted_tokens_per_pass=expected / n_passes.sum(),
        nodes=mean(run.nodes_per_tree for run in runs),
        levels=mean(run.levels_per_tree for run in runs),
        faster_by_prompt=tuple(plain_s / run.measured_seconds_per_token for run in runs),
    )


def main() -> None:
    """Print the tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2100MB")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--timed-prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=64, help="of every tree where methods are compared at equal size")
    parser.add_argument(
        "--methods", nargs="+", default=METHODS, help="to be compared, by their names in bench/methods.py"
    )
    parser.add_argument("--parts", nargs="+", choices=("steps", "chosen"), default=["steps", "chosen"])
    flags = parser.parse_args()
    console = Console(width=max(Console().width, 140))
    console.print(f"{machine()}\ncommit {commit()}")
    n_prompts = max(flags.prompts, flags.timed_prompts + _N_FIRST)
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), n_prompts)
    methods = [method for method in SYSTEMS if method.name in flags.methods]
    result: dict[str, object] = {"bench": "speculate", "machine": machine(), "commit": commit(), **vars(flags)}
    with no_pair_stats():
        timed: list[Timed] = []
        if "steps" in flags.parts:
            texts = Texts(TARGET, prompts[: flags.prompts], flags.new_tokens, TEMPERATURES)
            timed += steps(flags.size, texts, flags.nodes, methods)
        if "chosen" in flags.parts:
            timed += chosen(flags.size, prompts[: flags.timed_prompts + _N_FIRST], flags.new_tokens)
        result["time"] = [_entry(one) for one in timed]
    if timed:
        console.print(_table(timed))
    print(json.dumps(result))


def _entry(one: Timed) -> dict[str, object]:
    return {**asdict(one), "seconds_per_token": one.seconds_per_token, "times_faster": one.times_faster}


def _table(timed: Sequence[Timed]) -> Table:
    table = Table(title="streamed within a quarter of its size; link, compute, draft, verify: shares of the time")
    heads = ("trees", "T", "tokens/pass", "step s", "step/plain", "s/token", "predicted", "x plain",
             "link", "compute", "draft", "verify")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head == "trees" else "right")
    for one in timed:
        predicted = f"{one.predicted_seconds_per_token:.3f}" if isinstance(one, Chosen) else ""
        name = f"{one.method}: {one.nodes:.0f} nodes" if isinstance(one, Chosen) else one.method
        shares = [f"{share:.1%}" for share in asdict(one.shares).values()]
        table.add_row(
            name, str(one.temperature), f"{one.tokens_per_pass:.2f}", f"{one.step_s:.3f}",
            f"{one.step_s / one.plain_s:.3f}", f"{one.seconds_per_token:.3f}", predicted, f"{one.times_faster:.2f}", *shares,
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
