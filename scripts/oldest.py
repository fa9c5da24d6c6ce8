"""Print the oldest admitted version of each dependency, as constraints for pip.

    python scripts/oldest.py > oldest.txt
    pip install -e ".[dev]" -c oldest.txt

torch keeps its installed version: PyPI has CUDA builds alone of torch 2.11, which download
gigabytes.
"""

from importlib.metadata import requires, version

from packaging.requirements import Requirement


def main() -> None:
    """Print one `name==version` for each dependency, extras included."""
    oldest = {}
    for line in requires("offload-rt") or ():
        requirement = Requirement(line)
        for bound in requirement.specifier:  # a pinned dependency has a single version
            if bound.operator == ">=":
                oldest[requirement.name] = bound.version
    oldest["torch"] = version("torch")
    print(*(f"{name}=={lower}" for name, lower in sorted(oldest.items())), sep="\n")


if __name__ == "__main__":
    main()
