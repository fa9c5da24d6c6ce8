"""Direct reads of files and of their copies, each by the disk that finishes it first."""

import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from offload_rt.errors import CheckpointError, LinkError
from offload_rt.weights.header import TensorRecord, stamp_of
from offload_rt.weights.layout import PAGE, BlockRecord, align_up, host_block

# Evenly spaced pages of each file that the comparison of two copies reads.
_N_PAGES = 64
# A rate is the average over about this many bytes.
_WINDOW_NBYTES = 64 << 20

Stamps = Mapping[Path, tuple[int, int] | None]


@dataclass(frozen=True)
class Mirrors:
    """Directories with copies of files: below `root` at equal paths, others at the top."""

    root: Path
    folders: tuple[Path, ...] = ()

    @classmethod
    def from_setting(cls, folders: str | None, layers: Sequence[BlockRecord]) -> "Mirrors":
        """Return the mirrors of a checkpoint; `folders` are directories separated by commas."""
        names = folders.split(",") if folders else []
        paths = tuple(Path(name.strip()).expanduser() for name in names)
        return cls(layers[0].tensors[0].path.parent, paths)

    def open(self, folder: Path, names: Sequence[Path]) -> "Disk":
        """Open the copies of files in a directory; raises CheckpointError if they differ."""
        paths = dict[Path, Path]()
        for name in names:
            is_below = name.is_relative_to(self.root)
            paths[name] = folder / (name.relative_to(self.root) if is_below else name.name)
        try:
            stamps = {name: stamp_of(path.stat()) for name, path in paths.items()}
            differing = next((name for name in names if not _is_equal(name, paths[name])), None)
        except OSError as error:
            problem = f"--mirror {folder}: {error.filename}: {error.strerror}"
            change = "copy the whole checkpoint with its sidecar, or omit --mirror"
            raise CheckpointError(problem, change=change) from error
        if differing is not None:
            problem = f"--mirror: {paths[differing]} differs from {differing}"
            change = "copy the file again, or omit --mirror"
            raise CheckpointError(problem, need="an identical copy", change=change)
        return Disk(paths, stamps)


NO_MIRRORS = Mirrors(Path())


class Disk:
    """Opened files of a directory, named by their path in the checkpoint."""

    def __init__(self, paths: Mapping[Path, Path], stamps: Stamps) -> None:
        """stamps: of the unchanged files; None for any. Raises LinkError."""
        self._paths = paths
        self._stamps = stamps
        self._files: dict[Path, int] = {}
        self.in_flight = 0
        self._changed_s = 0.0
        self._done = 0
        self._busy_s = 0.0
        try:
            for name, path in paths.items():
                self._files[name] = _open(path)
                self._check(name)
        except LinkError:
            self.close()
            raise

    def __str__(self) -> str:
        return str(next(iter(self._paths.values())).parent)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def fill(self, name: Path, start: int, into: Tensor, need: int) -> None:
        """Read as `fill`. Raises LinkError, also if the file has changed."""
        fill(into, need, self._files[name], start, str(self._paths[name]))
        self._check(name)

    def begin(self, nbytes: int) -> None:
        """Count a request."""
        if not self.in_flight:
            self._changed_s = time.perf_counter()
        self.in_flight += nbytes

    def end(self, nbytes: int) -> None:
        """Count the end of a request and update the rate."""
        now = time.perf_counter()
        self._busy_s += now - self._changed_s
        self._changed_s = now
        self.in_flight -= nbytes
        self._done += nbytes
        if self._done > _WINDOW_NBYTES:
            self._done //= 2
            self._busy_s /= 2

    def seconds(self, nbytes: int) -> float:
        """Estimate the seconds until a further request ends. Without a rate, 1 GB/s counts."""
        rate = self._done / self._busy_s if self._done else 1e9
        return (self.in_flight + nbytes) / rate

    def _check(self, name: Path) -> None:
        stamp = self._stamps[name]
        if stamp is not None and stamp_of(os.fstat(self._files[name])) != stamp:
            raise LinkError(f"{self._paths[name]} changed while in use", change="run again")


class DirectFiles:
    """Files opened for direct I/O if supported, on their disk and its mirrors.

    Files are compared with the headers read earlier. Failing disks are dropped with a notice.
    """

    def __init__(self, records: Iterable[TensorRecord], mirrors: Mirrors = NO_MIRRORS) -> None:
        """Open the files of these tensors, and their copies; LinkError or CheckpointError."""
        self._bounce = threading.local()
        stamps = {record.path: record.stamp for record in records}
        names = sorted(stamps)
        self._all = [Disk({name: name for name in names}, stamps)]
        try:
            self._all.extend(mirrors.open(folder, names) for folder in mirrors.folders)
        except BaseException:
            self.close()
            raise
        self.n_disks = len(self._all)
        self._used = list(self._all)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the files of all disks."""
        for disk in self._all:
            disk.close()

    def bounced(self, path: Path, start: int, nbytes: int) -> Tensor:
        """Read (nbytes,) uint8 from any offset into a thread-local buffer; raises LinkError."""
        lead = start % PAGE
        need = lead + nbytes
        size = align_up(need, PAGE)
        if len(getattr(self._bounce, "block", ())) < size:
            self._bounce.block = host_block(size)
        block: Tensor = self._bounce.block[:size]
        self.fill(path, start - lead, block, need)
        return block[lead:need]

    def fill(self, path: Path, start: int, into: Tensor, need: int) -> None:
        """Read at least `need` bytes from page-aligned `start` into aligned memory; LinkError."""
        while True:
            disk = self.begin(need)
            try:
                return disk.fill(path, start, into, need)
            except LinkError as error:
                self._drop(disk, error)
            finally:
                with self._lock:
                    disk.end(need)

    def begin(self, nbytes: int) -> Disk:
        """Return the disk that finishes a request first, and count the request."""
        with self._lock:
            disk = min(self._used, key=lambda disk: disk.seconds(nbytes))
            disk.begin(nbytes)
        return disk

    def _drop(self, disk: Disk, error: LinkError) -> None:
        with self._lock:
            if disk not in self._used:
                return
            if len(self._used) == 1:
                raise error
            self._used.remove(disk)
            rest = ", ".join(map(str, self._used))
        notice = f"{disk} is no longer read: {error}; reading from {rest}"
        print(notice, file=sys.stderr, flush=True)


def fill(into: Tensor, need: int, file: int, start: int, name: str) -> None:
    """Read >= `need` bytes from byte `start`, directly if page-aligned; raises LinkError."""
    view = memoryview(into.numpy().data)
    n = 0
    while n < need:
        try:
            got = os.preadv(file, [view[n:]], start + n)
        except OSError as error:
            problem = f"reading {name} at byte {start + n} failed: {error.strerror}"
            raise LinkError(problem, change="check the disk and the file") from error
        if got == 0:
            problem = f"{name} ends at byte {start + n}"
            change = "it changed while in use: run again"
            raise LinkError(problem, need=f"{start + need} bytes", change=change)
        n += got


def _is_equal(first: Path, second: Path) -> bool:
    size = first.stat().st_size
    if second.stat().st_size != size:
        return False
    last = max(size - PAGE, 0)
    with first.open("rb") as a, second.open("rb") as b:
        starts = [last * i // (_N_PAGES - 1) for i in range(_N_PAGES)]
        pages = ([os.pread(file.fileno(), PAGE, start) for file in (a, b)] for start in starts)
        return all(mine == theirs for mine, theirs in pages)


def _open(path: Path) -> int:
    with suppress(OSError):  # no direct I/O on this file system, e.g. tmpfs
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        change = "check that the file exists and is readable"
        raise LinkError(f"{path}: {error.strerror}", change=change) from error
