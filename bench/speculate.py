"""How many tokens does a pass yield, by which trees and rules, and how much faster is a streamed model for it?

    python -m bench.speculate [--size 2100MB] [--prompts 12] [--timed-prompts 3]

The expanded model computes the same function as the small one, so tokens per pass are counted on the small one, where all
methods at equal size are compared on the same held-out prompts; seconds are measured on the expanded one, streamed from the
disk within a quarter of its size, plain passes interleaved.
"""

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import mean, median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench._measure import ROOT, commit, drop_from_page_cache, expanded_model, machine
from bench._prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.config import parse_size
from offload_rt.engine.loop import DraftLimits
from offload_rt.tree.topology import Topology

TARGET, DRAFT = str(ROOT / "models/demo-target"), str(ROOT / "models/demo-draft")
TEMPERATURES = (0.0, 0.6, 1.0)


def chain(n: int) -> Topology:
    """One candidate after the other."""
    return Topology.chain(n)


def k_ary(n: int, k: int = 3) -> Topology:
    """Every node has k children, level by level."""
    return Topology(np.array([-1, *((node - 1) // k for node in range(1, n))]))


def chains(n: int, length: int = 8) -> Topology:
    """As many chains of a length as there is room for, side by side, in level order: the trees of SpecInfer."""
    n_chains = (n - 1) // length
    first = np.arange(n_chains * length) - n_chains + 1
    return Topology(np.concatenate(([-1], np.maximum(first, 0))))


@dataclass(frozen=True)
class Method:
    """A way of decoding; `shape` makes a tree of a size where the drafter does not choose its own."""

    name: str
    drafter: str
    rule: str = "auto"
    shape: Callable[[int], Topology] | None = None


METHODS = (
    Method("n-gram", "ngram"),
    Method("chain", "static_tree", "sequoia", chain),
    Method("3-ary", "static_tree", "sequoia", k_ary),
    Method("SpecInfer chains", "static_tree", "specinfer", chains),
    Method("Sequoia", "static_tree", "sequoia"),
    Method("Sequoia tree + traversal", "static_tree", "traversal"),
    Method("dynamic", "dynamic_tree"),
    Method("hybrid + traversal", "hybrid_tree"),
)


@dataclass(frozen=True)
class Counted:
    """Tokens per pass of a method at a temperature, one figure a prompt."""

    method: str
    temperature: float
    tokens_per_pass: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the prompts."""
        return mean(self.tokens_per_pass)


def count(n_nodes: int, prompts: list[list[int]], n_new: int, names: Sequence[str]) -> Iterator[Counted]:
    """Tokens per pass of every method at equal size, in float32; greedy texts must equal plain decoding's."""
    plain = {}
    with LLM(TARGET, drafter="none", dtype="float32", device_memory="1GB", max_model_len=512) as llm:
        for i, prompt in enumerate(prompts):
            plain[i] = llm.generate(prompt, SamplingParams(max_new_tokens=n_new))[0].token_ids
    for method in (one for one in METHODS if one.name in names):
        pair = {} if method.drafter == "ngram" else {"draft_model": DRAFT}
        depth = n_nodes if method.shape is chain else 24
        with LLM(
            TARGET, **pair, drafter=method.drafter, rule=method.rule, dtype="float32", device_memory="1GB",
            max_model_len=512, tree_size=n_nodes, tree_depth=depth,
        ) as llm:  # fmt: skip
            # A fixed size, and the draft as good as free: the best tree, whatever the small model's passes cost.
            llm.engine.drafter.limits = DraftLimits(n_nodes, depth, fixed_size=True)
            llm.engine.pace.drafted = lambda n_passes, seconds: None
            llm.engine.pace.level_s = 0.0
            if method.shape is not None:
                llm.engine.drafter.fix_shape(method.shape(n_nodes))
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
        yield Counted("transformers, assisted", temperature, tuple(rates))


def paired_p(better: Counted, worse: Counted, n_flips: int = 20_000) -> float:
    """One-sided chance of so large a mean difference if signs were random (a paired permutation test)."""
    differences = np.array(better.tokens_per_pass) - np.array(worse.tokens_per_pass)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(n_flips, len(differences)))
    return float((np.abs(differences) * signs).mean(1).__ge__(differences.mean() - 1e-12).mean())


@dataclass(frozen=True)
class Timed:
    """Seconds on the expanded model at a temperature, medians over prompts."""

    temperature: float
    plain_s: float
    seconds_per_token: float
    predicted_s: float
    times_faster: float
    tokens_per_pass: float
    nodes: float
    levels: float
    pass_ratio: float
    link_busy: float
    draft: float
    verify: float


def timed(size: str, prompts: list[list[int]], n_new: int) -> Iterator[Timed]:
    """Time generation with automatic settings on the expanded model, plain passes between the prompts."""
    model = expanded_model(size)
    budget = parse_size(size) // 4
    with LLM(str(model), draft_model=DRAFT, device_memory=budget, max_model_len=256) as llm:
        for temperature in TEMPERATURES:
            drop_from_page_cache(model)
            # The first prompt is not counted: what is known of the pair at this temperature begins with it.
            runs, plain = [], []
            for i, prompt in enumerate(prompts):
                params = SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=i)
                stats = llm.generate(prompt, params)[0].stats
                if i > 0:
                    runs.append(stats)
                    plain += llm.time_plain(len(prompt), 3)
            plain_s = median(plain)
            passes = [stats.measured_seconds_per_token * stats.tokens_per_pass for stats in runs]
            yield Timed(
                temperature,
                plain_s,
                median(stats.measured_seconds_per_token for stats in runs),
                median(stats.predicted_seconds_per_token for stats in runs),
                median(plain_s / stats.measured_seconds_per_token for stats in runs),
                mean(stats.tokens_per_pass for stats in runs),
                mean(stats.nodes_per_tree for stats in runs),
                mean(stats.levels_per_tree for stats in runs),
                median(passes) / plain_s,
                mean(stats.link_busy for stats in runs),
                mean(stats.draft_seconds / stats.seconds for stats in runs),
                mean(stats.verify_seconds / stats.seconds for stats in runs),
            )


@contextmanager
def no_knowledge() -> Iterator[None]:
    """Nothing that earlier runs learned of the pair, and nothing kept of this one."""
    kept = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as empty:
        os.environ["XDG_CACHE_HOME"] = empty
        try:
            yield
        finally:
            del os.environ["XDG_CACHE_HOME"]
            if kept is not None:
                os.environ["XDG_CACHE_HOME"] = kept


def main() -> None:
    """Print the tables and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2100MB")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--timed-prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=64, help="of every tree where methods are compared at equal size")
    parser.add_argument("--methods", nargs="+", default=[method.name for method in METHODS], help="to be counted")
    parser.add_argument("--part", choices=("count", "time", "all"), default="all")
    flags = parser.parse_args()
    print(f"{machine()}\ncommit {commit()}", flush=True)
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), max(flags.prompts, flags.timed_prompts + 1))
    result: dict[str, object] = {"bench": "speculate", "machine": machine(), "commit": commit(), **vars(flags)}
    if flags.part != "time":
        with no_knowledge():
            result["count"] = _count(flags.nodes, prompts[: flags.prompts], flags.new_tokens, flags.methods)
    if flags.part != "count":
        result["time"] = _time(flags.size, prompts[: flags.timed_prompts + 1], flags.new_tokens)
    print(json.dumps(result))


def _count(n_nodes: int, prompts: list[list[int]], n_new: int, names: Sequence[str]) -> dict[str, object]:
    found: dict[tuple[str, float], Counted] = {}
    print(f"tokens per pass, trees of {n_nodes} nodes, {len(prompts)} held-out prompts, {n_new} new tokens", flush=True)
    for one in itertools.chain(count(n_nodes, prompts, n_new, names), assisted(prompts, n_new)):
        found[one.method, one.temperature] = one
        print(f"  {one.method:26} T={one.temperature}: {one.mean:.2f}", flush=True)
    pairs = [("Sequoia", "chain"), ("Sequoia", "SpecInfer chains"), ("Sequoia", "3-ary"), ("dynamic", "Sequoia"),
             ("Sequoia tree + traversal", "Sequoia"), ("hybrid + traversal", "Sequoia"),
             ("Sequoia", "transformers, assisted")]  # fmt: skip
    tests = []
    for better, worse in (pair for pair in pairs if {*pair} <= {name for name, _ in found}):
        for temperature in TEMPERATURES:
            a, b = found[better, temperature], found[worse, temperature]
            tests.append((better, worse, temperature, a.mean / b.mean, paired_p(a, b)))
            print(f"  {better} / {worse}, T={temperature}: {a.mean / b.mean:.3f}, p = {tests[-1][-1]:.4f}", flush=True)
    return {"tokens_per_pass": [asdict(one) for one in found.values()], "ratios": tests}


def _time(size: str, prompts: list[list[int]], n_new: int) -> list[dict[str, float]]:
    rows = []
    print(f"streamed, {size} within a quarter of it, trees chosen; shares of the time", flush=True)
    for one in timed(size, prompts, n_new):
        rows.append(asdict(one))
        print("  " + ", ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()), flush=True)
    return rows


if __name__ == "__main__":
    main()
