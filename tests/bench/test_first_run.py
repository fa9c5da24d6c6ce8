"""Scripts for the first runs on a GPU, with stand-ins for GPU, interpreter and clock."""

import importlib
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from bench.gpu.__main__ import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
# An interpreter with cards: tests and sections end in different ways.
PYTHON = """#!/bin/bash
case "$*" in
  *device_count*) echo {n_cards} > "$work/n_cards" ;;
  *"--section products"*) echo no room; exit 3 ;;
  *--section*) echo '{{"section": 1}}' > "$work/results/$5.json"
    echo "$5: done, 5 s, building: $OFFLOAD_RT_BUILD" ;;
  *bench.gpu.shapes*) sleep 0.1; echo expanded ;;
  *build_kernels*) echo "$*"; exit {build} ;;
  *) echo "ran $1" ;;
esac
"""
# `timeout` ends the tests, and runs everything else.
TIMEOUT = """#!/bin/bash
shift 2
case "$*" in *correctness*) echo 7 passed so far; exit 124 ;; *) exec "$@" ;; esac
"""


def run(
    folder: Path, script: str, *arguments: str, n_cards: int = 1, build: int = 0
) -> tuple[int, dict[str, str], Path]:
    """The exit code of a script, the results by step, and the folder of logs.

    build  exit code of the build
    """
    python = PYTHON.format(n_cards=n_cards, build=build)
    for name, text in (("python", python), ("timeout", TIMEOUT)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    out = folder / "out"
    places = {"OUT": str(out), "PYTHON": str(folder / "python")}
    environment = os.environ | places | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", f"bench/gpu/{script}.sh", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    text = (out / f"{script}.txt").read_text()
    assert done.stdout == text and not done.stderr
    assert len(list(out.iterdir())) == 3
    rows = [line.split(maxsplit=2) for line in text.splitlines()[1:]]
    return done.returncode, {name: result for name, _, result in rows}, out


def test_failing_step_does_not_stop_the_next(tmp_path):
    code, results, logs = run(tmp_path, "first")
    assert code == 1
    assert results.pop("correctness").startswith("over after")
    done = "done, 5 s, building: 0"
    assert list(results.items()) == [
        ("environment", "ok: ran bench/gpu/requirements.py"), ("build", "ok: ran -c"),
        ("expansion", "ok: expanded"),
        ("ceilings", f"ok: ceilings: {done}"), ("streamed", f"ok: streamed: {done}"),
        ("products", "failed with 3: no room"), ("attention", f"ok: attention: {done}"),
        ("pinning", f"ok: pinning: {done}"), ("generation", f"ok: generation: {done}"),
    ]  # fmt: skip
    log = (logs / "first.log").read_text()
    assert "scripts/build_kernels.py --this-machine" in log and "7 passed so far" in log
    with tarfile.open(logs / "first.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    measured = "ceilings", "streamed", "attention", "pinning", "generation"
    assert names == {"results", "expand.log", *(f"{name}.json" for name in measured)}


def test_limits_of_the_steps_fit_into_the_first_run():
    """Each section has the time that it declares."""
    texts = [(ROOT / f"bench/gpu/{name}.sh").read_text() for name in ("steps", "first")]
    limits = dict(re.findall(r"^ *step (\w+) (\d+) ", "".join(texts), re.MULTILINE))
    assert limits.pop("generation"), "it has the time that the others left"
    assert {"environment", "build"} < set(limits) and sum(map(int, limits.values())) <= 535
    sections = set(limits) & set(SECTIONS)
    assert len(sections) == len(limits) - 3
    for name in sections:
        assert int(limits[name]) - 5 > importlib.import_module(f"bench.gpu.{name}").EXPECTED_S


@pytest.mark.parametrize("script", ["first", "second"])
def test_steps_without_a_gpu_report_it(tmp_path, script):
    code, results, _ = run(tmp_path, script, n_cards=0)
    assert code == 1 and results.pop("environment").startswith("ok")
    assert len(results) > 5 and all("can use no GPU" in result for result in results.values())


def test_second_run_executes_the_named_steps(tmp_path):
    """After a failed build they build nothing. A section that prints nothing has failed."""
    steps = ["products", "peers", "ranks"]
    code, results, _ = run(tmp_path, "second", "", *steps, build=1)
    assert code == 1 and list(results) == ["environment", "build", "expansion", *steps]
    assert results["build"].startswith("failed with 1: scripts/build_kernels.py")
    assert results["products"].startswith("failed with 3")
    assert results["peers"] == "ok: peers: done, 5 s, building: 0"
    assert results["ranks"] == "left out: there is one GPU"
