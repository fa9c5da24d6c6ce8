"""What ptxas made of each kernel, as one table. Fails where a register was spilled.

    python scripts/check_kernels.py

Reads the reports that scripts/build_kernels.py leaves in build/kernels; without nvcc there are none, and nothing is checked.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from build_kernels import ARCHITECTURES, BUILD, SOURCES, nvcc

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_TILE = re.compile(r"Tile<.*?, (\d+), (\d+), (\d+)>")


@dataclass
class Report:
    """One kernel on one architecture; sizes in bytes."""

    kernel: str
    arch: str
    registers: int = 0
    frame: int = 0
    spilled: int = 0

    @property
    def shared(self) -> str:
        """What a block of tree attention asks for; the others ask by the size of their input."""
        tile = _TILE.search(self.kernel)
        if tile is None:
            return "-"
        dim, row_tiles, keys = map(int, tile.groups())
        return str((64 * row_tiles + 4 * keys) * 2 * dim)


def reports(text: str) -> Iterator[Report]:
    """The kernels of one report of ptxas."""
    report = None
    for line in text.splitlines():
        if found := _ENTRY.search(line):
            report = Report(found[1], found[2])
        elif report and (found := _FRAME.search(line)):
            report.frame, report.spilled = int(found[1]), int(found[2]) + int(found[3])
        elif report and (found := _USED.search(line)):
            report.registers = int(found[1])
            yield report
            report = None


def demangled(found: list[Report]) -> list[Report]:
    """With names as they are written, without what all of them have in common."""
    names = subprocess.run(
        ["c++filt"], input="\n".join(one.kernel for one in found), capture_output=True, text=True, check=True
    )
    for one, name in zip(found, names.stdout.splitlines(), strict=True):
        short = re.sub(r"offload_rt::|\(anonymous namespace\)::|^void ", "", name)
        one.kernel = re.sub(r"\(.*$", "", short).replace("> >", ">>")
    return sorted(found, key=lambda one: (one.kernel, one.arch))


def main() -> None:
    """Print the table; exit 1 where a kernel is missing or spills."""
    if nvcc() is None:
        print("kernels: not checked, there is no nvcc")
        return
    found = []
    changed = max(path.stat().st_mtime for path in SOURCES.iterdir())
    for source in sorted(SOURCES.glob("*.cu")):
        log = BUILD / f"{source.stem}.ptxas"
        if not log.exists() or log.stat().st_mtime < changed:
            sys.exit("kernels: csrc/ has changed since it was built; run scripts/build_kernels.py")
        found += reports(log.read_text(encoding="utf-8"))
    print(f"{'kernel':<58} {'arch':>4} {'registers':>9} {'shared':>7} {'frame':>5} {'spilled':>7}")
    for one in demangled(found):
        print(f"{one.kernel:<58} {one.arch:>4} {one.registers:>9} {one.shared:>7} {one.frame:>5} {one.spilled:>7}")
    absent = set(ARCHITECTURES) - {one.arch for one in found}
    spilling = [one for one in found if one.spilled]
    if absent or spilling:
        sys.exit(f"kernels: {len(spilling)} spill registers, {len(absent)} architectures are missing")


if __name__ == "__main__":
    main()
