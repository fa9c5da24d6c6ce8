"""setup.py: selected libraries in the wheel, its tag, and its refusals."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from offload_rt.ops import build


def run_python(tree: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=os.environ | variables, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of a source archive, and a compiler that writes its arguments as the library."""
    tree = tmp_path / "tree"
    shutil.copytree(
        ROOT / "offload_rt",
        tree / "offload_rt",
        ignore=lambda folder, names: {name for name in names if name.endswith((".so", ".log"))},
    )
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tree)
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\necho "$@" > "$(for last; do :; done; echo "$last")"\n')
    compiler.chmod(0o755)
    return tree


def wheel(tree: Path, setting: str, **variables: str) -> tuple[str, set[str]]:
    """Build the wheel; return the platform of its tag and the names of its libraries."""
    variables = {"CXX": str(tree.parent / "compiler")} | variables
    variables |= {"OFFLOAD_RT_BUILD": setting} if setting else {}
    run = run_python(tree, "setup.py", "-q", "bdist_wheel", "-d", "dist", **variables)
    assert run.returncode == 0, run.stderr
    (path,) = (tree / "dist").iterdir()
    python, abi, platform = path.stem.split("-")[2:]
    assert (python, abi) == ("py3", "none")
    names = {name for name in ZipFile(path).namelist() if name.endswith(".so")}
    path.unlink()
    return platform, names


def test_wheel_has_the_selected_libraries_under_the_names_that_the_package_reads(tree):
    expected = {f"offload_rt/ops/{build.cpu(level, 'x86_64').file}" for level in range(4)}
    machine = {"_PYTHON_HOST_PLATFORM": "linux-x86_64"}
    assert wheel(tree, "", **machine) == ("linux_x86_64", expected)
    assert wheel(tree, "none", **machine) == ("any", set())
    # no library of earlier sources in a build folder that is used again
    (tree / "offload_rt" / "csrc" / "new_cpu.h").write_text("// new")
    platform, names = wheel(tree, "cpu", **machine)
    assert platform == "linux_x86_64" and len(names) == 4 and not names & expected
    nothing = dict.fromkeys(("PATH", "CUDA_HOME", "CUDA_PATH"), "/nowhere") | {"CXX": ""}
    assert wheel(tree, "", **nothing) == ("any", set())


@pytest.mark.parametrize(("setting", "platform", "message"), [
    ("", "win32", "on Windows install it in WSL 2"),
    ("", "darwin", "on macOS in a Linux machine"),
    ("every", "linux", "OFFLOAD_RT_BUILD is every; set none, cpu or all"),
    ("cpu", "linux", "cpu0: g++ failed"),
])  # fmt: skip
def test_install_ends_with_a_sentence(setting, platform, message, tree):
    program = (
        "import runpy, sys, sysconfig, setuptools.command.bdist_wheel\n"
        "sysconfig.get_config_vars()\n"
        f"sys.platform = {platform!r}\n"
        "sys.argv[:] = ['setup.py', '-q', 'bdist_wheel']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    run = run_python(tree, "-c", program, OFFLOAD_RT_BUILD=setting, CXX="false")
    assert run.returncode == 1
    assert message in run.stderr.splitlines()[-1]
