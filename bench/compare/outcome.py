"""From the runs of the peers to the rows of the table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.common.measure import Spread
from bench.common.processes import run_json
from bench.compare import contract
from bench.compare.contract import Job, Report
from offload_rt.config import format_size

REFERENCE = "transformers_resident"
_SOURCES = {"disk": "disk", "host": "CPU memory", "memory": "memory"}


@dataclass(frozen=True)
class Run:
    """One process of one peer, with one prompt; peak resident memory in bytes."""

    report: Report
    peak_rss: int

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens."""
        return self.report.answers[0].token_ids

    @property
    def arrivals(self) -> list[tuple[float, int]]:
        """(seconds, tokens by then) after each pass."""
        return self.report.answers[0].arrivals

    @property
    def seconds_per_token(self) -> float:
        """Of the tokens after the first pass, which is the prompt's; of all tokens if there was one
        pass.
        """
        (first_s, first_n), (last_s, last_n) = self.arrivals[0], self.arrivals[-1]
        return (last_s - first_s) / (last_n - first_n) if last_n > first_n else last_s / last_n

    @property
    def prompt_s(self) -> float:
        """Seconds until the first token, the whole prompt's pass included."""
        return self.arrivals[0][0]

    @property
    def tokens_per_pass(self) -> float:
        """After the first pass; of the first if there was one."""
        first_n = self.arrivals[0][1]
        last_n = self.arrivals[-1][1]
        return (last_n - first_n) / (len(self.arrivals) - 1) if last_n > first_n else last_n


def run_peer(
    name: str, job: Job, prompts: list[list[int]], warm_up: list[int], n_tokens: int,
    timeout_s: float = math.inf,
    cgroup: Path | None = None,
) -> Run:  # fmt: skip
    """Run one peer in a new process, in a control group if given. Raises RuntimeError with its last
    words if it fails.
    """
    flags = _flags({"prompts": prompts, "warm-up": warm_up, "tokens": n_tokens})
    command = ["-m", "bench.compare.peers", name, "--job", job.text(), *flags]
    done = run_json(command, timeout_s, cgroup)
    report = Report.of(done.result)
    return Run(report, max(done.peak_rss, report.child_bytes))


def _flags(values: Mapping[str, object]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", json.dumps(value))]


@dataclass(frozen=True)
class Parting:
    """A prompt and the token, counted from 0, at which an answer leaves the reference's.

    margin  distance of the best two logits in float32; None if it was not measured
    """

    prompt: int
    token: int
    margin: float | None = None

    def __str__(self) -> str:
        place = f"token {self.token + 1} of prompt {self.prompt + 1}"
        if self.margin is None:
            return place
        return f"{place} ({self.margin:.3f} between the best two logits)"


@dataclass(frozen=True)
class Row:
    """The figures of a peer.

    reason      why there are no figures; all else but the title is None then
    source      where the weights come from in each pass, as `Supply` has it
    floor_s     seconds per token if moving them, at the best rate of the run, were all there is
    read_bytes  from storage for each token, the prompt's pass included
    parted      where its tokens leave the reference's; empty where they never do
    """

    name: str
    title: str
    reason: str | None = None
    source: str | None = None
    seconds_per_token: Spread | None = None
    floor_s: float | None = None
    first_token_s: Spread | None = None
    tokens_per_pass: float | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None
    read_bytes: float | None = None
    load_s: float | None = None
    parted: tuple[Parting, ...] | None = None
    versions: dict[str, str] | None = None

    @property
    def drafts(self) -> bool:
        """Whether it drafts tokens: only such systems are compared with one another."""
        return contract.find(self.name).drafts

    def entry(self) -> dict[str, object]:
        """For the JSON line."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Row":
        """Convert the output of `entry`."""
        spreads: dict[str, Any] = {
            name: Spread(**entry[name])
            for name in ("seconds_per_token", "first_token_s")
            if name in entry
        }
        if "parted" in entry:
            spreads["parted"] = tuple(Parting(**fields) for fields in entry["parted"])
        return cls(**entry | spreads)


def rows(
    peers: Sequence[str],
    runs: Mapping[str, Sequence[Run]],
    reasons: Mapping[str, str],
    gbps: Mapping[str, Sequence[float]],
    reference: str = REFERENCE,
) -> list[Row]:
    """Return a row per peer, sorted: plain before drafting peers, then by speed.

    Peers without figures are last.

    reference  peer whose tokens all peers are compared with
    """
    expected = [run.token_ids for run in runs.get(reference, ())]
    compared = [
        Row(name, contract.find(name).title, reason=reasons[name])
        if name in reasons
        else _row(name, runs[name], gbps, expected)
        for name in peers
    ]
    return sorted(compared, key=lambda row: (row.reason is not None, row.drafts, _median(row)))


def _median(row: Row) -> float:
    return row.seconds_per_token.median if row.seconds_per_token else math.inf


def _row(
    name: str, runs: Sequence[Run], gbps: Mapping[str, Sequence[float]], reference: list[list[int]]
) -> Row:
    supply = runs[0].report.supply
    per_pass = mean(run.tokens_per_pass for run in runs)
    # none where all layers fit into the budget, and nothing moves
    best_gbps = max(gbps[supply.source])
    n_tokens = sum(len(run.token_ids) for run in runs)
    return Row(
        name,
        contract.find(name).title,
        source=supply.source,
        seconds_per_token=Spread.of([run.seconds_per_token for run in runs]),
        # A disk's rate changes from round to round; at its best rate, no round's figure is below
        # the floor.
        floor_s=supply.pass_bytes / (best_gbps * 1e9) / per_pass if best_gbps else 0.0,
        first_token_s=Spread.of([run.prompt_s for run in runs]),
        tokens_per_pass=per_pass,
        peak_bytes=max(run.peak_rss for run in runs),
        device_bytes=max(run.report.device_bytes for run in runs),
        read_bytes=sum(sum(run.report.read_bytes) for run in runs) / n_tokens,
        load_s=median(run.report.load_s for run in runs),
        parted=tuple(
            Parting(i, at)
            for i, (run, ids) in enumerate(zip(runs, reference, strict=False))
            if (at := parting(run.token_ids, ids)) is not None
        ),
        versions=runs[0].report.versions,
    )


def with_margins(
    rows: Sequence[Row], model: Path, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[Row]:
    """Add the distance of the best two logits to each place where tokens differ.

    answers  tokens of the reference
    """
    command = ["-m", "bench.compare.margins", "--model", str(model)]
    margins: dict[int, list[float]] = {}
    for i in {point.prompt for row in rows for point in row.parted or ()}:
        flags = _flags({"prompt": prompts[i], "tokens": answers[i]})
        margins[i] = run_json([*command, *flags]).result["margins"]

    def measured(point: Parting) -> Parting:
        at_each = margins[point.prompt]
        is_known = point.token < len(at_each)
        return replace(point, margin=at_each[point.token] if is_known else None)

    return [replace(row, parted=row.parted and tuple(map(measured, row.parted))) for row in rows]


def parting(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first index at which two answers differ; None for equal answers."""
    if list(a) == list(b):
        return None
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


HEADS = (
    "system", "weights from", "s/token", "floor", "x floor", "first token s", "tokens/pass",
    "peak memory", "read/token", "same tokens",
)  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a Markdown table."""
    cells = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells if len(line) > i) for i in range(len(HEADS))]
    widths[1] = max(len(line[1]) for line in cells if len(line) == len(HEADS))
    padded = [map(str.ljust, line, widths) for line in cells]
    head, *lines = (f"| {' | '.join(line)} |" for line in padded)
    return "\n".join([head, f"|{'|'.join('-' * (width + 2) for width in widths)}|", *lines])


def _cells(row: Row) -> tuple[str, ...]:
    if row.reason is not None:
        return (row.title, f"did not run: {row.reason}")
    seconds = row.seconds_per_token
    return (
        row.title,
        _SOURCES[row.source],
        f"{seconds.median:.3f} ({seconds.least:.3f} to {seconds.largest:.3f})",
        f"{row.floor_s:.3f}",
        f"{seconds.median / row.floor_s:.2f}" if row.floor_s else "-",
        f"{row.first_token_s.median:.2f}",
        f"{row.tokens_per_pass:.2f}",
        format_size(row.peak_bytes + row.device_bytes),
        format_size(row.read_bytes),
        f"parts at {', '.join(map(str, row.parted))}" if row.parted else "yes",
    )
