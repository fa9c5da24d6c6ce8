"""How much faster is a streamed model with a draft model?

    python -m bench.speculate [--size 2100MB] [--prompts 8]

The expanded demo target is streamed from the disk in a quarter of its size: whole generations with
the demo draft and nothing configured, plain passes after each. (`bench/systems.py` counts tokens
per pass of each way to draft.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.measure import (
    commit,
    drop_from_page_cache,
    expanded_model,
    flag_parser,
    machine,
    print_result,
)
from bench.methods import DRAFT, TARGET, no_pair_stats
from bench.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.config import parse_size
from offload_rt.llm import Stats

TEMPERATURES = (0.0, 0.6, 1.0)
# Prompts at each temperature before timing starts, from which statistics of the pair are learned.
_N_FIRST = 2


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
class Chosen:
    """Whole generations with nothing configured, after the first pass of each.

    faster_by_prompt  one figure a prompt
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
        """Of drafting, the pass and verification."""
        return self.step_s / self.tokens_per_pass

    @property
    def times_faster(self) -> float:
        """Than plain passes between the runs."""
        return self.plain_s / self.seconds_per_token


def chosen(size: str, prompts: list[list[int]], n_new: int) -> Iterator[Chosen]:
    """Time generation with automatic settings on the expanded model, plain passes after each
    prompt.
    """
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


def _summary(temperature: float, runs: Sequence[Stats], plain_s: float) -> Chosen:
    n_passes = np.array([run.n_passes - 1 for run in runs])
    tokens = n_passes @ np.array([run.measured_tokens_per_pass for run in runs])
    expected = n_passes @ np.array([run.predicted_tokens_per_pass for run in runs])
    seconds = n_passes @ np.array(
        [run.measured_seconds_per_token * run.measured_tokens_per_pass for run in runs]
    )
    predicted_s = n_passes @ np.array(
        [run.predicted_seconds_per_token * run.predicted_tokens_per_pass for run in runs]
    )
    return Chosen(
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
    parser = flag_parser(__doc__)
    parser.add_argument("--size", default="2100MB")
    parser.add_argument("--prompts", type=int, default=8, help="that are timed")
    parser.add_argument("--new-tokens", type=int, default=96)
    flags = parser.parse_args()
    console = Console(width=max(Console().width, 140))
    console.print(f"{machine()}\ncommit {commit()}")
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), flags.prompts + _N_FIRST)
    with no_pair_stats():
        timed = [*chosen(flags.size, prompts, flags.new_tokens)]
    console.print(_table(timed))
    print_result("speculate", flags, time=[_entry(one) for one in timed])


def _entry(one: Chosen) -> dict[str, object]:
    return {
        **asdict(one),
        "seconds_per_token": one.seconds_per_token,
        "times_faster": one.times_faster,
    }


def _table(timed: Sequence[Chosen]) -> Table:
    table = Table(
        title=(
            "streamed within a quarter of its size; link, compute, draft, verify: shares of the"
            " time"
        )
    )
    heads = ("T", "nodes", "tokens/pass", "step s", "step/plain", "s/token", "predicted", "x plain",
             "link", "compute", "draft", "verify")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right")
    for one in timed:
        shares = [f"{share:.1%}" for share in asdict(one.shares).values()]
        table.add_row(
            f"{one.temperature}", f"{one.nodes:.0f}", f"{one.tokens_per_pass:.2f}",
            f"{one.step_s:.3f}",
            f"{one.step_s / one.plain_s:.3f}", f"{one.seconds_per_token:.3f}",
            f"{one.predicted_seconds_per_token:.3f}",
            f"{one.times_faster:.2f}", *shares,
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
