"""Build and load the libraries of csrc/: CUDA kernels by nvcc, CPU kernels by g++ or CXX.

setup.py builds them into the wheel, `make kernels` into the package. Missing libraries are built
at first use below ~/.cache/offload_rt, unless OFFLOAD_RT_BUILD is none. The library name is a
digest of sources and arguments. setup.py runs this module without torch.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from offload_rt.system.files import cache_directory

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE.parent / "csrc"
# Target compute capabilities; later GPUs compile the PTX of the last. 12.0 needs CUDA 12.8.
ARCHITECTURES = (80, 86, 89, 90)
ALL_ARCHITECTURES = (*ARCHITECTURES, 120)
SYSTEM_CUDA = Path("/usr/local/cuda")
Library = TypeVar("Library")


class NotBuilt(Exception):
    """A missing library, with the reason."""


@dataclass(frozen=True)
class Recipe:
    """Compiler and arguments of a library in csrc/; "{torch}" stands for the folder of torch."""

    name: str
    compiler: str
    arguments: tuple[str, ...]

    @property
    def file(self) -> str:
        """Return the file name of the library."""
        digest = hashlib.sha256(repr(self).encode())
        for path in sorted(SOURCES.iterdir()):
            # "cpu" is in the names of all files that g++ reads, and of no other.
            if ("cpu" in path.name) == (self.compiler == "g++"):
                digest.update(path.name.encode() + path.read_bytes())
        return f"_{self.name}-{digest.hexdigest()[:16]}.so"

    def build(self, target: Path) -> None:
        """Write the library and a .log file of the output. Raises NotBuilt, with a .failed file."""
        command = self._command()
        note = f"building csrc/ ({self.name}) with {self.compiler}, once for this machine"
        print(note, file=sys.stderr, flush=True)
        unfinished = target.with_suffix(".tmp")
        arguments = self.arguments
        if any("{torch}" in argument for argument in arguments):
            import torch

            folder = str(Path(torch.__file__).parent)
            arguments = tuple(argument.replace("{torch}", folder) for argument in arguments)
        command += [*arguments, "-o", str(unfinished)]
        done = subprocess.run(
            command, cwd=SOURCES, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        log = target.with_suffix(".failed" if done.returncode else ".log")
        log.write_bytes(done.stdout)
        if done.returncode:
            raise NotBuilt(f"{self.compiler} failed: see {log}, remove it to retry")
        unfinished.replace(target)

    def _command(self) -> list[str]:
        if self.compiler == "g++" and (command := shlex.split(os.environ.get("CXX", ""))):
            return command
        compiler = find_compiler(self.compiler)
        if compiler is None:
            raise NotBuilt(f"{self.compiler} not found")
        # nvcc searches lib64 beside bin, but pip's packages have lib.
        libraries = [f"-L{Path(compiler).parents[1]}/lib"] if self.compiler == "nvcc" else []
        return [compiler, *libraries]


# Compiler flags that each level of x86-64 adds: portable, AVX2, AVX-512, AVX-512 with bfloat16.
_LEVEL_FLAGS = (
    (),
    ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mpopcnt"),
    ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    ("-mavx512bf16", "-mavx512vnni"),
)


def cpu_levels(machine: str) -> range:
    """Return the levels of `cpu.level` for a machine as named by `uname -m`."""
    return range(len(_LEVEL_FLAGS) if machine == "x86_64" else 1)


def cpu(level: int, machine: str = os.uname().machine) -> Recipe:
    """Return the CPU library for an instruction set, see `cpu.level`.

    Compiling a single level takes a quarter of the time of all levels.
    """
    flags = [flag for level_flags in _LEVEL_FLAGS[: level + 1] for flag in level_flags]
    if machine == "aarch64":
        flags.append("-fno-ivopts")  # with it, g++ 12 loses the stores of an unpacking loop
    name = f"cpu{level}" if machine == "x86_64" else f"cpu-{machine}"
    return Recipe(name, "g++", (
        "-std=c++20", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread",
        "-fvisibility=hidden", "-Wno-psabi", f"-DLEVEL={level}", *flags,
        "lossless_cpu.cpp", "linear_cpu.cpp", "attention_cpu.cpp", "layer_cpu.cpp",
        "sampling_cpu.cpp",
    ))  # fmt: skip


def kernels(architectures: Iterable[int] = ARCHITECTURES) -> Recipe:
    """Return the recipe of the CUDA kernels, for torch 2.11 and later."""
    known = sorted(architectures)
    pairs = [*((arch, f"sm_{arch}") for arch in known), (known[-1], f"compute_{known[-1]}")]
    return Recipe("kernels", "nvcc", (
        "-shared", "-cudart=static", "-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-Xptxas=-v",
        "--threads=0", *(f"-gencode=arch=compute_{arch},code={code}" for arch, code in pairs),
        # stable ABI of torch 2.11, the oldest admitted version
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
        "-I{torch}/include", *sorted(path.name for path in SOURCES.glob("*.cu")),
        "library.cpp",
        # libtorch depends on libtorch_cuda where torch has CUDA.
        "-L{torch}/lib", "-Xlinker=--no-as-needed", "-ltorch", "-ltorch_cpu",
    ))  # fmt: skip


def find_compiler(name: str) -> str | None:
    """Find a compiler in CUDA_HOME, CUDA_PATH, PATH, the system's CUDA and pip's CUDA."""
    from_environment = filter(None, map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")))
    pip = importlib.util.find_spec("nvidia")
    places = (pip and pip.submodule_search_locations) or ()
    packages = (folder for place in places for folder in Path(place).iterdir())
    homes = [*from_environment, None, SYSTEM_CUDA, *sorted(packages)]
    paths = (shutil.which(name, path=None if home is None else f"{home}/bin") for home in homes)
    return next(filter(None, paths), None)


def architectures() -> tuple[int, ...]:
    """Return the compute capabilities supported by the installed nvcc."""
    nvcc = find_compiler("nvcc")
    if nvcc is None:
        return ARCHITECTURES
    run = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    release = re.search(r"release (\d+)\.(\d+)", run.stdout)
    is_new = release is not None and (int(release[1]), int(release[2])) >= (12, 8)
    return ALL_ARCHITECTURES if is_new else ARCHITECTURES


def load(opener: Callable[[Path], Library], *recipes: Recipe) -> Library:
    """Open the library of any recipe in the package, or build the last recipe in the cache.

    opener  raises OSError for a library that does not load; the reason goes to stderr
    Raises NotBuilt, and OSError if the library of the cache does not load.
    """
    for recipe in recipes:
        path = PACKAGE / recipe.file
        if path.exists():
            try:
                return opener(path)
            except OSError as error:
                print(f"the prebuilt library does not load: {error}", file=sys.stderr, flush=True)
    return opener(_find_in_cache(recipes[-1]))


def origin(path: str) -> str:
    """Return "prebuilt" for a library of the package, "built" for a library of the cache."""
    return "prebuilt" if Path(path).parent == PACKAGE else "built"


def _find_in_cache(recipe: Recipe) -> Path:
    """Return the library in the cache; build it if missing, unless a build failed before."""
    if (setting := os.environ.get("OFFLOAD_RT_BUILD")) in ("0", "none"):
        raise NotBuilt(f"OFFLOAD_RT_BUILD is {setting}")
    try:
        folder = cache_directory() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / recipe.file
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                if (log := target.with_suffix(".failed")).exists():
                    problem = f"{recipe.compiler} failed before"
                    raise NotBuilt(f"{problem}: see {log}, remove it to retry")
                recipe.build(target)
    except (OSError, RuntimeError) as error:
        raise NotBuilt(str(error)) from error
    return target
