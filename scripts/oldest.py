"""Print the oldest admitted version of each dependency as constraints for pip.

    python scripts/oldest.py > oldest.txt
    pip install -e ".[dev]" -c oldest.txt

torch is left out: its oldest admitted version has no CPU build on PyPI, and its CUDA build is gigabytes.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement


def main() -> None:
    """Print one `name==version` for each dependency, extras included."""
    oldest = {}
    for line in requires("offload-rt") or ():
        requirement = Requirement(line)
        (bound,) = (one.version for one in requirement.specifier if one.operator == ">=")
        oldest[requirement.name] = bound
    del oldest["torch"]
    print(*(f"{name}=={version}" for name, version in sorted(oldest.items())), sep="\n")


if __name__ == "__main__":
    main()
