"""Does every op of csrc/ give what its reference gives, and does none touch memory that is not its own?"""

import shutil
import subprocess
import sys

from bench._measure import ROOT

EXPECTED_S = 120
_TESTS = ("tests/test_kernels.py", "tests/test_contracts_stream.py", "tests/test_speculation.py")


def measure() -> dict[str, object]:
    """What pytest says of the tests that run on a card, and the memory checker of the kernels' own."""
    found: dict[str, object] = {"tests": _last_lines([sys.executable, "-m", "pytest", "-q", "-rs", *_TESTS])}
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        return found | {"memory_checker": "not installed"}
    told = _last_lines([checker, "--tool", "memcheck", sys.executable, "-m", "pytest", "-q", _TESTS[0], "-k", "card"])
    return found | {"memory_checker": told}


def _last_lines(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return " | ".join(lines[-4:]) + f" | exit code {done.returncode}"
