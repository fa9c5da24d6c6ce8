"""Read rate of a disk, without the page cache."""

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PART_NBYTES = 8 << 20
_N_PARTS = 32
_N_THREADS = 4
# A fresh file may not be where later reads find it; other programs disturb single rounds.
_N_ROUNDS = 3


def measure_disk_gbps(folder: Path) -> float | None:
    """Write a file of 256 MiB and return the best GB/s with O_DIRECT, or None if impossible."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            for _ in range(_N_PARTS):
                file.write(os.urandom(_PART_NBYTES))
            file.flush()
            os.fsync(file.fileno())
            return _read_gbps(file.name)
    except OSError:
        return None


def _read_gbps(path: str) -> float:
    # Anonymous mappings are aligned as O_DIRECT requires. Their pages exist before the reads.
    buffers = [mmap.mmap(-1, _PART_NBYTES) for _ in range(_N_THREADS)]
    for buffer in buffers:
        buffer.write(bytes(_PART_NBYTES))

    def read(i: int) -> None:
        for part in range(i, _N_PARTS, _N_THREADS):
            os.preadv(descriptor, [buffers[i]], part * _PART_NBYTES)

    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with ThreadPoolExecutor(_N_THREADS) as pool:
            seconds = []
            for _ in range(_N_ROUNDS):
                started = time.perf_counter()
                list(pool.map(read, range(_N_THREADS)))
                seconds.append(time.perf_counter() - started)
        return _N_PARTS * _PART_NBYTES / min(seconds) / 1e9
    finally:
        os.close(descriptor)
