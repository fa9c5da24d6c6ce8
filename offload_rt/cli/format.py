"""Placement tables and the closing report of a run."""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from shutil import get_terminal_size
from statistics import median
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from offload_rt.config import EngineConfig
from offload_rt.sampling_params import SamplingParams
from offload_rt.system.progress import loading_bar
from offload_rt.tree.topology import Topology

if TYPE_CHECKING:  # A plan does not need them, and importing them lasts seconds.
    from offload_rt.executor.sequence import PassTimes
    from offload_rt.llm import LLM, Stats
    from offload_rt.system.trace import Trace

    # Passes with their numbers of tokens.
    Passes = Sequence[tuple[PassTimes, int]]

COLUMNS = 100


def load(llm: "LLM", console: Console, trace: "Trace", params: SamplingParams) -> dict[str, float]:
    """Load a model and print its notices. Returns the seconds of loading and measuring."""
    started = loaded = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal loaded
        loaded = time.perf_counter()
        bar(done, total)

    with loading_bar(console) as bar:
        llm.load(trace, progress)
    ended = time.perf_counter()
    left = params.left_to(llm.get_default_sampling_params())
    defaults = ", ".join(f"{name} {value}" for name, value in left.items())
    sampling = f"from generation_config.json: {defaults}" if defaults else ""
    for notice in filter(None, (llm.spec.notice, llm.engine.notice, sampling)):
        console.print(notice, highlight=False, soft_wrap=True)
    return {"load": loaded - started, "measure": ended - loaded}


def follows(config: EngineConfig) -> bool:
    """Worker loop for ranks > 0. Returns False on the first rank, which serves and prints."""
    from offload_rt.llm import LLM
    from offload_rt.system.ranks import is_first

    if is_first():
        return False
    with LLM.open(config) as llm:
        llm.load()
    return True


def columns() -> int:
    """Return the columns of the terminal, 100 without a terminal."""
    return get_terminal_size((COLUMNS, 1)).columns


def print_rows(
    heads: Iterable[object], rows: Iterable[Iterable[object]], title: str | None = None
) -> None:
    """Print a table, without lines unless it has a title. Texts of the first column wrap."""
    table = Table(title=title) if title else Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        if title is None and i == 0:
            table.add_column(str(head), overflow="fold")
        else:
            table.add_column(str(head), justify="right")
    for row in rows:
        table.add_row(*map(str, row))
    print_table(table)


def print_table(table: Table) -> None:
    """Print to stdout. Raises OSError for a closed pipe, where rich would exit."""
    console = Console(width=columns())
    with console.capture() as captured:
        console.print(table)
    print(captured.get(), end="", flush=True)


def format_speed(seconds_per_token: float) -> str:
    """Format a speed as tokens per second, with seconds per token above 1."""
    rate = 1 / seconds_per_token
    digits = 1 if rate >= 10 else 2 if rate >= 0.1 else 3
    slow = f" ({seconds_per_token:.2f} s per token)" if seconds_per_token > 1 else ""
    return f"{rate:.{digits}f} tokens/s{slow}"


def _decoding(passes: "Passes") -> "Passes":
    """Return the passes without prompt rows, if there are any."""
    return [entry for entry in passes if entry[0].predicted_s is not None] or passes


def plain_seconds(passes: "Passes") -> float | None:
    """Return the median seconds of a pass of one row beside passes with trees; None for few."""
    decoding = _decoding(passes)
    plain = [times.ended - times.started for times, _ in decoding if times.n_rows == 1]
    return median(plain) if 4 <= len(plain) < len(decoding) else None


def report(
    passes: "Passes",
    n_answers: int,
    baseline_s: float | None,
    phases: Mapping[str, float],
    is_verbose: bool = False,
) -> str:
    """Return the closing report: speed, tokens, seconds of the phases before the first pass."""
    decoding = _decoding(passes)
    decoding_s = sum(times.ended - times.started for times, _ in decoding)
    seconds_per_token = decoding_s / sum(n for _, n in decoding)
    plain_s = plain_seconds(passes) if baseline_s is None else baseline_s
    n_tokens = sum(n for _, n in passes)
    first, last = passes[0][0], passes[-1][0]
    answers = f" of {n_answers} answers" if n_answers > 1 else ""
    speed = format_speed(seconds_per_token)
    if plain_s is not None:
        speed += f", {plain_s / seconds_per_token:.1f} times plain decoding at {1 / plain_s:.3g}"
    lines = [
        speed,
        f"{n_tokens} tokens{answers} in {last.ended - first.started:.2f} s,"
        f" {n_tokens / len(passes):.2f} tokens per pass",
    ]
    if phases:
        start = {**phases, "first pass": first.computed - first.started}
        lines.append("start: " + ", ".join(f"{name} {s:.1f} s" for name, s in start.items()))
    if is_verbose and plain_s is not None:
        lines.append(f"a pass of plain decoding takes {plain_s:.3f} s")
    if is_verbose:
        link_s = sum(times.link_busy_s for times, _ in decoding)
        nbytes = sum(times.link_nbytes for times, _ in decoding)
        busy = link_s / decoding_s
        lines.append(
            f"{nbytes / len(decoding) / 1e9:.2g} GB per pass at {nbytes / link_s / 1e9:.2f}"
            f" GB/s, link busy {busy:.0%} of the time; at most"
            f" {format_speed(seconds_per_token * busy)} at this rate"
            if nbytes
            else "all weights resident: nothing crossed a link"
        )
    return "\n".join(lines)


def tree_line(stats: "Stats") -> str | None:
    """Describe the trees of an answer and the shares of its time; None without trees."""
    if stats.measured_seconds_per_token is None or stats.nodes_per_tree <= 1:
        return None
    return (
        f"trees of {stats.nodes_per_tree:.0f} nodes on {stats.levels_per_tree:.1f} levels;"
        f" {format_speed(stats.predicted_seconds_per_token or 0.0)} predicted; drafting"
        f" {stats.draft_seconds / stats.seconds:.0%} of the time, verifying"
        f" {stats.verify_seconds / stats.seconds:.0%}, waiting for weights"
        f" {stats.wait_seconds / stats.seconds:.0%}"
    )


def describe_tree(topology: Topology) -> str:
    """Summarize a tree: size, levels, and the number of children of each node per level.

    Families are sorted by parent and separated by `|`; `.` is a leaf. Long lines are cut.
    """
    n = len(topology)
    if topology.is_chain:
        return "1 node" if n == 1 else f"chain of {n} nodes"
    parent_of = topology.parents.__getitem__
    n_children = np.array([len(children) for children in topology.children])
    size = f"{n} nodes on {topology.n_levels} levels, up to {n_children.max()} children a node"
    lines = [size, "level nodes  children of each"]
    for level in range(topology.n_levels):
        nodes = np.flatnonzero(topology.depths == level)
        line = " | ".join(
            " ".join(str(n_children[node] or ".") for node in family)
            for _, family in groupby(sorted(nodes, key=parent_of), key=parent_of)
        )
        if not n_children[nodes].any():
            line = "leaves"
        lines.append(f"{level:5} {len(nodes):5}  {shorten(line, 96, placeholder=' ...')}")
    return "\n".join(lines)
