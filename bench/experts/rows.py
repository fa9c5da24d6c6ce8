"""How many rows should a pass of a mixture have, and does the automatic choice find the number?

    python -m bench.experts.rows --model DIR [--gbps 0 0.05 0.2] [--rows 1 2 4 8 16 32]

Decode with trees of a fixed size, and with the automatic size, of the demo draft model, and without
a draft model. DIR is a mixture of `scripts/train_mixture.py`; prompts are held-out text at
temperature 0, interleaved. With a rate, experts beyond the memory are read on demand over a paced
link. A draft model occupies memory, so fewer experts are cached. The floor of a run is the larger
of its link time (bytes / rate) and its time without waits for the link.
"""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from bench.common.checkpoints import DRAFT, no_pair_stats
from bench.common.measure import Benchmark, Spread
from bench.common.pacing import open_paced
from bench.common.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig, parse_size

AUTOMATIC = 0
PLAIN = -1
# Prompts before the measurement: they fill the slots and teach the statistics of the pair.
_N_FIRST = 4


@dataclass(frozen=True)
class Run:
    """A generation.

    link_s     bytes on the link / its rate
    compute_s  duration without waits for the link
    """

    seconds: float
    link_s: float
    compute_s: float
    tokens_per_pass: float
    nodes: float
    token_ids: tuple[int, ...]

    def figures(self) -> dict[str, float]:
        """Return what is summarized per tree size; `over_floor` is the duration / the floor."""
        return {
            "tokens_per_second": len(self.token_ids) / self.seconds,
            "tokens_per_pass": self.tokens_per_pass,
            "nodes": self.nodes,
            "link_share": self.link_s / self.seconds,
            "over_floor": self.seconds / max(self.link_s, self.compute_s),
        }


def open_size(folder: Path, n_rows: int, memory: int, gbps: float) -> LLM:
    """Open the mixture with trees of `n_rows` nodes, or `PLAIN`; resident without a rate."""
    settings = {"device": "cpu", "max_model_len": 256, "device_memory": memory if gbps else None}
    if n_rows == PLAIN:
        settings["drafter"] = "none"
    else:
        settings |= {"draft_model": DRAFT, "tree_size": n_rows or None}
    llm = open_paced(EngineConfig(str(folder), **settings), gbps)
    assert not gbps or llm.spec.files.experts, "the plan loads experts on demand"
    return llm


def decode(llm: LLM, prompt: list[int], n_tokens: int, gbps: float) -> Run:
    """Generate with the prompt in the KV cache."""
    llm.generate(prompt, SamplingParams(max_new_tokens=1, temperature=0.0))
    params = SamplingParams(max_new_tokens=n_tokens, temperature=0.0)
    output = llm.generate(prompt, params)[0]
    stats = output.stats
    return Run(
        stats.seconds,
        stats.link_bytes / gbps / 1e9 if gbps else 0.0,
        stats.seconds - stats.wait_seconds,
        stats.tokens_per_pass,
        stats.nodes_per_tree,
        tuple(output.token_ids),
    )


def measure(flags: argparse.Namespace, gbps: float) -> dict[str, object]:
    """Measure all sizes at a rate of the link, or resident at 0."""
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(flags.model), flags.prompts + _N_FIRST)
    sizes = [PLAIN, *flags.rows, AUTOMATIC]
    runs: dict[int, list[Run]] = {size: [] for size in sizes}
    with ExitStack() as stack, no_pair_stats():
        llms = {
            size: stack.enter_context(open_size(flags.model, size, flags.memory, gbps))
            for size in sizes
        }
        plan = llms[AUTOMATIC].plan
        title = "resident"
        if gbps:
            kept = f"{plan.n_expert_slots} of {plan.experts.n_blocks} experts cached"
            title = f"link of {gbps} GB/s, {kept}, plain {llms[PLAIN].plan.n_expert_slots}"
        print(f"\n## {title}", flush=True)
        for i, prompt in enumerate(prompts):
            order = sizes[i % len(sizes) :] + sizes[: i % len(sizes)]
            texts = set()
            for size in order:
                run = decode(llms[size], prompt, flags.tokens, gbps)
                texts.add(run.token_ids)
                if i >= _N_FIRST:
                    runs[size].append(run)
            assert len(texts) == 1, "the tree size changes no token"
    return summary(runs)


def summary(runs: Mapping[int, Sequence[Run]]) -> dict[str, object]:
    """Print a line per size; compare the automatic size with the best fixed size, by prompt."""
    results: dict[str, object] = {}
    rates: dict[int, list[float]] = {}
    for size, measured in runs.items():
        figures = [run.figures() for run in measured]
        spreads = {name: Spread.of([each[name] for each in figures]) for name in figures[0]}
        name = {AUTOMATIC: "automatic", PLAIN: "no draft"}.get(size, f"{size} rows")
        rates[size] = [each["tokens_per_second"] for each in figures]
        per_pass, nodes, link_share = list(spreads.values())[1:4]
        print(
            f"{name:10} {spreads['tokens_per_second']} tokens/s, {per_pass.median:.2f} a pass,"
            f" {nodes.median:.1f} rows, link {link_share.median:.0%}, time / floor"
            f" {spreads['over_floor']}",
            flush=True,
        )
        results[name] = spreads
    totals = {size: sum(run.seconds for run in measured) for size, measured in runs.items()}
    best = min(totals.keys() - {AUTOMATIC, PLAIN}, key=totals.__getitem__)
    ratio = Spread.of_ratios(rates[AUTOMATIC], rates[best])
    overall = totals[best] / totals[AUTOMATIC]
    plain = totals[PLAIN] / totals[AUTOMATIC]
    print(f"automatic / {best} rows: {overall:.3f} in all, by prompt {ratio}; / plain: {plain:.3f}")
    ratios = {"automatic_over_best": overall, "automatic_over_plain": plain, "by_prompt": ratio}
    return results | {"best": best} | ratios


def main() -> None:
    """Measure at each rate."""
    bench = Benchmark("expert_rows", __doc__)
    bench.add("--model", type=Path, required=True, help="a mixture of scripts/train_mixture.py")
    bench.add("--gbps", type=float, nargs="+", default=[0.0, 0.05, 0.2], help="0: resident")
    bench.add("--memory", type=parse_size, default=parse_size("18MB"), help="budget with a link")
    bench.add("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    bench.add("--prompts", type=int, default=8)
    bench.add("--tokens", type=int, default=48)
    flags = bench.start()
    bench.finish(**{f"{gbps} GB/s": measure(flags, gbps) for gbps in flags.gbps})


if __name__ == "__main__":
    main()
