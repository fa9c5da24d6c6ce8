"""The kernels of csrc/ built for the CPU, a fiber per thread; see cuda_on_cpu/fibers.h."""

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EMULATION = ROOT / "tests" / "support" / "cuda_on_cpu"
BUILD = ROOT / "build" / "cuda_on_cpu"
LIBRARY = "offload_rt_on_cpu"


def _sources() -> list[Path]:
    return sorted(
        path
        for folder in (ROOT / "csrc", EMULATION)
        for path in folder.iterdir()
        # The CPU library is built for its own tests.
        if path.suffix != ".md" and not path.stem.endswith("_cpu")
    )


def _command(target: Path) -> list[str]:
    installed = Path(torch.__file__).parent
    flags = [
        "-std=c++20", "-O1", "-fPIC", "-shared", "-DCUDA_ON_CPU",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
    ]  # fmt: skip
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    folders = [f"-I{folder}" for folder in (EMULATION, ROOT / "csrc", installed / "include")]
    sources = [str(path) for path in _sources() if path.suffix in (".cu", ".cpp")]
    link = [f"-L{installed / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu"]
    return ["g++", *flags, *folders, "-x", "c++", *sources, "-x", "none", *link, "-o", str(target)]


def built(sources: Sequence[Path], command: Callable[[Path], list[str]]) -> Path:
    """Return the library of some sources, built once for their content and this torch."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    text = torch.__version__.encode() + b"".join(path.read_bytes() for path in sources)
    target = BUILD / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        # the other half of the suite waits for what this one builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = target.with_suffix(".tmp")
            subprocess.run(command(unfinished), check=True)
            unfinished.replace(target)
    return target


@cache
def load() -> str:
    """Build if the sources are new, load, and return the name of the library in torch.ops."""
    torch.ops.load_library(str(built(_sources(), _command)))
    return LIBRARY
