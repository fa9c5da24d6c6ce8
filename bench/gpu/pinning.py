"""Seconds to pin a block of host memory, with and without huge pages."""

import mmap
import time
from collections.abc import Iterator

import torch

from bench.gpu.timing import CARD
from offload_rt.offload.memory import pin, unpin

EXPECTED_S = 30
_NBYTES = 12 << 30
_NBYTES_COPIED = 256 << 20


def measure(nbytes: int = _NBYTES) -> Iterator[dict[str, object]]:
    """Seconds to map and pin fresh pages, and GB/s of a copy of the first of them."""
    torch.empty(1, device=CARD)
    results: dict[str, object] = {"nbytes": nbytes}
    for name, advice in (("huge pages", mmap.MADV_HUGEPAGE), ("small pages", mmap.MADV_NOHUGEPAGE)):
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(advice)
        block = torch.frombuffer(pages, dtype=torch.uint8)
        started = time.perf_counter()
        is_pinned = pin(block)
        seconds = time.perf_counter() - started
        results[name] = {"seconds": seconds, "pinned": is_pinned, "copy_gbps": _gbps(block)}
        yield results
        if is_pinned:
            unpin(block)


def _gbps(block: torch.Tensor) -> float:
    source = block[:_NBYTES_COPIED]
    target = torch.empty_like(source, device=CARD)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (torch.cuda.Event(), start, end):
        event.record()
        if event is not end:
            target.copy_(source, non_blocking=True)
    end.synchronize()
    return len(source) / start.elapsed_time(end) / 1e6
