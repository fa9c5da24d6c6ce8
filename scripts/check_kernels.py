"""What ptxas made of each kernel, as one table. Fails where a kernel spills registers that some
card runs.

    python scripts/check_kernels.py

Reads the report that scripts/build_kernels.py leaves beside the kernels; without nvcc there is
none, and nothing is checked.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from offload_rt.ops import build

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_TILE = re.compile(r"Tile<.*?, (\d+), (\d+), (\d+), (\d+)>")
# Bytes of shared memory of a multiprocessor, and its threads. Each block needs another kilobyte.
_SHARED = {"80": 164 << 10, "86": 100 << 10, "89": 100 << 10, "90": 228 << 10, "120": 100 << 10}
_THREADS = {"80": 2048, "86": 1536, "89": 1536, "90": 2048, "120": 1536}


@dataclass
class Report:
    """A kernel on an architecture; sizes in bytes."""

    kernel: str
    arch: str
    registers: int = 0
    frame: int = 0
    spilled: int = 0

    @property
    def shared(self) -> int | None:
        """Shared memory of a block of tree attention; None for kernels whose input sets it."""
        tile = _TILE.search(self.kernel)
        if tile is None:
            return None
        dim, row_tiles, keys, buffers = map(int, tile.groups())
        return (64 * row_tiles + 2 * buffers * keys) * 2 * dim

    @property
    def blocks(self) -> int | None:
        """How many blocks of tree attention, of four warps, a multiprocessor holds; 0 where such a
        tile is not chosen.
        """
        if self.shared is None:
            return None
        by_shared = _SHARED[self.arch] // (self.shared + 1024)
        is_large = re.search(r"Tile<.*?, \d+, 2, ", self.kernel) is not None
        by_registers = 65536 // (-(-self.registers // 8) * 8 * 128)
        return (
            0
            if is_large and by_shared < 2
            else min(by_shared, by_registers, _THREADS[self.arch] // 128)
        )


def reports(text: str) -> Iterator[Report]:
    """Yield the kernels of a ptxas report."""
    report = None
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            report = Report(match[1], match[2])
        elif report and (match := _FRAME.search(line)):
            report.frame, report.spilled = int(match[1]), int(match[2]) + int(match[3])
        elif report and (match := _USED.search(line)):
            report.registers = int(match[1])
            yield report
            report = None


def demangled(kernels: list[Report]) -> list[Report]:
    """Return the kernels sorted by readable name, without namespaces and arguments."""
    names = subprocess.run(
        ["c++filt"],
        input="\n".join(report.kernel for report in kernels),
        capture_output=True,
        text=True,
        check=True,
    )
    for report, name in zip(kernels, names.stdout.splitlines(), strict=True):
        short = re.sub(r"offload_rt::|\(anonymous namespace\)::|^void ", "", name)
        report.kernel = re.sub(r"\(.*$", "", short).replace("> >", ">>")
    return sorted(kernels, key=lambda report: (report.kernel, report.arch))


def main() -> None:
    """Print the table; exit 1 if a kernel is missing or spills registers."""
    architectures = build.architectures()
    log = (build.PACKAGE / build.kernels(architectures).file).with_suffix(".log")
    if not log.exists():
        if build.find_compiler("nvcc"):
            sys.exit("kernels: csrc/ has changed since it was built; run scripts/build_kernels.py")
        print("kernels: not checked, there is no nvcc")
        return
    all_reports = list(reports(log.read_text(encoding="utf-8")))
    print(
        f"{'kernel':<58} {'arch':>4} {'registers':>9} {'shared':>7} {'blocks':>6} {'frame':>5}"
        f" {'spilled':>7}"
    )
    for report in demangled(all_reports):
        sizes = (
            f"{'-' if size is None else size:>{width}}"
            for size, width in ((report.shared, 7), (report.blocks, 6))
        )
        print(
            f"{report.kernel:<58} {report.arch:>4} {report.registers:>9} {' '.join(sizes)}"
            f" {report.frame:>5} {report.spilled:>7}"
        )
    absent = {str(architecture) for architecture in architectures} - {
        report.arch for report in all_reports
    }
    spilling = [report for report in all_reports if report.spilled and report.blocks != 0]
    if absent or spilling:
        sys.exit(
            f"kernels: {len(spilling)} spill registers, {len(absent)} architectures are missing"
        )


if __name__ == "__main__":
    main()
