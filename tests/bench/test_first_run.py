"""Scripts for the first runs on a GPU, with stand-ins for GPU, interpreter and clock."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench.gpu import requirements

ROOT = Path(__file__).resolve().parents[2]
# An interpreter with cards: tests and sections end in different ways.
PYTHON = """#!/bin/bash
case "$*" in
  *device_count*) echo {n_cards} ;;
  *is_available*) exit {code} ;;
  *test_streamers*) echo "2 failed"; exit 1 ;;
  *test_cuda*) echo "3 {end}" ;;
  *"--section attention"*) exit 3 ;;
  *--section*) mkdir -p "$work/results"; echo '{{"section": 1}}' > "$work/results/$5.json"
    echo log > "$work/results/$5.log"; echo "$5: done, 5 s" ;;
  *) echo "ran $1" ;;
esac
"""
# `timeout` ends the kernels' tests, and runs everything else.
TIMEOUT = """#!/bin/bash
shift 2
case "$*" in *test_kernels*) echo 7 passed so far; exit 124 ;; *) exec "$@" ;; esac
"""


def run(
    folder: Path, script: str, *arguments: str, n_cards: int = 1, end: str = "passed"
) -> tuple[int, dict[str, str], Path]:
    """The exit code of a script, the results by step, and the folder of logs."""
    for name, text in (
        ("python", PYTHON.format(n_cards=n_cards, code=int(n_cards == 0), end=end)),
        ("timeout", TIMEOUT),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    surroundings = {
        "OUT": str(folder / "out"),
        "PYTHON": str(folder / "python"),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    command = ["bash", f"bench/gpu/{script}.sh", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | surroundings, capture_output=True, text=True
    )
    text = (folder / "out" / f"{script}.txt").read_text()
    assert done.stdout.endswith(text) and not done.stderr
    rows = [line.split(maxsplit=2) for line in text.splitlines()[1:]]
    return done.returncode, {name: result for name, _, result in rows}, folder / "out"


@pytest.mark.parametrize(("end", "card"), [("passed", "ok"), ("skipped", "failed with 1")])
def test_failing_step_does_not_stop_the_next(tmp_path, end, card):
    """Tests that are all skipped, as without kernels, have failed."""
    code, results, logs = run(tmp_path, "first", end=end)
    assert code == 1
    assert (
        results.pop("kernels").startswith("over after")
        and "7 passed so far" in (logs / "kernels.log").read_text()
    )
    assert results == {
        "environment": "ok: ran "
                       "bench/gpu/requirements.py", "build": "ok: ran -c",
        "streams": "failed with 1: 2 failed", "card": f"{card}: 3 {end}",
        "ceilings": "ok: ceilings: done, 5 s", "streamed": "ok: streamed: done, 5 s",
    }  # fmt: skip
    assert '{"section": 1}' in (logs / "streamed.log").read_text()
    assert len(list(logs.iterdir())) == 8


@pytest.mark.parametrize("script", ["first", "second"])
def test_steps_without_a_gpu_report_it(tmp_path, script):
    code, results, _ = run(tmp_path, script, n_cards=0)
    assert code == 1 and results.pop("environment").startswith("ok")
    assert len(results) > 5 and all("can use no GPU" in result for result in results.values())


def test_second_run_executes_the_named_steps(tmp_path):
    """A section that prints nothing has failed; ranks need two cards."""
    code, results, _ = run(tmp_path, "second", "", "attention", "peers", "ranks")
    assert code == 1 and list(results) == ["environment", "attention", "peers", "ranks"]
    assert (
        results["attention"].startswith("failed with 1")
        and results["peers"] == "ok: peers: done, 5 s"
    )
    assert results["ranks"] == "left out: there is one GPU"


def test_bundled_wheels_replace_old_packages(tmp_path, monkeypatch, capsys):
    """Other packages stay installed, and missing packages are named."""
    for name in ("transformers", "numpy"):
        with zipfile.ZipFile(tmp_path / f"{name}-5.99.0-py3-none-any.whl", "w") as wheel:
            about = f"{name}-5.99.0.dist-info"
            wheel.writestr(f"{name}_carried.py", "")
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 5.99.0\n"
            )
            wheel.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{about}/RECORD", "")
    version = requirements.version
    monkeypatch.setattr(
        requirements, "version", lambda name: "5.20.0" if name == "transformers" else version(name)
    )
    monkeypatch.setattr(sys, "argv", ["requirements.py", str(tmp_path / "site")])
    assert requirements.main() == 1
    assert "unmet, give a folder of wheels: transformers<6,>=5.24" in capsys.readouterr().out
    sys.argv.append(str(tmp_path))
    assert requirements.main() == 0
    assert "installed: transformers-5.99.0-py3-none-any.whl" in capsys.readouterr().out
    assert (tmp_path / "site" / "transformers_carried.py").exists()
    assert not (tmp_path / "site" / "numpy_carried.py").exists()
