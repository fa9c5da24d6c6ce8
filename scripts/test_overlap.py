"""List what each test adds: its seconds, and the package lines that no other test executes.

`python scripts/test_overlap.py [pytest arguments]` runs the tests under coverage (pytest-cov) with
one context per test, then prints a line per test function. `--report-only` reads the data of the
previous run. Programs that tests start are not traced: check their tests by hand.
"""

import argparse
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path

FOLDER = Path("build/overlap")
DATA = FOLDER / "coverage"
TIMES = FOLDER / "junit.xml"


def measure(arguments: list[str]) -> None:
    """Run pytest; keep the lines of each test and its duration."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    settings = FOLDER / "coveragerc"
    settings.write_text(f"[run]\ndata_file = {DATA}\nconcurrency = thread\n")
    coverage = ["--cov=offload_rt", "--cov-context=test", f"--cov-config={settings}"]
    outputs = ["--cov-report=", f"--junitxml={TIMES}", "-o", "junit_family=xunit1"]
    subprocess.run([sys.executable, "-m", "pytest", *coverage, *outputs, *arguments], check=False)


def durations() -> dict[str, float]:
    """Return the seconds of each test, by node id."""
    seconds = {}
    for case in ET.parse(TIMES).getroot().iter("testcase"):
        seconds[f"{case.get('file')}::{case.get('name')}"] = float(case.get("time") or 0)
    return seconds


def lines_by_test() -> dict[str, set[tuple[str, int]]]:
    """Return the executed (file, line) pairs of each test with its set-up, by node id."""
    from coverage import CoverageData

    data = CoverageData(str(DATA))
    data.read()
    lines: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for path in data.measured_files():
        for line, contexts in data.contexts_by_lineno(path).items():
            for context in contexts:
                if context:
                    lines[context.rpartition("|")[0]].add((path, line))
    return lines


def report(seconds: dict[str, float], lines: dict[str, set[tuple[str, int]]]) -> str:
    """Return one line per test function, the slowest first: cases, seconds and unique lines."""
    cases: dict[str, list[str]] = defaultdict(list)
    for case in seconds:
        cases[case.partition("[")[0]].append(case)
    executed = {
        test: set().union(*(lines.get(case, set()) for case in names))
        for test, names in cases.items()
    }
    count = Counter(line for own in executed.values() for line in own)
    rows = [
        (
            sum(seconds[case] for case in names),
            len(names),
            sum(count[i] == 1 for i in executed[test]),
            test,
        )
        for test, names in cases.items()
    ]
    table = [
        f"{s:7.2f} s {n:4} cases {unique:5} lines  {test}"
        for s, n, unique, test in sorted(rows, reverse=True)
    ]
    return "\n".join(table)


def main() -> None:
    """Measure unless told otherwise, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report-only", action="store_true", help="read the previous run's data")
    options, arguments = parser.parse_known_args()
    if not options.report_only:
        measure(arguments)
    print(report(durations(), lines_by_test()))


if __name__ == "__main__":
    main()
