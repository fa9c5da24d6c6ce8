"""Build csrc/ into the installed package: the kernels where there is nvcc, the CPU's decoder where there is g++.

One line for each says what was built, or why not.

    python scripts/build_kernels.py

Run it from a clone by the Python that offload_rt is installed for: it needs the torch it is to run with at hand, which
the isolated build of an install has not. Where offload_rt is not installed, it builds into the clone. What ptxas said
is kept in build/kernels for scripts/check_kernels.py.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc"
BUILD = ROOT / "build" / "kernels"
_INSTALLED = find_spec("offload_rt")
PACKAGE = Path(_INSTALLED.origin).parent if _INSTALLED and _INSTALLED.origin else ROOT / "offload_rt"
LIBRARY, ON_CPU = PACKAGE / "ops" / "_kernels.so", PACKAGE / "ops" / "_lossless.so"
ARCHITECTURES = ("80", "86", "89", "90")
# The stable ABI of torch 2.11, the earliest that setup.py admits.
TARGET_VERSION = "0x020b000000000000"
N_JOBS = os.cpu_count() or 1


def nvcc() -> str | None:
    """The compiler, from CUDA_HOME or the path."""
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=str(Path(home) / "bin") if home else None) or shutil.which("nvcc")


def torch_folder() -> Path | None:
    """Where torch is installed; it is not imported, which takes seconds."""
    found = find_spec("torch")
    return Path(found.origin).parent if found and found.origin else None


def cuda_include(compiler: str) -> str:
    """The folder of cuda_runtime.h, by the compiler's own account."""
    dry = subprocess.run([compiler, "-dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False)
    found = re.search(r'INCLUDES="-I([^"]+)"', dry.stderr)
    return found[1] if found else sys.exit(f"{compiler} does not say where its headers are:\n{dry.stderr}")


def compile_device(compiler: str, source: Path) -> Path:
    """One .cu for all architectures; ptxas's report goes beside the object."""
    target = BUILD / f"{source.stem}.o"
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHITECTURES]
    codes.append(f"-gencode=arch=compute_{ARCHITECTURES[-1]},code=compute_{ARCHITECTURES[-1]}")
    flags = ["-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "-Xptxas=-v", "--threads", str(N_JOBS)]
    done = subprocess.run(
        [compiler, *flags, *codes, "-c", str(source), "-o", str(target)], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{source.name} does not compile:\n{done.stderr}")
    (BUILD / f"{source.stem}.ptxas").write_text(done.stderr, encoding="utf-8")
    return target


def compile_library(compiler: str, torch: Path) -> Path:
    """The host code, which alone knows torch."""
    target = BUILD / "library.o"
    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={TARGET_VERSION}"]
    folders = [f"-I{torch / 'include'}", "-isystem", cuda_include(compiler)]
    subprocess.run(["g++", *flags, *folders, "-c", str(SOURCES / "library.cpp"), "-o", str(target)], check=True)
    return target


def link(compiler: str, torch: Path, objects: list[Path]) -> None:
    """Against libtorch, which brings in what the installed build of torch has: its CUDA part or none."""
    unfinished = LIBRARY.with_suffix(".tmp")
    libraries = [name for name in ("torch", "torch_cpu", "torch_cuda") if (torch / "lib" / f"lib{name}.so").exists()]
    torch_flags = [f"-L{torch / 'lib'}", "-Xlinker", "--no-as-needed", *(f"-l{name}" for name in libraries)]
    objects_ = [str(path) for path in objects]
    subprocess.run([compiler, "-shared", "-cudart=static", *objects_, *torch_flags, "-o", str(unfinished)], check=True)
    unfinished.replace(LIBRARY)


def build_for_cpu() -> None:
    """The decoder of lossless weights, which needs neither torch nor CUDA."""
    if not shutil.which("g++"):
        print("decoder on the CPU: not built, there is no g++; numba serves")
        return
    unfinished = ON_CPU.with_suffix(".tmp")
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden"]
    subprocess.run(["g++", *flags, str(SOURCES / "lossless_cpu.cpp"), "-o", str(unfinished)], check=True)
    unfinished.replace(ON_CPU)
    print("decoder on the CPU: built")


def main() -> None:
    """Build what can be built here."""
    build_for_cpu()
    compiler, torch = nvcc(), torch_folder()
    missing = [
        name for name, found in (("nvcc", compiler), ("g++", shutil.which("g++")), ("torch", torch)) if not found
    ]
    if not compiler or not torch or missing:
        print(f"kernels: not built, there is no {' and no '.join(missing)}; plain torch serves")
        return
    start = time.perf_counter()
    BUILD.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(N_JOBS) as pool:
        host = pool.submit(compile_library, compiler, torch)
        objects = list(pool.map(lambda source: compile_device(compiler, source), sorted(SOURCES.glob("*.cu"))))
    link(compiler, torch, [*objects, host.result()])
    seconds = time.perf_counter() - start
    names = ", ".join(path.stem for path in objects)
    print(f"kernels: built {names} for {' '.join(ARCHITECTURES)} and PTX in {seconds:.0f} s")


if __name__ == "__main__":
    main()
