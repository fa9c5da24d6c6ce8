"""Are the ops of csrc/ and whole models right on a card?"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from bench.common.measure import ROOT
from offload_rt.ops import extension

EXPECTED_S = 80
KERNELS = "tests/ops/test_kernels.py"
# Test files with tests that need a card, and the processes of each run.
ON_CARD = {
    "tests/engine/test_cuda.py": 4,
    KERNELS: 4,
    "tests/ops/test_few_rows.py": 1,
    "tests/ops/test_dequantize.py": 1,
    "tests/offload/test_lossless.py": 1,
    "tests/offload/test_streamers.py": 1,
}
PYTEST = (
    sys.executable, "-m", "pytest", "-o", "addopts=", "-o", "faulthandler_timeout=45", "-rfE",
    "--tb=short", "-m", "cuda", "-p", "no:cacheprovider",
)  # fmt: skip


def measure() -> Iterator[dict[str, object]]:
    """Run all test files that need a card, at once.

    Yields the last lines of each; the whole output goes to stderr. Raises RuntimeError if a test
    failed, or if there are no kernels: their tests are skipped.
    """
    reason = extension.missing()
    results: dict[str, object] = {"kernels": reason or "built, and one was launched"}
    yield results
    failed = [reason] if reason else []
    with ThreadPoolExecutor(len(ON_CARD)) as pool:
        runs = {
            pool.submit(run, [*PYTEST, path, *(("-n", str(n)) if n > 1 else ())]): path
            for path, n in ON_CARD.items()
        }
        for done in as_completed(runs):
            code, results[runs[done]] = done.result()
            failed += [runs[done]] if code else []
            yield results
    if failed:
        raise RuntimeError(", ".join(failed))


def run(command: list[str], **surroundings: str) -> tuple[int, str]:
    """Run a command, copy its output to stderr, and return the exit code, and the last lines."""
    last: deque[str] = deque(maxlen=3)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | surroundings, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            last.extend([line.strip()] if line.strip() else [])
    return process.returncode, "; ".join([*last, f"exit code {process.returncode}"])
