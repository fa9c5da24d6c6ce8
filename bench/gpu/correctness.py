"""Are the ops of csrc/ and a whole model right on a card, and does the memory checker find
anything?
"""

import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterator

from bench.common.measure import ROOT
from offload_rt.ops import extension

EXPECTED_S = 180
_KERNELS = "tests/ops/test_kernels.py"
# Test files with tests that need a card.
ON_CARD = (
    _KERNELS,
    "tests/ops/test_few_rows.py",
    "tests/ops/test_dequantize.py",
    "tests/offload/test_lossless.py",
    "tests/offload/test_streamers.py",
    "tests/engine/test_cuda.py",
)
_PYTEST = (sys.executable, "-m", "pytest", "-o", "addopts=", "-rfE", "--tb=short")


def measure() -> Iterator[dict[str, object]]:
    """Build the kernels, run the tests that need a card, and the kernels' tests under the memory
    checker.

    Yields the last lines of each; the whole output goes to stderr.
    """
    results: dict[str, object] = {"kernels": extension.missing() or "built, and one was launched"}
    yield results
    for path in ON_CARD:
        results[path] = _run([*_PYTEST, path, "-m", "cuda"])
        yield results
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        yield results | {"memory checker": "not installed"}
        return
    # Without torch's caching allocator, or the checker sees only the ends of its large blocks.
    # Captures need it.
    checks = [checker, "--tool", "memcheck", "--error-exitcode", "1"]
    without_cache = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    yield results | {
        "memory checker": _run(
            [*checks, *_PYTEST, _KERNELS, "-m", "cuda", "-k", "not captured"], **without_cache
        )
    }


def _run(command: list[str], **surroundings: str) -> str:
    """Run a command, copy its output to stderr, and return the last lines and the exit code."""
    last: deque[str] = deque(maxlen=3)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | surroundings,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            last.extend([line.strip()] if line.strip() else [])
    return "; ".join([*last, f"exit code {process.returncode}"])
