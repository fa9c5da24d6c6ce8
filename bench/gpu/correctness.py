"""Does every op of csrc/ give what its reference gives, does none touch memory that is not its own, and a whole model?"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

from bench.measure import ROOT

EXPECTED_S = 180
_KERNELS = "tests/test_kernels.py"
# Of these, what runs on a card; the rest of them is for a machine without one.
_ON_CARD = ((_KERNELS, "card"), ("tests/test_contracts_stream.py", "real"), ("tests/test_card.py", "real"))


def measure() -> Iterator[dict[str, object]]:
    """What pytest says of the tests that run on a card, and the memory checker of the kernels' own."""
    found: dict[str, object] = {}
    for path, those in _ON_CARD:
        found[path] = _last_lines([sys.executable, "-m", "pytest", "-q", "-rs", path, "-k", those])
        yield found
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        yield found | {"memory checker": "not installed"}
        return
    # torch's own allocator would hand out parts of large blocks, of which the checker sees only the ends; captures need it.
    pytest = [sys.executable, "-m", "pytest", "-q", _KERNELS, "-k", "card and not captured"]
    told = _last_lines(
        [checker, "--tool", "memcheck", "--error-exitcode", "1", *pytest], PYTORCH_NO_CUDA_MEMORY_CACHING="1"
    )
    yield found | {"memory checker": told}


def _last_lines(command: list[str], **surroundings: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | surroundings)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return "; ".join([*lines[-3:], f"exit code {done.returncode}"])
