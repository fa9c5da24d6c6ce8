"""Runs everything that needs a card: `python -m bench.gpu [--minutes 9] [--section NAME ...]
[--again]`.

Each section is a process of its own and writes `bench/results/gpu/<section>.json`, with device,
driver and commit, anew after each measurement. The section's stderr is written to `<section>.log`
beside the result. Sections with a result for this commit are skipped, so the same command resumes
an interrupted run. If a section fails or its time is over, its results up to then are kept with the
reason. Without a .git folder, set OFFLOAD_RT_COMMIT.
"""

import argparse
import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.common.measure import ROOT, UNKNOWN, commit
from bench.common.processes import family, kill_family, lines_of
from bench.gpu.table import table, written_into

SECTIONS = (
    "ceilings", "correctness", "attention", "streamed", "products", "paced", "generation", "onchip",
    "experts", "formats", "peers", "rows", "flex", "pinning", "memcheck",
)  # fmt: skip
RESULTS = ROOT / "bench/results/gpu"
# Kept as the reason if this program itself is killed.
_KILLED = {"failed": "it was killed"}


def main() -> int:
    """Run the sections without results while there is time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9, help="end of the last section")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--again", action="store_true", help="also what this commit has measured")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--here", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="only write docs/measurements.md")
    flags = parser.parse_args()
    if flags.table:
        readme = ROOT / "docs" / "measurements.md"
        readme.write_text(written_into(readme.read_text(), table(flags.results)))
        return 0
    if flags.here:
        _print(flags.here)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("error: bench.gpu needs a CUDA device, and torch can use none", file=sys.stderr)
        return 3
    return _run(flags.section, time.monotonic() + flags.minutes * 60, flags.again, flags.results)


def _print(section: str) -> None:
    """Measure a section and print its results, with the reason if there are no kernels."""
    from offload_rt.ops import extension

    reason = extension.missing()
    for result in importlib.import_module(f"bench.gpu.{section}").measure():
        print(json.dumps({**result, "no kernels": reason} if reason else result), flush=True)


def _run(sections: tuple[str, ...], until: float, again: bool, results: Path) -> int:
    results.mkdir(parents=True, exist_ok=True)
    now = commit()
    code = 0
    for name in sections:
        path = results / f"{name}.json"
        if not again and _is_measured(path, now):
            print(f"{name}: measured on this commit already", flush=True)
            continue
        left = until - time.monotonic()
        expected = importlib.import_module(f"bench.gpu.{name}").EXPECTED_S
        if left < expected and name != sections[0]:
            print(
                f"{name}: left out, {left:.0f} s are left and it takes about {expected}", flush=True
            )
            continue
        begun = time.monotonic()
        record = partial(_write, path, {"section": name, **device(), "commit": now}, begun)
        command = [sys.executable, "-m", "bench.gpu", "--here", name]
        result = run_section(command, left, path.with_suffix(".log"), record)
        code = code or int("failed" in result)
        end = result.get("failed") or "done"
        print(f"{name}: {end}, {time.monotonic() - begun:.0f} s", flush=True)
    return code


def _write(path: Path, about: dict[str, str], begun: float, result: dict[str, object]) -> None:
    """Replace the result file of a section."""
    entry = {**about, "seconds": time.monotonic() - begun, **result}
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(entry, indent=1) + "\n")
    unfinished.replace(path)


def _is_measured(path: Path, now: str) -> bool:
    if not path.exists() or now == UNKNOWN:
        return False
    entry = json.loads(path.read_text())
    return entry.get("commit") == now and "failed" not in entry


def run_section(
    command: list[str],
    seconds: float,
    log: Path,
    record: Callable[[dict[str, object]], None] = lambda _: None,
) -> dict[str, object]:
    """Return the last object that a section printed, and the reason if it failed.

    A section prints all that it knows so far. Each object is printed and recorded at once.

    log     receives its stderr
    record  receives the result so far, as if it were killed now, and at the end the returned value
    """
    result: dict[str, object] = {}
    late = threading.Event()
    with log.open("w+") as errors:
        pipe = subprocess.PIPE
        started = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=errors, text=True)
        with family(started) as process:

            def stop() -> None:
                late.set()
                kill_family(process)  # its children hold the pipe open, too

            timer = threading.Timer(seconds, stop)
            timer.start()
            for line in process.stdout or ():
                if (found := _parsed(line)) is not None:
                    result = {"result": found}
                    record(result | _KILLED)
                    print(json.dumps(found), flush=True)
            code = process.wait()
            timer.cancel()
        reason = "; ".join(lines_of(errors)[-6:]) or f"exit code {code}" if code else ""
    if late.is_set():
        reason = f"took more than {seconds:.0f} s"
    elif not reason and not result:
        reason = "it printed nothing"
    result |= {"failed": reason} if reason else {}
    record(result)
    return result


def _parsed(line: str) -> dict[str, object] | None:
    """The object on a line; None if a library printed it."""
    try:
        result = json.loads(line)
    except ValueError:
        return None
    return result if isinstance(result, dict) else None


def device() -> dict[str, str]:
    """The card, its driver, and torch."""
    import torch

    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "device": done.stdout.strip() or torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
