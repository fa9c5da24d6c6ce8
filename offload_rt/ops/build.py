"""Builds csrc/ where it is to run, once: the kernels by nvcc, the decoder on a CPU by g++.

`make kernels` builds both into the package. What is not there is built when it is first needed,
below ~/.cache/offload_rt. The name of a library is a digest of all sources, the command and torch's
version: one of others is never taken for it.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from offload_rt.system.files import cache_directory

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE.parent / "csrc"
# Compute capabilities that the kernels are compiled for; later cards compile the PTX of the last.
# 12.0 needs CUDA 12.8.
ARCHITECTURES = (80, 86, 89, 90)
ALL_ARCHITECTURES = (*ARCHITECTURES, 120)
SYSTEM_CUDA = Path("/usr/local/cuda")


class NotBuilt(Exception):
    """A library that is not there, and why, in a few words."""


@dataclass(frozen=True)
class Recipe:
    """How a library is made, in csrc/."""

    name: str
    compiler: str
    arguments: tuple[str, ...]

    @property
    def file(self) -> str:
        """The name of the library."""
        found = hashlib.sha256(repr((self, torch.__version__)).encode())
        for path in sorted(SOURCES.iterdir()):
            found.update(path.name.encode() + path.read_bytes())
        return f"_{self.name}-{found.hexdigest()[:16]}.so"

    def build(self, target: Path) -> None:
        """Write the library; what the compiler says goes beside it, as a .log. Raises NotBuilt
        where it fails.
        """
        compiler = find_compiler(self.compiler)
        if compiler is None:
            raise NotBuilt(f"there is no {self.compiler}")
        print(
            f"building the {self.name} with {self.compiler}, once for this machine",
            file=sys.stderr,
            flush=True,
        )
        unfinished = target.with_suffix(".tmp")
        log = target.with_suffix(".log")
        command = [compiler, *self.arguments, "-o", str(unfinished)]
        done = subprocess.run(
            command, cwd=SOURCES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        log.write_bytes(done.stdout)
        if done.returncode:
            raise NotBuilt(f"{self.compiler} failed, see {log}, and remove it to try again")
        unfinished.replace(target)


CPU = Recipe("cpu", "g++", (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden",
    "-Wno-psabi",
    "lossless_cpu.cpp", "linear_cpu.cpp", "attention_cpu.cpp", "layer_cpu.cpp",
))  # fmt: skip


def kernels(architectures: Iterable[int] = ARCHITECTURES) -> Recipe:
    """The kernels for such cards. They are linked with what the installed torch has: its CUDA part
    or none.
    """
    known = sorted(architectures)
    installed = Path(torch.__file__).parent
    pairs = [*((one, f"sm_{one}") for one in known), (known[-1], f"compute_{known[-1]}")]
    libraries = (
        name
        for name in ("torch", "torch_cpu", "torch_cuda")
        if (installed / f"lib/lib{name}.so").exists()
    )
    return Recipe("kernels", "nvcc", (
        "-shared", "-cudart=static", "-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-Xptxas=-v",
        "--threads=0", *(f"-gencode=arch=compute_{one},code={code}" for one, code in pairs),
        # the stable ABI of torch 2.11, the oldest admitted version
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
        f"-I{installed}/include", *sorted(path.name for path in SOURCES.glob("*.cu")),
        "library.cpp",
        f"-L{installed}/lib", "-Xlinker=--no-as-needed", *(f"-l{name}" for name in libraries),
    ))  # fmt: skip


def find_compiler(name: str) -> str | None:
    """Return the path of a compiler, also outside PATH: of CUDA_HOME or CUDA_PATH first, of the
    system's or pip's CUDA last.
    """
    given = [
        os.environ[variable] for variable in ("CUDA_HOME", "CUDA_PATH") if variable in os.environ
    ]
    pip = importlib.util.find_spec("nvidia")
    packages = (
        folder
        for place in (pip and pip.submodule_search_locations) or ()
        for folder in Path(place).iterdir()
    )
    found = [*given, None, SYSTEM_CUDA, *sorted(packages)]
    paths = (shutil.which(name, path=None if home is None else f"{home}/bin") for home in found)
    return next(filter(None, paths), None)


def architectures() -> tuple[int, ...]:
    """Return the compute capabilities that the nvcc at hand compiles for."""
    nvcc = find_compiler("nvcc")
    said = (
        subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        if nvcc
        else ""
    )
    release = re.search(r"release (\d+)\.(\d+)", said)
    is_new = release is not None and (int(release[1]), int(release[2])) >= (12, 8)
    return ALL_ARCHITECTURES if is_new else ARCHITECTURES


def find(*recipes: Recipe) -> Path:
    """A library that one of the recipes gives, built into the package before, or by the last of
    them below the cache.

    Raises NotBuilt. What failed is not tried again, and what another process builds is waited for.
    """
    for recipe in recipes:
        if (PACKAGE / recipe.file).exists():
            return PACKAGE / recipe.file
    try:
        folder = cache_directory() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / recipes[-1].file
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                if (log := target.with_suffix(".log")).exists():
                    raise NotBuilt(
                        f"{recipes[-1].compiler} failed before, see {log}, and remove it to try"
                        " again"
                    )
                recipes[-1].build(target)
    except (OSError, RuntimeError) as error:
        raise NotBuilt(str(error)) from error
    return target
