"""Memory, caches and CUDA devices that this process may use."""

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

# Control groups by controller (none in version 2): folder, limit file and usage file.
_CGROUPS = {
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def memory_limit() -> int:
    """Return the memory limit of this process: machine, container or address space."""
    limits = [limit for _, limit, _ in _cgroups()]
    limits += [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    finite = (limit for limit in limits if limit != resource.RLIM_INFINITY)
    return min([int(psutil.virtual_memory().total), *finite])


def cache_nbytes() -> int:
    """Return the bytes of the largest cache of the first core; 0 if unknown."""
    paths = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(_lines(path)[0].removesuffix("K")) << 10 for path in paths), default=0)


def busy_cpus() -> float:
    """Measure the CPUs that other programs use, while this process sleeps."""
    return float(psutil.cpu_percent(interval=0.25)) / 100 * (psutil.cpu_count() or 1)


def cards() -> list[str]:
    """Return the names of NVIDIA GPUs known to the driver; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        pynvml.nvmlShutdown()
        return names
    except pynvml.NVMLError:
        return []


def memory_free() -> int:
    """Return the bytes this process may allocate without swapping or exceeding its container."""
    resident = psutil.Process().memory_info().rss
    free = min(psutil.virtual_memory().available, memory_limit() - resident)
    for folder, limit, usage in _cgroups():
        stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
        # Usage includes page cache, which the kernel reclaims on demand.
        cached = sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))
        free = min(free, limit - usage + cached)
    return max(int(free), 0)


def _cgroups() -> Iterator[tuple[Path, int, int]]:
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        for name in _CGROUPS.keys() & controllers.split(","):
            root, limit_name, usage_name = _CGROUPS[name]
            folder = root / path.strip("/")
            for group in (folder, *folder.parents):
                limit = _read_number(group / limit_name) if group.is_relative_to(root) else None
                if limit is not None:
                    yield group, limit, _read_number(group / usage_name) or 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None
