"""How much faster is a streamed model with a draft model?

    python -m bench.speculate [--size 2100MB] [--prompts 8]

Stream the expanded demo target in a quarter of its size. Generate with the demo draft and default
settings, with plain passes after each text. (`bench.speculate.systems` counts tokens per pass of
each drafter.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.common.checkpoints import (
    DRAFT,
    TARGET,
    drop_from_page_cache,
    expanded_model,
    no_pair_stats,
)
from bench.common.measure import Benchmark
from bench.common.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.config import parse_size
from offload_rt.llm import Stats

TEMPERATURES = (0.0, 0.6, 1.0)
# Prompts per temperature before the measurement, for statistics of the pair.
_N_FIRST = 2


@dataclass(frozen=True)
class Shares:
    """Shares of time: link busy, compute, drafting, verification."""

    link: float
    compute: float
    draft: float
    verify: float

    @classmethod
    def of(cls, runs: Sequence[Stats]) -> "Shares":
        """Return the shares of several runs together."""
        seconds = sum(run.seconds for run in runs)
        draft, verify, waited = (
            sum(getattr(run, name) for run in runs) / seconds
            for name in ("draft_seconds", "verify_seconds", "wait_seconds")
        )
        link = sum(run.link_busy * run.seconds for run in runs) / seconds
        return cls(link, 1 - draft - verify - waited, draft, verify)


@dataclass(frozen=True)
class Result:
    """Generations with default settings, without the first pass of each.

    faster_by_prompt  speedup of each prompt
    """

    temperature: float
    plain_s: float
    step_s: float
    tokens_per_pass: float
    shares: Shares
    predicted_seconds_per_token: float
    predicted_tokens_per_pass: float
    nodes: float
    levels: float
    faster_by_prompt: tuple[float, ...]

    @property
    def seconds_per_token(self) -> float:
        """Seconds of drafting, pass and verification per token."""
        return self.step_s / self.tokens_per_pass

    @property
    def times_faster(self) -> float:
        """Speedup over plain passes between the runs."""
        return self.plain_s / self.seconds_per_token


def measure(size: str, prompts: list[list[int]], n_new: int) -> Iterator[Result]:
    """Time generations on the expanded model, with plain passes after each prompt."""
    model = expanded_model(size)
    with LLM(
        str(model), draft_model=DRAFT, device_memory=parse_size(size) // 4, max_model_len=256
    ) as llm:
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


def _summary(temperature: float, runs: Sequence[Stats], plain_s: float) -> Result:
    n_passes = np.array([run.n_passes - 1 for run in runs])
    tokens = n_passes @ np.array([run.measured_tokens_per_pass for run in runs])
    expected = n_passes @ np.array([run.predicted_tokens_per_pass for run in runs])
    seconds = n_passes @ np.array(
        [run.measured_seconds_per_token * run.measured_tokens_per_pass for run in runs]
    )
    predicted_s = n_passes @ np.array(
        [run.predicted_seconds_per_token * run.predicted_tokens_per_pass for run in runs]
    )
    return Result(
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
    """Print the table."""
    bench = Benchmark("speculate", __doc__)
    bench.add("--size", default="2100MB")
    bench.add("--prompts", type=int, default=8, help="measured prompts")
    bench.add("--new-tokens", type=int, default=96)
    flags = bench.start()
    console = Console(width=max(Console().width, 140))
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), flags.prompts + _N_FIRST)
    with no_pair_stats():
        results = [*measure(flags.size, prompts, flags.new_tokens)]
    console.print(_table(results))
    bench.finish(time=[_entry(result) for result in results])


def _entry(result: Result) -> dict[str, object]:
    rates = {name: getattr(result, name) for name in ("seconds_per_token", "times_faster")}
    return asdict(result) | rates


def _table(results: Sequence[Result]) -> Table:
    table = Table(
        title=("streamed in a quarter of its size; link, compute, draft, verify: shares of time")
    )
    heads = ("T", "nodes", "tokens/pass", "step s", "step/plain", "s/token", "predicted", "x plain",
             "link", "compute", "draft", "verify")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right")
    for r in results:
        shares = [f"{share:.1%}" for share in asdict(r.shares).values()]
        table.add_row(
            f"{r.temperature}", f"{r.nodes:.0f}", f"{r.tokens_per_pass:.2f}", f"{r.step_s:.3f}",
            f"{r.step_s / r.plain_s:.3f}", f"{r.seconds_per_token:.3f}",
            f"{r.predicted_seconds_per_token:.3f}", f"{r.times_faster:.2f}", *shares,
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
