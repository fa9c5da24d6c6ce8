"""Run the marked commands of README.md verbatim: `python scripts/run_readme.py`.

Blocks of `sh runnable` and `python runnable` run in their order, in the root of the repository. The
commands use an empty virtual environment that sees the packages of `.venv`, so that `pip install .`
installs only this package. `make` obeys its variables in the environment, e.g. SIZE and TOKENS.
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```(sh|python) runnable\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, str]]:
    """Return language and content of the marked blocks."""
    return _BLOCK.findall(text)


def _new_environment(folder: Path) -> dict[str, str]:
    """Create a virtual environment; return the variables that activate it."""
    venv.create(folder, with_pip=True)
    packages = next((ROOT / ".venv" / "lib").glob("python3*")).name
    site = Path("lib", packages, "site-packages")
    (folder / site / "dependencies.pth").write_text(f"{ROOT / '.venv' / site}\n")
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "VIRTUAL_ENV": str(folder), "PIP_QUIET": "1"}


def main() -> int:
    """Run all blocks; returns the exit code of the first failure, or 0."""
    with tempfile.TemporaryDirectory() as folder:
        environment = _new_environment(Path(folder))
        for language, content in blocks((ROOT / "README.md").read_text(encoding="utf-8")):
            print(f"--- {language}\n{content}", flush=True)
            command = ["bash", "-euc"] if language == "sh" else ["python", "-c"]
            run = subprocess.run([*command, content], check=False, cwd=ROOT, env=environment)
            code = run.returncode
            if code:
                print(f"failed with exit code {code}", file=sys.stderr)
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
