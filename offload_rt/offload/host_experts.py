"""Experts that the host computes where they lie, while others are copied to the device."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, islice
from statistics import median

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.models.architecture import HostWork, LayerWeights
from offload_rt.offload.memory import MemoryTier
from offload_rt.system.machine import HostTimes
from offload_rt.system.numa import Cpus, stay_near
from offload_rt.weights.layout import Layout

# Rows that experts are timed with, and how many experts each: other ones each time, which no cache holds.
_WIDTHS, _N_TIMED = (1, 8, 64), 5


class HostExperts:
    """A thread that computes experts from their images in memory of the host, and rows that were brought there.

    Of those that a layer needs and the device lacks, so many are copied, one after the other, that the last copy and the last
    product here end as early as can be. That follows from counts and from rates that were measured once.

    times   seconds of an expert by its rows, what these take on the link included; None until some were timed
    copy_s  seconds of copying one to the device
    is_on   False: all are copied
    """

    def __init__(
        self, images: MemoryTier, view: Callable[[Layout, Tensor], LayerWeights], copy_s: float, device: torch.device,
        n_threads: int, cpus: Cpus = frozenset(),
    ) -> None:  # fmt: skip
        """n_threads: of a product; cpus: processors that they stay on, empty: all."""
        self._images, self._view, self._device, self.copy_s = images, view, device, copy_s
        self.times: HostTimes | None = None
        self.is_on = False

        def begin() -> None:
            stay_near(cpus)
            torch.set_num_threads(n_threads)  # of this thread, and of those that have not computed yet

        self._thread = ThreadPoolExecutor(1, "experts", begin)

    def close(self) -> None:
        """Wait for what is computed, and end the thread."""
        self._thread.shutdown()

    def choose(
        self, missing: Mapping[int, int], use: np.ndarray, coming: Collection[int] = (), n_before: int = 0
    ) -> list[int]:
        """Of blocks that the device lacks, with so many rows each, those that are computed here, by number.

        use       of each block; the most rows are copied, and of as many rows what is used most
        coming    those of which the copies are under way
        n_before  copies of other blocks under way
        """
        if self.times is None or not self.is_on:
            return []
        blocks = sorted(missing, key=lambda one: (one not in coming, -missing[one], -use[one], one))
        computed = self.times.at(np.array([missing[one] for one in blocks]))
        here, n_copied = np.append(computed[::-1].cumsum()[::-1], 0.0), np.arange(len(blocks) + 1)
        copies_s = self.copy_s * (n_copied + n_before) * (n_copied > 0)
        return sorted(blocks[int(np.maximum(here, copies_s).argmin()) :])

    def begin(self, first: int, blocks: Sequence[int], work: HostWork) -> "Future[list[Tensor]]":
        """Compute these, of a layer whose first expert is block `first`; see `finish`."""
        rows = [work.rows(one - first) for one in blocks]
        return self._thread.submit(self._compute, work, first, blocks, rows)

    def finish(self, begun: "Future[list[Tensor]]") -> list[Tensor]:
        """The outputs of each, on the device. Raises what computing them has raised."""
        return ops.to_device(begun.result(), self._device)

    @torch.inference_mode()
    def _compute(self, work: HostWork, first: int, blocks: Sequence[int], rows: Sequence[Tensor]) -> list[Tensor]:
        images = map(self._images.image, blocks)
        views = (self._view(image.layout, image.block) for image in images)
        return [work.compute(x, one - first, view) for x, one, view in zip(rows, blocks, views, strict=True)]

    def measure(self, first: int, n_experts: int, row: Tensor, work: HostWork) -> None:
        """Time experts of a layer on copies of a row (1, width)."""
        numbers, on_link = cycle(range(first, first + n_experts)), 2 * row.nbytes / len(self._images.image(first).block)

        def seconds(n_rows: int) -> float:
            found, rows = [], row.repeat(n_rows, 1)
            for one in islice(numbers, _N_TIMED):
                started = time.perf_counter()
                self._compute(work, first, [one], [rows])
                found.append(time.perf_counter() - started)
            return median(found) + n_rows * on_link * self.copy_s

        # The first ones do not count: kernels are compiled.
        _, *by_width = self._thread.submit(lambda: [seconds(n) for n in (_WIDTHS[0], *_WIDTHS)]).result()
        self.times = HostTimes(_WIDTHS, tuple(np.maximum.accumulate(by_width).tolist()))
