"""Runs everything that needs a card: `python -m bench.gpu [--minutes 9] [--section NAME ...] [--again]`.

Each section is a process of its own and leaves `bench/results/gpu/<section>.json`, with device, driver and commit. A section
whose result is there for this commit is not run again, so a run that ended early is resumed by the same command.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

from bench._measure import ROOT, commit
from bench.gpu._table import table, written_into

SECTIONS = ("ceilings", "correctness", "attention", "streamed", "onchip", "peers")
RESULTS = ROOT / "bench/results/gpu"


def main() -> int:
    """Run what is missing, as far as the time goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="no section begins that would not end in this time")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--again", action="store_true", help="also what was measured on this commit already")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder the results are written to")
    parser.add_argument("--here", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="only write the README's table from the results there are")
    flags = parser.parse_args()
    if flags.table:
        readme = ROOT / "README.md"
        readme.write_text(written_into(readme.read_text(), table(flags.results)))
        return 0
    if flags.here:
        print(json.dumps(importlib.import_module(f"bench.gpu.{flags.here}").measure()))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("error: bench.gpu needs a CUDA device, and torch can use none", file=sys.stderr)
        return 3
    return _run(flags.section, flags.minutes * 60, flags.again, flags.results)


def _run(sections: tuple[str, ...], seconds: float, again: bool, results: Path) -> int:
    results.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "scripts/build_kernels.py"], cwd=ROOT, check=True)
    started, now, code = time.monotonic(), commit(), 0
    for name in sections:
        path = results / f"{name}.json"
        if not again and path.exists() and json.loads(path.read_text()).get("commit") == now:
            print(f"{name}: measured on this commit already", flush=True)
            continue
        left = seconds - (time.monotonic() - started)
        expected = importlib.import_module(f"bench.gpu.{name}").EXPECTED_S
        if left < expected:
            print(f"{name}: left out, {left:.0f} s are left and it takes about {expected}", flush=True)
            continue
        begun = time.monotonic()
        found = _section(name, left)
        entry = {"section": name, **device(), "commit": now, "seconds": time.monotonic() - begun, **found}
        path.write_text(json.dumps(entry, indent=1) + "\n")
        code = code or int("failed" in found)
        print(f"{name}: {entry.get('failed') or 'done'}, {entry['seconds']:.0f} s", flush=True)
    return code


def _section(name: str, seconds: float) -> dict[str, object]:
    """What a section measured, or why it failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu", "--here", name], cwd=ROOT, capture_output=True, text=True, timeout=seconds,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {seconds:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": " | ".join(done.stderr.strip().splitlines()[-6:])}
    return {"result": json.loads(lines[-1])}


def device() -> dict[str, str]:
    """The card, its driver, and torch."""
    import torch

    told = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {"device": told.stdout.strip() or torch.cuda.get_device_name(), "torch": torch.__version__}


if __name__ == "__main__":
    sys.exit(main())
