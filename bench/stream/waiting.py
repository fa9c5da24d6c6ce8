"""Should idle OpenMP threads spin or sleep, on quiet cores and next to busy processes?

    python -m bench.stream.waiting [--rounds 3] [--settings passive spin1000]

Each setting runs in a process, because its variables must precede the import of torch. Settings are
interleaved. Each process measures streamed and resident decoding next to 0, 1 and 2 counting
processes. These have separate sessions, as from a second terminal: with sched_autogroup, Linux
divides the cores between sessions first. The floor is a fair share: compute slowed by the share of
the cores, or the link if it takes longer. Runs with more than a tenth of the cores lost to foreign
processes are dropped, or starred if no calm run exists.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.common.checkpoints import DRAFT, TARGET, expanded_model
from bench.common.measure import Benchmark, Spread, interleaved
from bench.common.processes import family, run_json

_DEFAULT = "libgomp's default"
SETTINGS: dict[str, dict[str, str]] = {
    _DEFAULT: {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin1000": {"GOMP_SPINCOUNT": "1000"},
    "spin3000": {"GOMP_SPINCOUNT": "3000"},
    "spin10000": {"GOMP_SPINCOUNT": "10000"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
}
# Tokens of a generation by kind of work.
TOKENS = {"streamed, plain": 6, "streamed, drafted": 12, "resident, plain": 80}
N_BUSY = 0, 1, 2
_MAX_FOREIGN = 0.1


@dataclass(frozen=True)
class Run:
    """Seconds per token of a generation: total, link, compute.

    foreign  share of the cores used by foreign processes
    """

    work: str
    n_busy: int
    token_s: float
    link_s: float
    compute_s: float
    foreign: float


@dataclass(frozen=True)
class Row:
    """Seconds per token of a work next to busy processes: at a fair share, and by setting."""

    work: str
    n_busy: int
    fair_s: float
    settings: dict[str, Spread]
    starred: tuple[str, ...]


def runs(work: str, size: str) -> Iterator[Run]:
    """Generate next to each number of busy processes, after a warm-up."""
    from offload_rt import LLM, SamplingParams
    from offload_rt.config import EngineConfig, parse_size

    is_plain = "plain" in work
    is_resident = "resident" in work
    config = EngineConfig(
        TARGET if is_resident else str(expanded_model(size)),
        draft_model=None if is_plain else DRAFT,
        max_model_len=256,
        device_memory=1 << 30 if is_resident else parse_size(size) // 4,
        drafter="none" if is_plain else "auto",
    )
    params = SamplingParams(max_new_tokens=TOKENS[work])
    with LLM.from_config(config) as llm:
        llm.generate(["import os"], SamplingParams(max_new_tokens=4))
        for n_busy in N_BUSY:
            with busy(n_busy) as processes:
                before = _foreign_s(processes)
                started = time.perf_counter()
                stats = llm.generate(["import os"], params)[0].stats
                core_s = (time.perf_counter() - started) * (os.cpu_count() or 1)
                foreign = (_foreign_s(processes) - before) / core_s
            link_s = stats.link_busy * stats.seconds / stats.n_tokens
            compute_s = (stats.seconds - stats.wait_seconds) / stats.n_tokens
            yield Run(work, n_busy, stats.seconds_per_token, link_s, compute_s, foreign)


@contextmanager
def busy(n: int) -> Iterator[list[psutil.Process]]:
    """Start n counting processes; yield them and this process."""
    command = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        started = [
            stack.enter_context(family(subprocess.Popen(command, start_new_session=True)))
            for _ in range(n)
        ]
        time.sleep(0.3 if n else 0.0)
        yield [psutil.Process(), *(psutil.Process(process.pid) for process in started)]


def _foreign_s(processes: list[psutil.Process]) -> float:
    """Return the core seconds used by all further processes."""
    cores = psutil.cpu_times()
    busy_s = sum(sum(process.cpu_times()[:2]) for process in processes)
    return cores.user + cores.nice + cores.system - busy_s


def fair_slowdown(n_busy: int) -> float:
    """Return the slowdown of compute on all cores with a fair share per session or thread."""
    cores = os.cpu_count() or 1
    switch = Path("/proc/sys/kernel/sched_autogroup_enabled")
    has_groups = switch.exists() and switch.read_text(encoding="ascii").strip() == "1"
    n_shares = 1 if has_groups else cores
    return cores / max(cores - n_busy, cores * n_shares / (n_shares + n_busy))


def rows(by_setting: dict[str, list[Run]]) -> list[Row]:
    """Summarize each work and number of busy processes."""
    table = []
    for work in TOKENS:
        quiet = _calm(by_setting[_DEFAULT], work, 0)[0]
        for n_busy in N_BUSY:
            kept = {name: _calm(runs, work, n_busy) for name, runs in by_setting.items()}
            slowed = max(quiet.compute_s * fair_slowdown(n_busy), quiet.link_s)
            spreads = {
                name: Spread.of([run.token_s for run in runs]) for name, runs in kept.items()
            }
            starred = tuple(name for name, runs in kept.items() if runs[0].foreign > _MAX_FOREIGN)
            fair_s = slowed if n_busy else quiet.token_s
            table.append(Row(work, n_busy, fair_s, spreads, starred))
    return table


def _calm(runs: Sequence[Run], work: str, n_busy: int) -> list[Run]:
    """Return the undisturbed runs of a case by time, or the least disturbed run."""
    cases = [run for run in runs if (run.work, run.n_busy) == (work, n_busy)]
    calm = [run for run in cases if run.foreign <= _MAX_FOREIGN]
    return sorted(calm, key=lambda run: run.token_s) or [min(cases, key=lambda run: run.foreign)]


def print_table(table: Sequence[Row]) -> None:
    """Print milliseconds per token: medians, ranges, and ratios to the fair share."""
    names = list(table[0].settings)
    title = "milliseconds per token (range) [ratio to the fair share]"
    printed = Table("work", "busy", "fair", *names, title=title)
    for row in table:
        cells = []
        for name, s in row.settings.items():
            star = "*" if name in row.starred else ""
            range_ = f"{1e3 * s.least:.1f} to {1e3 * s.largest:.1f}"
            cells.append(f"{1e3 * s.median:.1f}{star} ({range_}) \\[{s.median / row.fair_s:.2f}]")
        printed.add_row(row.work, str(row.n_busy), f"{1e3 * row.fair_s:.1f}", *cells)
    Console(width=40 + 30 * len(names)).print(printed)


def run_setting(name: str, size: str) -> list[Run]:
    """Measure a setting in a process."""
    result = run_json(["-m", "bench.stream.waiting", "--measure", name, "--size", size]).result
    return [Run(**run) for run in result["runs"]]


def main() -> None:
    """Compare the settings, or measure a setting in this process."""
    bench = Benchmark("waiting", __doc__)
    bench.add("--rounds", type=int, default=3)
    defaults = ["passive", "spin1000", "spin3000", "1 thread"]
    bench.add("--settings", nargs="+", default=defaults, choices=SETTINGS, metavar="NAME")
    bench.add("--size", default="1600MB", help="of the streamed model; a quarter is its budget")
    bench.add("--measure", help="setting of this process")
    flags = bench.parse()
    if flags.measure:
        os.environ.update(SETTINGS[flags.measure])  # before the import of torch
        results = [asdict(run) for work in TOKENS for run in runs(work, flags.size)]
        return print(json.dumps({"runs": results}))
    bench.print_header()
    expanded_model(flags.size)
    works = {name: partial(run_setting, name, flags.size) for name in [_DEFAULT, *flags.settings]}
    results = interleaved(works, flags.rounds, warm_up=0)
    table = rows({name: [*chain.from_iterable(lists)] for name, lists in results.items()})
    print_table(table)
    bench.finish(rows=table)


if __name__ == "__main__":
    main()
