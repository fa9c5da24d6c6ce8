"""Build csrc/ into the package: the kernels where there is nvcc, the CPU library where there is
g++.

    python scripts/build_kernels.py

One line for each says what was built, or why not. It needs the torch that the libraries are to run
with. What ptxas said stays beside the kernels for scripts/check_kernels.py. Where this was not
done, offload_rt builds what it needs when it first runs.
"""

import time

from offload_rt.ops import build


def main() -> None:
    """Build what can be built here, in place of what was there."""
    for recipe in (build.CPU, build.kernels(build.architectures())):
        start = time.perf_counter()
        for path in build.PACKAGE.glob(f"_{recipe.name}-*"):
            path.unlink()
        try:
            recipe.build(build.PACKAGE / recipe.file)
        except build.NotBuilt as error:
            print(f"{recipe.name}: not built, {error}")
            continue
        print(f"{recipe.name}: built in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
