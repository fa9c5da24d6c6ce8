"""Check the packages that pyproject.toml requires: `requirements.py SITE [WHEELS]`.

Installs the wheels of missing or outdated packages into the folder SITE; torch is used as it is.
Prints each version.
"""

import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_TESTS = ("pytest", "hypothesis")


def requirements() -> list[Requirement]:
    """Read the requirements of the package, and of its tests, from pyproject.toml."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    tests = map(Requirement, project["optional-dependencies"]["dev"])
    return [
        *map(Requirement, project["dependencies"]),
        *(requirement for requirement in tests if requirement.name in _TESTS),
    ]


def unmet(required: list[Requirement]) -> list[Requirement]:
    """Print the installed version of each package. Return the unmet requirements."""
    lacking = []
    for requirement in required:
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            installed = "missing"
        print(f"{requirement.name} {installed}")
        if installed == "missing" or not requirement.specifier.contains(
            installed, prereleases=True
        ):
            lacking.append(requirement)
    return lacking


def main() -> int:
    """Install what is lacking from the wheels. Exit code 1 where something stays unmet."""
    site, *wheels = map(Path, sys.argv[1:])
    lacking = unmet(requirements())
    names = {requirement.name for requirement in lacking} - {"torch"}
    files = [
        path
        for folder in wheels
        for path in folder.glob("*.whl")
        if parse_wheel_filename(path.name)[0] in names
    ]
    if files:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--target",
            str(site),
        ]
        subprocess.run([*command, *map(str, files)], check=True)
        carried = {
            parse_wheel_filename(path.name)[0]: parse_wheel_filename(path.name)[1] for path in files
        }
        lacking = [
            requirement
            for requirement in lacking
            if requirement.name not in carried
            or not requirement.specifier.contains(carried[requirement.name])
        ]
    if lacking:
        print("unmet, give a folder of wheels:", ", ".join(map(str, lacking)))
        return 1
    print("installed:", ", ".join(path.name for path in files) or "nothing was lacking")
    return 0


if __name__ == "__main__":
    sys.exit(main())
