"""Does the memory checker of CUDA find anything in the kernels' tests?"""

import shutil
from collections.abc import Iterator

from bench.gpu.correctness import KERNELS, PYTEST, run

EXPECTED_S = 150


def measure() -> Iterator[dict[str, object]]:
    """Run the kernels' tests under compute-sanitizer. Yields its last lines; the whole output goes
    to stderr.
    """
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        yield {"memory checker": "not installed"}
        return
    # Without torch's caching allocator, or the checker sees only the ends of its large blocks.
    # Captures need it.
    checks = [checker, "--tool", "memcheck", "--error-exitcode", "1"]
    _, verdict = run(
        [*checks, *PYTEST, KERNELS, "-k", "not captured"], PYTORCH_NO_CUDA_MEMORY_CACHING="1"
    )
    yield {"memory checker": verdict}
