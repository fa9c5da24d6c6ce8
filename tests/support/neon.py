"""The CPU library for aarch64 under qemu: its calls read and write the memory of this process."""

import ctypes
import shutil
import struct
import subprocess
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from offload_rt.ops import build
from support.emulated import built

CXX = "aarch64-linux-gnu-g++"
_PAGE = 4096
_QEMU = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def missing() -> str:
    """Name the missing programs; "" if there are none."""
    has_all = _QEMU is not None and shutil.which(CXX) is not None
    return "" if has_all else "needs qemu-aarch64 and aarch64-linux-gnu-g++"


class NeonLibrary:
    """Functions of the library by attribute; see `neon.cpp`, their arguments are integers."""

    def __init__(self) -> None:
        # Far from the addresses of this process, which the program reads at the same place.
        place = ("-no-pie", "-Wl,-Ttext-segment=0x300000000000")
        source = Path(__file__).with_suffix(".cpp")
        program = built(
            [source], lambda to: [CXX, "-std=c++20", "-O2", *place, str(source), "-o", str(to)]
        )
        folder, flags = str(build.SOURCES), build.cpu(0, "aarch64").arguments
        library = built(
            [Path(build.__file__), *sorted(build.SOURCES.glob("*cpu*"))],
            lambda to: ["env", "-C", folder, CXX, *flags, "-o", str(to)],
        )
        self._command = [str(_QEMU), "-L", "/usr/aarch64-linux-gnu", str(program), str(library)]
        self._process = self._start()
        self._lock = Lock()

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _call(self, function: str, *arguments: Any) -> int:
        with self._lock:
            return self._locked_call(function, *arguments)

    def _locked_call(self, function: str, *arguments: Any) -> int:
        while _overlap("self", str(self._process.pid)):
            self.stop()
            self._process = self._start()
        addresses = (ctypes.addressof(x._obj) if hasattr(x, "_obj") else x for x in arguments)
        numbers = [(x or 0) & (1 << 64) - 1 for x in addresses]
        self._send(struct.pack("64s11Q", function.encode(), *numbers, *[0] * (11 - len(numbers))))
        sent = {}
        while page := self._receive():
            sent[page] = ctypes.string_at(page, _PAGE)
            self._send(sent[page])
        while page := self._receive():
            old, new = (np.frombuffer(x, np.uint8) for x in (sent[page], self._read(_PAGE)))
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * _PAGE).from_address(page))
            memory[old != new] = new[old != new]
        return self._receive()

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(content)
        self._process.stdin.flush()

    def _read(self, nbytes: int) -> bytes:
        assert self._process.stdout is not None
        content = self._process.stdout.read(nbytes)
        assert len(content) == nbytes, "the program has ended"
        return content

    def _receive(self) -> int:
        return int(struct.unpack("Q", self._read(8))[0])


def _overlap(*processes: str) -> bool:
    """Whether two processes have mapped the same addresses."""
    maps = [Path("/proc", process, "maps").read_text(encoding="utf-8") for process in processes]
    lines = (line for text in maps for line in text.splitlines() if "[vsyscall]" not in line)
    places = sorted([int(end, 16) for end in line.split()[0].split("-")] for line in lines)
    return any(end > first for (_, end), (first, _) in pairwise(places))
