"""Least cycles of the instructions that a product executes, on Zen 4.

A child process executes the product in single steps (Linux, x86-64). Each instruction occupies
pipes for vectors, a load port and a place among those that a cycle dispatches. The limit omits
dependencies, cache misses and wrong predictions.
"""

import ctypes
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path

_TRACEME, _PEEKUSER, _SINGLESTEP = 0, 3, 9
_RIP = 16 * 8  # place of the register in `struct user`
_DISPATCHED = 6  # instructions per cycle
_LOADS = 3  # per cycle; of 256 bits 2, of 512 bits 1
# The pipes of the vector unit, 0 to 3, that may execute an instruction of 256 bits, and their
# cycles; 512 bits take twice as long. The first pattern that matches counts. Measured on Zen 4 by
# loops of one and of two instructions.
_WORK = tuple(
    (re.compile(pattern), parts)
    for pattern, parts in (
        ("vcvtne2ps2bf16", (("23", 1.5),)),
        ("vcvtph2ps|vcvtps2ph", (("12", 1), ("23", 1))),
        ("vp?gather", (("0123", 32),)),
        ("vfn?m|vmul|vdpbf16|vpmul|vpmadd|vpdp|vp?cmp.*%k|vptestn?m", (("01", 1),)),
        ("vh", (("12", 2), ("23", 1))),
        ("vadd|vsub|vcvt|vps[rl][la]", (("23", 1),)),
        ("vp?unpck|vshufp", (("123", 1),)),
        (r"vpmov|vp?perm|vpshuf|vshuf|vpalignr|vpack|vp?insert|vp?extract|vp?blendv", (("12", 1),)),
        (r"vp?broadcast\S+ +%", (("12", 1),)),
        ("vp?(and|or|xor|tern|add|sub|blend|sign|abs|max|min|cmp)", (("0123", 1),)),
    )
)
_LOAD = re.compile(r"(?!lea|nop)\S+ .*\)(\{1to\d+\})?,|cmp\S* .*\)$|prefetch")
_WIDENS = re.compile(r"vpmov[sz]x|vcvtph2ps|.*\{1to")  # loads fewer bits than it computes


def count_instructions(library: Path, work: Callable[[], object]) -> Counter[str]:
    """Return how often work() executes each instruction of a library, in objdump's notation."""
    system = ctypes.CDLL(None)
    system.ptrace.restype = ctypes.c_long
    system.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if (child := os.fork()) == 0:
        system.ptrace(_TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        work()
        os._exit(0)
    os.waitpid(child, 0)
    maps = [line.split() for line in Path(f"/proc/{child}/maps").read_text().splitlines()]
    spans = [fields[0].split("-") for fields in maps if fields[-1] == str(library)]
    first = int(spans[0][0], 16)
    last = int(spans[-1][1], 16)
    steps: Counter[int] = Counter()
    while system.ptrace(_SINGLESTEP, child, None, None) == 0:
        status = os.waitpid(child, 0)[1]
        if not os.WIFSTOPPED(status):
            break
        if os.WSTOPSIG(status) != signal.SIGTRAP:
            os.kill(child, signal.SIGKILL)
            raise RuntimeError(f"{library} stopped with signal {os.WSTOPSIG(status)}")
        place = system.ptrace(_PEEKUSER, child, _RIP, None)
        if first <= place < last:
            steps[place - first] += 1
    counts: Counter[str] = Counter()
    for place, text in _instructions(library).items():
        counts[text] += steps[place]
    return +counts


@cache
def _instructions(library: Path) -> dict[int, str]:
    command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = (line.split(":\t") for line in listing.splitlines() if ":\t" in line)
    return {int(place, 16): text.split("#")[0].strip() for place, text in lines}


def least_cycles(counts: Counter[str]) -> float:
    """Return the largest of the limits by vector pipes, by loads and by dispatch."""
    work: Counter[str] = Counter()
    loads = 0.0
    for text, n in counts.items():
        is_wide = "%zmm" in text
        if _LOAD.match(text):
            is_wide_load = is_wide and not _WIDENS.match(text)
            loads += n * (1 if is_wide_load else 1 / 2 if text.startswith("v") else 1 / _LOADS)
        parts = next((parts for pattern, parts in _WORK if pattern.match(text)), ())
        for pipes, cycles in parts:
            work[pipes] += n * cycles * (2 if is_wide else 1)
    # Instructions that may use these pipes only.
    pipe_limits = [
        sum(cycles for pipes, cycles in work.items() if set(pipes) <= set(some)) / size
        for size in range(1, 5)
        for some in combinations("0123", size)
    ]
    return max(*pipe_limits, loads, counts.total() / _DISPATCHED)
