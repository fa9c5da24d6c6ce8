"""How should the threads of a product wait for each other: spinning or asleep, on quiet cores and
beside busy processes?

    python -m bench.waiting [--rounds 3] [--settings passive,spin1000]

Each setting is a process of its own, with its variables set before torch loads; settings take
turns, and each does all the work beside 0, 1 and 2 processes that only count. A busy process has a
session of its own, as one of another terminal has: Linux shares the cores between sessions first
where sched_autogroup is on. Beside the milliseconds of a token stand those that a fair share of the
cores explains: computing at that share, or the link's if they are more, as on quiet cores by
default. Runs in which other processes took over a tenth of the cores are left out, or starred where
there are no others. The last line is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.measure import (
    Spread,
    commit,
    expanded_model,
    family,
    flag_parser,
    machine,
    print_result,
    run_json,
)

_DEFAULT = "libgomp's default"
SETTINGS: dict[str, dict[str, str]] = {
    _DEFAULT: {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin1000": {"GOMP_SPINCOUNT": "1000"},
    "spin3000": {"GOMP_SPINCOUNT": "3000"},
    "spin10000": {"GOMP_SPINCOUNT": "10000"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
}
# of a generation, by kind of work
TOKENS = {"streamed, plain": 6, "streamed, drafted": 12, "resident, plain": 80}
N_BUSY = 0, 1, 2
_OTHERS = 0.1


@dataclass(frozen=True)
class Run:
    """One generation: seconds of a token, of its layers over the link and of its computing.

    others  share of the cores that other processes took
    """

    work: str
    n_busy: int
    token_s: float
    link_s: float
    compute_s: float
    others: float


@dataclass(frozen=True)
class Row:
    """One kind of work beside so many busy processes: seconds of a token at a fair share, and by
    setting.
    """

    work: str
    n_busy: int
    fair_s: float
    settings: dict[str, Spread]
    starred: tuple[str, ...]


def runs(work: str, size: str) -> Iterator[Run]:
    """A generation beside each number of busy processes, after one that warms up."""
    from bench.methods import DRAFT, TARGET
    from offload_rt import LLM, SamplingParams
    from offload_rt.config import EngineConfig, parse_size

    plain = "plain" in work
    resident = "resident" in work
    config = EngineConfig(
        TARGET if resident else str(expanded_model(size)), draft_model=None if plain else DRAFT,
        max_model_len=256,
        device_memory=1 << 30 if resident else parse_size(size) // 4,
        drafter="none" if plain else "auto",
    )  # fmt: skip
    with LLM.from_config(config) as llm:
        llm.generate(["import os"], SamplingParams(max_new_tokens=4))
        for n_busy in N_BUSY:
            with busy(n_busy) as processes:
                before = _others_s(processes)
                started = time.perf_counter()
                stats = llm.generate(["import os"], SamplingParams(max_new_tokens=TOKENS[work]))[
                    0
                ].stats
                others = (
                    (_others_s(processes) - before)
                    / (time.perf_counter() - started)
                    / (os.cpu_count() or 1)
                )
            link_s = stats.link_busy * stats.seconds / stats.n_tokens
            compute_s = (stats.seconds - stats.wait_seconds) / stats.n_tokens
            yield Run(work, n_busy, stats.seconds_per_token, link_s, compute_s, others)


@contextmanager
def busy(n: int) -> Iterator[list[psutil.Process]]:
    """So many processes that count and do nothing else; gives them and this one."""
    with ExitStack() as stack:
        command = [sys.executable, "-c", "while True: pass"]
        started = [
            stack.enter_context(family(subprocess.Popen(command, start_new_session=True)))
            for _ in range(n)
        ]
        time.sleep(0.3 if n else 0.0)
        yield [psutil.Process(), *(psutil.Process(one.pid) for one in started)]


def _others_s(ours: list[psutil.Process]) -> float:
    """Seconds that the cores have worked for other processes than these."""
    cores = psutil.cpu_times()
    return cores.user + cores.nice + cores.system - sum(sum(one.cpu_times()[:2]) for one in ours)


def fair_slowdown(n_busy: int) -> float:
    """How many times longer computing on all cores takes with the share that is fair, to sessions
    or else to threads.
    """
    cores = os.cpu_count() or 1
    switch = Path("/proc/sys/kernel/sched_autogroup_enabled")
    ours = 1 if switch.exists() and switch.read_text(encoding="ascii").strip() == "1" else cores
    return cores / max(cores - n_busy, cores * ours / (ours + n_busy))


def rows(found: dict[str, list[Run]]) -> list[Row]:
    """What was measured, for each work and number of busy processes."""
    table = []
    for work in TOKENS:
        quiet = _calm(found[_DEFAULT], work, 0)
        base = quiet[len(quiet) // 2]
        for n_busy in N_BUSY:
            kept = {name: _calm(those, work, n_busy) for name, those in found.items()}
            fair_s = (
                max(base.compute_s * fair_slowdown(n_busy), base.link_s) if n_busy else base.token_s
            )
            spreads = {
                name: Spread.of([one.token_s for one in those]) for name, those in kept.items()
            }
            starred = tuple(name for name, those in kept.items() if those[0].others > _OTHERS)
            table.append(Row(work, n_busy, fair_s, spreads, starred))
    return table


def _calm(those: Sequence[Run], work: str, n_busy: int) -> list[Run]:
    """The runs of a case that nobody disturbed, else the least disturbed one, by their seconds."""
    these = sorted(
        (one for one in those if (one.work, one.n_busy) == (work, n_busy)),
        key=lambda one: one.token_s,
    )
    return [one for one in these if one.others <= _OTHERS] or sorted(
        these, key=lambda one: one.others
    )[:1]


def print_table(table: Sequence[Row]) -> None:
    """Milliseconds of a token, medians with their range, and in brackets how many times a fair
    share's.
    """
    names = list(table[0].settings)
    printed = Table(
        "work",
        "busy",
        "fair",
        *names,
        title="milliseconds of a token (range) [times a fair share's]",
    )
    for row in table:
        cells = []
        for name, s in row.settings.items():
            star = "*" if name in row.starred else ""
            range_ = f"{1e3 * s.least:.1f} to {1e3 * s.largest:.1f}"
            cells.append(f"{1e3 * s.median:.1f}{star} ({range_}) \\[{s.median / row.fair_s:.2f}]")
        printed.add_row(row.work, str(row.n_busy), f"{1e3 * row.fair_s:.1f}", *cells)
    Console(width=40 + 30 * len(names)).print(printed)


def interleaved(names: Sequence[str], n_rounds: int, size: str) -> dict[str, list[Run]]:
    """The runs of each setting; settings take turns, every second round the other way round."""
    expanded_model(size)
    found: dict[str, list[Run]] = {name: [] for name in names}
    for i in range(n_rounds):
        for name in names[:: -1 if i % 2 else 1]:
            told = run_json(["-m", "bench.waiting", "--one", name, "--size", size]).result["runs"]
            found[name] += [Run(**one) for one in told]
            print(f"round {i + 1}: {name}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Print the table and one JSON line; with --one, measure here under that setting."""
    parser = flag_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--settings", default="passive,spin1000,spin3000,1 thread", help=f"of {', '.join(SETTINGS)}"
    )
    parser.add_argument(
        "--size", default="1600MB", help="of the streamed model, of which a quarter is its budget"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.one:
        os.environ.update(SETTINGS[flags.one])  # before torch is imported
        print(
            json.dumps({"runs": [asdict(one) for work in TOKENS for one in runs(work, flags.size)]})
        )
        return
    found = interleaved([_DEFAULT, *flags.settings.split(",")], flags.rounds, flags.size)
    table = rows(found)
    print(f"{machine()}; commit {commit()}")
    print_table(table)
    print_result("waiting", flags, rows=[asdict(row) for row in table])


if __name__ == "__main__":
    main()
