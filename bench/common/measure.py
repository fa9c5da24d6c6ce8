"""Flags, header, interleaved measurements, spreads, and the JSON record of a benchmark."""

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
UNKNOWN = "unknown"
# Restrict torch, MKL and oneDNN to AVX2. The CPU library obeys the first variable.
AVX2_ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """Minimum, median and maximum of several measurements."""

    least: float
    median: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of at least one value."""
        return cls(min(values), median(values), max(values))

    @classmethod
    def of_ratios(cls, numerators: Sequence[float], denominators: Sequence[float]) -> "Spread":
        """Return the spread of ratios, pair by pair."""
        return cls.of([a / b for a, b in zip(numerators, denominators, strict=True)])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f} to {self.largest:.3f})"


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def interleaved(
    works: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 1
) -> dict[str, list[T]]:
    """Call each work once per round, every second round in reverse order.

    Returns the results by name, without those of `warm_up` additional rounds.
    """
    results: dict[str, list[T]] = {name: [] for name in works}
    for i in range(warm_up + rounds):
        for name in list(works)[:: -1 if i % 2 else 1]:
            result = works[name]()
            if i >= warm_up:
                results[name].append(result)
    return results


class Benchmark:
    """Flags, header and JSON line of a benchmark.

    name  of the record bench/results/<name>.jsonl
    text  docstring of the module; its first paragraph is the question
    """

    def __init__(self, name: str, text: str | None) -> None:
        self.flags = argparse.Namespace()
        self._name = name
        self._question = " ".join((text or "").split("\n\n")[0].split())
        self._parser = argparse.ArgumentParser(
            description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._parser.add_argument(
            "--record", action="store_true", help=f"append the JSON line to results/{name}.jsonl"
        )
        self.add = self._parser.add_argument

    def parse(self) -> argparse.Namespace:
        """Parse the flags without a header, for processes started by a benchmark."""
        self.flags = self._parser.parse_args()
        if self.flags.record and commit().endswith("-dirty"):
            self._parser.error("--record needs a commit of all changes outside of bench/results")
        return self.flags

    def start(self) -> argparse.Namespace:
        """Parse the flags and print question, machine and commit."""
        self.parse()
        self.print_header()
        return self.flags

    def print_header(self) -> None:
        """Print question, machine and commit."""
        print(f"{self._question}\n{machine()}; commit {commit()}", flush=True)

    def finish(self, **results: object) -> None:
        """Print the JSON line: machine, commit, flags, results. Append it with --record."""
        flags = {name: value for name, value in vars(self.flags).items() if name != "record"}
        head = {"bench": self._name, "machine": machine(), "commit": commit()}
        line = json.dumps({**head, **flags, **results}, default=_plain)
        print(line)
        if self.flags.record:
            with (RESULTS / f"{self._name}.jsonl").open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


def _plain(value: Any) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def machine() -> str:
    """Describe the machine: processor, cores, memory, system, torch."""
    import torch

    gib = psutil.virtual_memory().total / 2**30
    system = f"{platform.system()} {platform.release()}, torch {torch.__version__}"
    return f"{_processor()}, {os.cpu_count()} cores, {gib:.0f} GiB, {system}"


def commit() -> str:
    """Return OFFLOAD_RT_COMMIT, or the commit, marked if files besides results are dirty."""
    if given := os.environ.get("OFFLOAD_RT_COMMIT"):
        return given
    name = _git("describe", "--always")
    changes = _git("status", "--porcelain", "-uno", "--", ".", ":!bench/results")
    return f"{name}-dirty" if name and changes else name or UNKNOWN


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return ""
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"
