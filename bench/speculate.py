"""How many tokens does a pass give, by which trees and rules, and how much faster is a streamed model?

    python -m bench.speculate [--size 2100MB] [--prompts 12] [--timed-prompts 8]

Part "count": tokens per pass of all methods at equal size on the same held-out prompts, counted on the small model, which
computes the same function as the expanded one. Part "steps": seconds of a step of each method on the expanded model, streamed
from the disk in a quarter of its size. Part "chosen": whole generations with nothing configured, plain passes interleaved.
"""

import argparse
import itertools
import json
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import mean, median
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.measure import commit, drop_from_page_cache, expanded_model, machine
from bench.methods import DRAFT, METHODS, PAIRS, TARGET, Method
from bench.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.config import parse_size
from offload_rt.llm import Stats

TEMPERATURES = (0.0, 0.6, 1.0)
_ASSISTED = "transformers, assisted"
# Prompts at each temperature before timing starts, from which statistics of the pair are learned; passes timed of each method.
_N_FIRST, _N_STEPS = 2, 8


@dataclass(frozen=True)
class Counted:
    """Tokens per pass of a method at a temperature, one per prompt."""

    method: str
    temperature: float
    tokens_per_pass: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the prompts."""
        return mean(self.tokens_per_pass)


def count(n_nodes: int, prompts: list[list[int]], n_new: int, methods: Sequence[Method]) -> Iterator[Counted]:
    """Tokens per pass of every method at equal size, in float32; greedy texts must equal plain decoding's."""
    plain = {}
    with LLM(TARGET, drafter="none", dtype="float32", device_memory="1GB", max_model_len=512) as llm:
        for i, prompt in enumerate(prompts):
            plain[i] = llm.generate(prompt, SamplingParams(max_new_tokens=n_new))[0].token_ids
    for method in methods:
        with method.open(TARGET, n_nodes, "float32", "1GB", 512) as llm:
            for temperature in TEMPERATURES:
                yield Counted(method.name, temperature, tuple(_rates(llm, prompts, n_new, temperature, plain)))


def _rates(
    llm: LLM, prompts: list[list[int]], n_new: int, temperature: float, plain: dict[int, list[int]]
) -> Iterator[float]:
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=i)
        output = llm.generate(prompt, params)[0]
        if temperature == 0 and output.token_ids != plain[i]:
            raise RuntimeError(f"prompt {i}: the greedy text differs from plain decoding's")
        yield output.stats.tokens_per_pass


def assisted(prompts: list[list[int]], n_new: int) -> Iterator[Counted]:
    """Tokens per pass of transformers' assisted generation with the same pair."""
    target, draft = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (TARGET, DRAFT))
    passes = 0

    def one_more(*_: object) -> None:
        nonlocal passes
        passes += 1

    target.register_forward_hook(one_more)
    for temperature in TEMPERATURES:
        rates = []
        for i, prompt in enumerate(prompts):
            torch.manual_seed(i)
            passes, ids = 0, torch.tensor([prompt])
            sampling = (
                {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            )
            out = target.generate(
                ids, attention_mask=torch.ones_like(ids), assistant_model=draft, max_new_tokens=n_new, pad_token_id=0,
                **sampling,
            )  # fmt: skip
            rates.append((out.shape[1] - len(prompt)) / passes)
        yield Counted(_ASSISTED, temperature, tuple(rates))


def paired_p(better: Counted, worse: Counted, n_flips: int = 20_000) -> float:
    """One-sided p-value of a paired permutation test of the mean difference."""
    differences = np.array(better.tokens_per_pass) - np.array(worse.tokens_per_pass)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(n_flips, len(differences)))
    return float((np.abs(differences) * signs).mean(1).__ge__(differences.mean() - 1e-12).mean())


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


def steps(
    size: str, prompts: list[list[int]], n_nodes: int, counted: Sequence[Counted], methods: Sequence[Method]
) -> Iterator[Timed]:
    """A few steps of each method on the expanded model at equal size."""
    model = expanded_model(size)
    for method in methods:
        rates = {one.temperature: one.mean for one in counted if one.method == method.name}
        with method.open(str(model), n_nodes, "auto", parse_size(size) // 4, 256) as llm:
            for temperature in TEMPERATURES:
                n_new = math.ceil((_N_STEPS + 1) * rates[temperature])
                params = SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=0)
                run = llm.generate(prompts[0], params)[0].stats
                step_s = run.measured_seconds_per_token * run.measured_tokens_per_pass
                plain_s = median(llm.time_plain(len(prompts[0]), 3))
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


@contextmanager
def no_pair_stats() -> Iterator[None]:
    """With an empty cache folder: statistics of earlier runs are not used, those of this run are not kept."""
    with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, {"XDG_CACHE_HOME": empty}):
        yield


def main() -> None:
    """Print the tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2100MB")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--timed-prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=64, help="of every tree where methods are compared at equal size")
    parser.add_argument("--methods", nargs="+", default=[method.name for method in METHODS], help="to be compared")
    parser.add_argument(
        "--parts", nargs="+", choices=("count", "steps", "chosen"), default=["count", "steps", "chosen"]
    )
    flags = parser.parse_args()
    console = Console(width=max(Console().width, 140))
    console.print(f"{machine()}\ncommit {commit()}")
    n_prompts = max(flags.prompts, flags.timed_prompts + _N_FIRST)
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), n_prompts)
    methods = [method for method in METHODS if method.name in flags.methods]
    result: dict[str, object] = {"bench": "speculate", "machine": machine(), "commit": commit(), **vars(flags)}
    with no_pair_stats():
        if {"count", "steps"} & {*flags.parts}:
            counted = _printed(console, itertools.chain(
                count(flags.nodes, prompts[: flags.prompts], flags.new_tokens, methods),
                assisted(prompts[: flags.prompts], flags.new_tokens),
            ))  # fmt: skip
            result["count"] = [asdict(one) for one in counted]
            result["ratios"] = _compare(console, counted)
        timed: list[Timed] = []
        if "steps" in flags.parts:
            timed += steps(flags.size, prompts, flags.nodes, counted, methods)
        if "chosen" in flags.parts:
            timed += chosen(flags.size, prompts[: flags.timed_prompts + _N_FIRST], flags.new_tokens)
        result["time"] = [_entry(one) for one in timed]
    if timed:
        console.print(_table(timed))
    print(json.dumps(result))


def _printed(console: Console, counted: Iterator[Counted]) -> list[Counted]:
    found = []
    for one in counted:
        console.print(f"{one.method:26} T={one.temperature}: {one.mean:.2f} tokens per pass", highlight=False)
        found.append(one)
    return found


def _compare(console: Console, counted: Sequence[Counted]) -> list[tuple[str, str, float, float, float]]:
    """By pair and temperature, the ratio of tokens per pass and its p-value."""
    found = {(one.method, one.temperature): one for one in counted}
    tests = []
    for (better, worse), temperature in itertools.product(PAIRS, TEMPERATURES):
        a, b = found.get((better, temperature)), found.get((worse, temperature))
        if a is not None and b is not None:
            tests.append((better, worse, temperature, a.mean / b.mean, paired_p(a, b)))
            console.print(
                f"{better} / {worse}, T={temperature}: {a.mean / b.mean:.3f}, p = {tests[-1][-1]:.4f}", highlight=False
            )
    return tests


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
