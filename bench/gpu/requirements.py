"""Check the packages that pyproject.toml requires: `requirements.py SITE [WHEELS]`.

Installs all wheels of a folder into the folder SITE, which precedes installed packages. Prints each
installed version. Everything but long encodings also runs without numba.
"""

import importlib
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_TESTS = ("pytest", "pytest-xdist", "hypothesis")


def requirements() -> list[Requirement]:
    """Read the requirements of the package, and of its tests, from pyproject.toml."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    tests = map(Requirement, project["optional-dependencies"]["dev"])
    needed = (requirement for requirement in tests if requirement.name in _TESTS)
    return [*map(Requirement, project["dependencies"]), *needed]


def unmet(required: list[Requirement]) -> list[Requirement]:
    """Print the installed version of each package. Return the unmet requirements."""
    lacking: list[Requirement] = []
    for requirement in required:
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = "missing"
        print(f"{requirement.name} {installed}")
        is_met = installed != "missing" and requirement.specifier.contains(installed, True)
        if not is_met:
            lacking.append(requirement)
    return lacking


def main() -> int:
    """Install the wheels of a folder. Exit code 1 if a requirement stays unmet."""
    site, *folders = map(Path, sys.argv[1:])
    wheels = [path for folder in folders for path in sorted(folder.glob("*.whl"))]
    if wheels:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        options = ["--no-compile", "--no-cache-dir", "--target", str(site)]
        subprocess.run([*pip, *options, *map(str, wheels)], check=True)
    carried = dict(parse_wheel_filename(path.name)[:2] for path in wheels)
    lacking = []
    for requirement in unmet(requirements()):
        name = canonicalize_name(requirement.name)
        version = carried.get(name)
        is_met = version is not None and requirement.specifier.contains(version, prereleases=True)
        if not is_met and name != "numba":
            lacking.append(requirement)
    try:
        importlib.import_module("numba")  # it refuses a newer numpy
    except ImportError as error:
        print("without numba:", error)
    print("installed:", ", ".join(path.name for path in wheels) or "no wheels")
    if lacking:
        print("unmet, give a folder of wheels:", ", ".join(map(str, lacking)))
    return int(bool(lacking))


if __name__ == "__main__":
    sys.exit(main())
