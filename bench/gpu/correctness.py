"""Are the ops of csrc/ and a whole model right on a card, and does the memory checker find anything?"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from bench.measure import ROOT

EXPECTED_S = 180
_KERNELS = "tests/test_kernels.py"
# Test files and the tests in them that need a card.
_ON_CARD = ((_KERNELS, "card"), ("tests/test_contracts_stream.py", "real"), ("tests/test_card.py", "real"))


def measure() -> Iterator[dict[str, object]]:
    """The last lines of pytest for the tests that need a card, and of the memory checker for the kernels' tests."""
    found: dict[str, object] = {}
    for path, those in _ON_CARD:
        found[path] = _last_lines([sys.executable, "-m", "pytest", "-q", "-rs", path, "-k", those])
        yield found
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        yield found | {"memory checker": "not installed"}
        return
    # Without torch's caching allocator, or the checker sees only the ends of its large blocks. Captures need it.
    pytest = [sys.executable, "-m", "pytest", "-q", _KERNELS, "-k", "card and not captured"]
    checked = _last_lines(
        [checker, "--tool", "memcheck", "--error-exitcode", "1", *pytest], PYTORCH_NO_CUDA_MEMORY_CACHING="1"
    )
    yield found | {"memory checker": checked}


def _last_lines(command: list[str], **surroundings: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | surroundings)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return "; ".join([*lines[-3:], f"exit code {done.returncode}"])
