"""Build the libraries of csrc/ into the wheel; the metadata is in pyproject.toml.

OFFLOAD_RT_BUILD selects them. `none`: no library, the first run compiles. `cpu`: all CPU
libraries; the default with a C++ compiler. `all`: the CUDA kernels, too; needs nvcc, and torch in
the build environment (`pip install --no-build-isolation`). CXX is the command of the compiler.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

if sys.platform != "linux":
    sys.exit("offload_rt needs Linux: on Windows install it in WSL 2, on macOS in a Linux machine.")

_OPS = Path(__file__).parent / "offload_rt" / "ops"
sys.path.insert(0, str(_OPS.parents[1]))
# By its path: the package `offload_rt.ops` imports torch, which an isolated build lacks.
_spec = importlib.util.spec_from_file_location("build_csrc", _OPS / "build.py")
assert _spec and _spec.loader
build = importlib.util.module_from_spec(_spec)
sys.modules["build_csrc"] = build
_spec.loader.exec_module(build)

_SETTING = os.environ.get("OFFLOAD_RT_BUILD", "")
# linux-x86_64, or what _PYTHON_HOST_PLATFORM names for a cross-compiler in CXX.
_MACHINE = sysconfig.get_platform().rpartition("-")[2]


def recipes() -> list:
    """Return the recipes of the selected libraries."""
    has_compiler = os.environ.get("CXX") or build.find_compiler("g++")
    if _SETTING in ("0", "none") or not (_SETTING or has_compiler):
        return []
    if _SETTING not in ("", "cpu", "all"):
        sys.exit(f"OFFLOAD_RT_BUILD is {_SETTING}; set none, cpu or all")
    for_cpu = [build.cpu(level, _MACHINE) for level in build.cpu_levels(_MACHINE)]
    return [*([build.kernels(build.architectures())] if _SETTING == "all" else []), *for_cpu]


class BuildLibraries(build_py):
    """Compile the libraries beside the modules that load them, except for an editable install."""

    def run(self) -> None:
        """Copy the package, then its libraries, which a build folder keeps for the next wheel."""
        super().run()
        if self.editable_mode:
            return
        for stale in Path(self.build_lib, "offload_rt", "ops").glob("_*.so"):
            stale.unlink()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(self._add, recipes()))

    def _add(self, recipe: "build.Recipe") -> None:
        library = _OPS / recipe.file
        if not library.exists():
            library = Path(self.build_lib).resolve().parent / recipe.file
        try:
            if not library.exists():
                recipe.build(library)
            shutil.copy2(library, Path(self.build_lib, "offload_rt", "ops"))
        except build.NotBuilt as error:
            if _SETTING:
                sys.exit(f"{recipe.name}: {error}")
            print(f"{recipe.name}: {error}; the first run compiles it", file=sys.stderr)


class WheelOfLibraries(bdist_wheel):
    """Wheel for every Python, since ctypes and torch load the libraries, but for one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag, e.g. py3-none-linux_x86_64."""
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """Distribution with libraries of a platform, unless none are selected."""

    def has_ext_modules(self) -> bool:
        """Return whether the wheel depends on the platform."""
        return bool(recipes())


setup(
    cmdclass={"build_py": BuildLibraries, "bdist_wheel": WheelOfLibraries},
    distclass=PlatformDistribution,
)
