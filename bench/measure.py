"""What all benchmarks share: the machine in a line, spreads, models of a size, other processes."""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:  # they take seconds to load
    from offload_rt import LLM
    from offload_rt.offload.memory import MemoryTier

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "unknown"
# Settings by which torch, MKL and oneDNN use AVX2 on a newer CPU. The compiled CPU library adds its
# own.
AVX2_ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}


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


def flag_parser(text: str | None) -> argparse.ArgumentParser:
    """A parser for a benchmark whose module says this of itself."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def print_result(bench: str, flags: argparse.Namespace, **found: object) -> None:
    """Print the last line of a benchmark: one JSON object of where it ran, with which flags, and
    what it found.
    """
    print(
        json.dumps(
            {"bench": bench, "machine": machine(), "commit": commit(), **vars(flags), **found},
            default=str,
        )
    )


def machine() -> str:
    """The machine in a line: processor, cores, memory, system, torch."""
    import torch

    gib = psutil.virtual_memory().total / 2**30
    system = f"{platform.system()} {platform.release()}, torch {torch.__version__}"
    return f"{_processor()}, {os.cpu_count()} cores, {gib:.0f} GiB, {system}"


def commit() -> str:
    """The commit of the tree, marked if there are changes; without git, what OFFLOAD_RT_COMMIT
    says.
    """
    if given := os.environ.get("OFFLOAD_RT_COMMIT"):
        return given
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # there is no git
        return UNKNOWN
    return done.stdout.strip() or UNKNOWN


def expanded_model(size: str, source: Path = ROOT / "models/demo-target") -> Path:
    """The demo target or another model at a size, written on first use."""
    name = "expanded" if source.name == "demo-target" else source.name
    out = ROOT / "demo-cache" / f"{name}-{size}"
    command = [
        sys.executable,
        "scripts/expand.py",
        "--source",
        str(source),
        "--out",
        str(out),
        "--size",
        size,
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    return out


def quantized_model(model: Path, format: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint in this format of `scripts/quantize.py`, and one of the same weights as floats,
    in a folder.
    """
    out = folder / f"{model.name}-{format}", folder / f"{model.name}-plain"
    command = [
        sys.executable,
        "scripts/quantize.py",
        str(model),
        str(out[0]),
        "--exact",
        str(out[1]),
    ]
    subprocess.run([*command, "--format", format, "--group-size", "128"], cwd=ROOT, check=True)
    return out


def gguf_model(model: Path, type: str, folder: Path) -> Path:
    """A checkpoint as one GGUF file with matrices of this type, kept in a folder until the
    checkpoint is newer.
    """
    out = folder / f"{model.name}-{type}.gguf"
    if not out.exists() or out.stat().st_mtime < (model / "config.json").stat().st_mtime:
        partial = out.with_suffix(f".{os.getpid()}.partial")
        command = [sys.executable, "scripts/quantize.py", str(model), str(partial)]
        subprocess.run([*command, "--format", "gguf", "--type", type], cwd=ROOT, check=True)
        partial.rename(out)
    return out


def resident_layers(llm: "LLM") -> "MemoryTier":
    """The layers of a model that is resident as a whole, where they lie."""
    from offload_rt.offload.memory import MemoryTier
    from offload_rt.weights.layout import PackedLayer

    tier = MemoryTier()
    for view in llm.engine.runner.streamer.sweep():
        tier.put(view.i, PackedLayer(view.data, view.layout))
    return tier


def drop_from_page_cache(checkpoint: Path) -> None:
    """Evict the weights of a directory or a GGUF file from the page cache."""
    for path in [checkpoint] if checkpoint.is_file() else checkpoint.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


@dataclass(frozen=True)
class ProcessRun:
    """A process that succeeded: the object on its last line of stdout, its wall time, its peak
    resident memory in bytes.
    """

    result: dict[str, Any]
    seconds: float
    peak_rss: int


def run_json(
    arguments: Sequence[str], timeout_s: float = math.inf, cgroup: Path | None = None
) -> ProcessRun:
    """Run `python <arguments>` in the repository. Raises RuntimeError, with the last line of its
    errors, if it fails.

    cgroup  directory of a control group for the process to join
    """
    started = time.perf_counter()
    peak = 0
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        # Files, not pipes: a process that fills a pipe waits for a reader.
        join = (
            ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup / "cgroup.procs")]
            if cgroup
            else []
        )
        command = [*join, sys.executable, *arguments]
        with family(subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors)) as process:
            while process.poll() is None:
                peak = max(peak, _high_water(process.pid))
                if time.perf_counter() - started > timeout_s:
                    raise RuntimeError(f"took longer than {timeout_s:.0f} s")
                time.sleep(0.005)
        printed, complaints = (lines_of(file) for file in (out, errors))
    if process.returncode:
        reason = complaints[-1] if complaints else "nothing on stderr"
        raise RuntimeError(
            f"{' '.join(arguments[:3])} failed with exit code {process.returncode}: {reason}"
        )
    return ProcessRun(
        json.loads(printed[-1]) if printed else {}, time.perf_counter() - started, peak
    )


@contextmanager
def family(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Give a process; at the end, kill it with all that it started if it still runs."""
    try:
        yield process
    finally:
        if process.poll() is None:
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.kill()
            process.wait()


def lines_of(file: IO[str]) -> list[str]:
    """The lines of a file that are not blank."""
    file.seek(0)
    return [line.strip() for line in file if line.strip()]


def _high_water(pid: int) -> int:
    """Peak resident memory of a process so far. (wait4 counts the parent's from before the exec,
    too.)
    """
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
