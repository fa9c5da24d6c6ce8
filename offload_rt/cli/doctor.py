"""`offload-rt doctor`: check this machine, name the fix of each missing part, forecast models."""

import json
import os
import resource
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version

from offload_rt import __version__
from offload_rt.cli.flags import Parser
from offload_rt.cli.process import command
from offload_rt.config import EngineConfig, format_size
from offload_rt.system import machine
from offload_rt.system.disk_rate import measure_disk_gbps
from offload_rt.system.files import cache_directory

_LEVELS = ("portable C++", "AVX2", "AVX-512", "AVX-512 with bfloat16")
# Open files that the server needs for its default number of connections.
_OPEN_FILES = 1024
# Gain of torch's products worth giving up the bits of plain decoding.
_LEAST_GAIN = 1.1


@dataclass(frozen=True)
class Check:
    """A checked part of the machine; `fix` names the remedy of a missing part."""

    name: str
    value: str
    fix: str = ""


def new_parser() -> Parser:
    """Return the parser of the command."""
    text = "Check this machine and print how to fix each missing part."
    parser = Parser("offload-rt doctor", text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    text = "print the folders of the package and its caches"
    parser.add_argument("--paths", action="store_true", help=text)
    return parser


@command(new_parser)
def main(flags: Namespace) -> None:
    """Run the command; missing parts are no error."""
    cache = cache_directory()
    if flags.paths:
        from huggingface_hub.constants import HF_HUB_CACHE

        nbytes = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        print(f"package  {Path(__file__).parents[1]}: `pip uninstall offload-rt` removes it")
        print(f"cache    {cache}: {format_size(nbytes)} of kernels, measurements and chat history")
        print(f"models   {HF_HUB_CACHE}: downloads, shared with other programs")
        return
    checks = []
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
    disk_gbps = measure_disk_gbps(cache)
    for check in _checks(disk_gbps):
        checks.append(check)
        if not flags.json:
            print(f"{check.name:<13} {check.value}")
            if check.fix:
                print(f"{'':<13} -> {check.fix}")
            sys.stdout.flush()
    n_missing = sum(bool(check.fix) for check in checks)
    if not flags.json:
        print(f"{n_missing} to fix" if n_missing else "nothing to fix", flush=True)
    from offload_rt.planning.local import this_machine
    from offload_rt.planning.survey import survey

    # torch times a matrix product for a second.
    # Where direct reads cannot be measured, 1 GB/s is assumed.
    prospects = survey(this_machine(EngineConfig("any"), disk_gbps or 1.0, "disk: measured"))
    if flags.json:
        print(json.dumps({"checks": [*map(asdict, checks)], "models": [*map(asdict, prospects)]}))
        return
    print("\nforecast in tokens/s, 2048 tokens of context")
    print(f"{'model':<14}{'draft':<12}{'plain':>8}{'with draft':>12}  verdict")
    for prospect in prospects:
        drafted = prospect.rate if prospect.draft else None
        plain, rate = ("" if x is None else f"{x:.3g}" for x in (prospect.plain, drafted))
        start = f"{prospect.model:<14}{prospect.draft or 'none':<12}"
        print(f"{start}{plain:>8}{rate:>12}  {prospect.verdict}")
    print("`offload-rt plan MODEL --draft-model DRAFT` explains a forecast")


def _checks(disk_gbps: float | None) -> Iterator[Check]:
    """Check one part after the other. torch loads for seconds, so its checks come last."""
    yield Check("offload-rt", f"{__version__}, Python {python_version()}")
    limit, free = machine.memory_limit(), machine.memory_free()
    value = f"{format_size(limit)}, {format_size(free)} free"
    yield Check("memory", value, "close other programs" if free < limit // 4 else "")
    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "set XDG_CACHE_HOME to another folder"
        yield Check("disk", f"{folder}: {error.strerror}", fix)
    else:
        space = format_size(shutil.disk_usage(folder).free)
        rate = f"reads {disk_gbps:.2f} GB/s" if disk_gbps else "no direct reads on this file system"
        fix = "store models on a faster disk" if disk_gbps and disk_gbps < 0.5 else ""
        yield Check("disk", f"{folder}: {rate}, {space} free", fix)
    n_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    fix = f"ulimit -n {_OPEN_FILES}" if n_files < _OPEN_FILES else ""
    yield Check("limits", f"{n_files} open files", fix)
    import torch

    from offload_rt.ops import build, cpu

    yield Check("packages", f"torch {torch.__version__}, transformers {version('transformers')}")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, os.uname().machine)
    yield Check("CPU", f"{name}, {len(os.sched_getaffinity(0))} cores")
    library = cpu.library()
    if library is None:
        fix = "install a C++ compiler: apt install g++"
        if shutil.which("g++"):
            fix = f"see the log in {cache_directory() / 'kernels'}"
        yield Check("CPU kernels", "missing: torch's products are several times slower", fix)
    else:
        level = _LEVELS[cpu.level()] if os.uname().machine == "x86_64" else "NEON"
        yield Check("CPU kernels", f"{build.origin(library._name)}, using {level}{_amx()}")
    yield from _gpus(build.find_compiler("nvcc"))


def _amx() -> str:
    """Recommend torch's products, which use AMX unlike the library, where they are faster."""
    import torch

    if not torch.cpu._is_amx_tile_supported():
        return ""
    gain = torch_gain()
    if gain < _LEAST_GAIN:
        return f"; AMX is no gain ({gain:.2f} times as fast)"
    return f"; --torch-products uses AMX: {gain:.2f} times as fast, equal up to rounding"


def torch_gain() -> float:
    """Return the time of the library's product divided by that of torch, for rows of a tree."""
    import torch

    from offload_rt.ops.linear import linear

    x = torch.randn(64, 4096).bfloat16()
    weight = torch.randn(4096, 4096).bfloat16()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(5):
        for allows_torch, times in seconds.items():
            started = time.perf_counter()
            linear(x, weight, allows_torch=allows_torch)
            times.append(time.perf_counter() - started)
    return min(seconds[False]) / min(seconds[True])


def _gpus(nvcc: str | None) -> Iterator[Check]:
    import torch

    names = machine.cards()
    if not names and Path("/dev/nvidia0").exists():
        yield Check("GPU", "the driver does not answer", "nvidia-smi prints the reason")
        return
    yield Check("GPU", ", ".join(names) or "none")
    if not names:
        return
    if not torch.cuda.is_available():
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        if torch.version.cuda is not None:
            fix = f"install a driver for CUDA {torch.version.cuda}; nvidia-smi prints its version"
        yield Check("CUDA", f"torch {torch.__version__} finds no GPU", fix)
        return
    from offload_rt.engine import profile
    from offload_rt.ops import build, extension

    for i, name in enumerate(names[: torch.cuda.device_count()]):
        device = torch.device("cuda", i)
        free, total = torch.cuda.mem_get_info(device)
        gbps = profile.upload_gbps(device)
        value = f"{format_size(free)} of {format_size(total)} free, uploads {gbps:.1f} GB/s"
        yield Check(f"GPU {i}", f"{name}: {value}")
    reason = extension.missing()
    fix = 'pip install "cuda-toolkit[nvcc,cccl]", or set CUDA_HOME' if reason and not nvcc else ""
    yield Check("nvcc", nvcc or "missing", fix)
    paths = [path for path in torch.ops.loaded_libraries if "_kernels-" in path]
    value = f"missing: {reason}" if reason else build.origin(*paths)
    yield Check("CUDA kernels", value, reason and "see above")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked != resource.RLIM_INFINITY:
        yield Check("pinned memory", f"limit {format_size(locked)}", "ulimit -l unlimited")
