"""What every benchmark says: the machine it ran on, medians with their spread, one JSON line at the end."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Spread:
    """Least, median and largest of several measurements."""

    least: float
    median: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of at least one value."""
        return cls(min(values), median(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f} to {self.largest:.3f})"


def machine() -> str:
    """The machine in a line: processor, cores, memory, system, torch."""
    import torch

    gib = psutil.virtual_memory().total / 2**30
    system = f"{platform.system()} {platform.release()}, torch {torch.__version__}"
    return f"{_processor()}, {os.cpu_count()} cores, {gib:.0f} GiB, {system}"


def commit() -> str:
    """The commit that was measured, marked if the tree had changes."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown"


def expanded_model(size: str) -> Path:
    """The demo target at another size, written on first use."""
    out = ROOT / "demo-cache" / f"expanded-{size}"
    command = [sys.executable, "scripts/expand.py", "--source", "models/demo-target", "--out", str(out), "--size", size]
    subprocess.run(command, cwd=ROOT, check=True)
    return out


def drop_from_page_cache(directory: Path) -> None:
    """Make the weights of a checkpoint cold again."""
    for path in directory.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


@dataclass(frozen=True)
class ProcessRun:
    """A process that ended well: the object on its last line of stdout, its wall time, its peak resident memory in bytes."""

    result: dict[str, Any]
    seconds: float
    peak_rss: int


def run_json(arguments: Sequence[str]) -> ProcessRun:
    """Run `python <arguments>` in the repository. Raises RuntimeError if it fails."""
    started, peak = time.perf_counter(), 0
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        while process.poll() is None:
            peak = max(peak, _high_water(process.pid))
            time.sleep(0.005)
        out = process.stdout.read()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed with exit code {process.returncode}")
    lines = out.strip().splitlines()
    return ProcessRun(json.loads(lines[-1]) if lines else {}, time.perf_counter() - started, peak)


def _high_water(pid: int) -> int:
    """Peak resident memory of a process so far. (What wait4 tells begins with the parent's own, before the exec.)"""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"
