"""Child processes with a JSON result, wall time and peak memory."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import psutil

from bench.common.measure import ROOT


@dataclass(frozen=True)
class ProcessRun:
    """A successful process: last stdout line as JSON, wall time, peak resident bytes."""

    result: dict[str, Any]
    seconds: float
    peak_rss: int


def run_python(*arguments: str) -> None:
    """Run `python <arguments>` in the repository. Raises CalledProcessError."""
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)


def run_json(
    arguments: Sequence[str], timeout_s: float = math.inf, cgroup: Path | None = None
) -> ProcessRun:
    """Run `python <arguments>` in the repository. Raises RuntimeError with its last error line.

    cgroup  directory of a control group for the process
    """
    started = time.perf_counter()
    peak = 0
    join = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{cgroup}/cgroup.procs"] if cgroup else []
    # Files instead of pipes, because a full pipe blocks the process.
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        command = [*join, sys.executable, *arguments]
        with family(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors)) as process:
            while process.poll() is None:
                peak = max(peak, _high_water(process.pid))
                if time.perf_counter() - started > timeout_s:
                    raise RuntimeError(f"took longer than {timeout_s:.0f} s")
                time.sleep(0.005)
        printed, complaints = (lines_of(file) for file in (out, errors))
    if code := process.returncode:
        reason = complaints[-1] if complaints else "nothing on stderr"
        raise RuntimeError(f"{' '.join(arguments[:3])} failed with exit code {code}: {reason}")
    result = json.loads(printed[-1]) if printed else {}
    return ProcessRun(result, time.perf_counter() - started, peak)


class Worker:
    """A process of a bench module that answers lines of JSON by lines of JSON."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def ask(self, *job: object) -> Any:
        """Return the answer to a job."""
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@contextmanager
def worker(module: str) -> Iterator[Worker]:
    """Start `python -m <module>`, which calls `answer_jobs`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", module]
    with family(subprocess.Popen(command, cwd=ROOT, **pipes)) as process:
        yield Worker(process)


def answer_jobs(work: Callable[..., object]) -> None:
    """Execute the jobs of stdin line by line."""
    for line in sys.stdin:
        print(json.dumps(work(*json.loads(line))), flush=True)


@contextmanager
def memory_group(limit: int) -> Iterator[tuple[Path, int] | None]:
    """Make a control group, of version 1 or 2, that limits memory to `limit` bytes.

    Yields its directory and the limit; None without the permission.
    """
    groups = Path("/sys/fs/cgroup")
    parent = groups / "memory" if (groups / "memory").is_dir() else groups
    folder = parent / f"offload_rt-{os.getpid()}"
    try:
        folder.mkdir()
        name = "memory.max" if parent == groups else "memory.limit_in_bytes"
        (folder / name).write_text(f"{limit}\n")
    except OSError:
        yield None
    else:
        yield folder, limit
    finally:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def family(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Kill a running process and its children at the end of the block."""
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_family(process)
            process.wait()


def kill_family(process: subprocess.Popen) -> None:
    """Kill a running process and its children."""
    for member in (*psutil.Process(process.pid).children(recursive=True), process):
        member.kill()


def lines_of(file: IO[str]) -> list[str]:
    """Return the lines of a file that are not blank."""
    file.seek(0)
    return [line.strip() for line in file if line.strip()]


def _high_water(pid: int) -> int:
    """Return the peak resident bytes so far. (wait4 includes the parent before exec.)"""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
