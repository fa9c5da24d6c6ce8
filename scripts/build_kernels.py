"""Build csrc/ into the package: CUDA kernels if nvcc is installed, CPU libraries if g++ is.

    python scripts/build_kernels.py [--this-machine]

With --this-machine, build only for the instructions and GPUs of this machine. Print a line per
library: built, present, or the reason why not. The libraries fit the installed torch only. The
output of ptxas stays beside the kernels for scripts/check_kernels.py. Missing libraries are built
at first use.
"""

import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from offload_rt.ops import build, cpu, extension


def main() -> None:
    """Build all libraries and remove those of earlier sources."""
    if "--this-machine" in sys.argv[1:]:
        targets = extension.targets()
        recipes = [build.cpu(cpu.level()), *([build.kernels(targets)] if targets else [])]
    else:
        # Tests use every instruction set of this machine.
        levels = range(cpu.level() + 1)
        recipes = [*map(build.cpu, levels), build.kernels(build.architectures())]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_build, recipes))


def _build(recipe: build.Recipe) -> None:
    start = time.perf_counter()
    target = build.PACKAGE / recipe.file
    for path in build.PACKAGE.glob(f"_{recipe.name}-*"):
        if path.stem != target.stem:
            path.unlink()
    in_folder = build.PACKAGE.parents[1] / "build" / recipe.file  # of `pip install .`
    if recipe.compiler == "g++" and in_folder.exists() and not target.exists():
        unfinished = target.with_suffix(".tmp")
        shutil.copy2(in_folder, unfinished)
        unfinished.replace(target)
    if target.exists():
        print(f"{recipe.name}: present")
        return
    try:
        recipe.build(target)
    except build.NotBuilt as error:
        print(f"{recipe.name}: not built, {error}")
    else:
        print(f"{recipe.name}: built in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
