"""Build csrc/ into the package: the kernels where there is nvcc, the CPU library where there is
g++.

    python scripts/build_kernels.py

One line for each says what was built, or why not. It needs the torch that the libraries are to run
with. What ptxas said stays beside the kernels for scripts/check_kernels.py. Where this was not
done, offload_rt builds what it needs when it first runs.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

from offload_rt.ops import build, cpu


def main() -> None:
    """Build what can be built here, in place of what was there."""
    # Tests use every instruction set of this machine.
    levels = range(cpu.level() + 1)
    recipes = [*map(build.cpu, levels), build.kernels(build.architectures())]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(_build, recipes))


def _build(recipe: build.Recipe) -> None:
    start = time.perf_counter()
    for path in build.PACKAGE.glob(f"_{recipe.name}-*"):
        path.unlink()
    try:
        recipe.build(build.PACKAGE / recipe.file)
    except build.NotBuilt as error:
        print(f"{recipe.name}: not built, {error}")
    else:
        print(f"{recipe.name}: built in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
