"""Compute experts on the host, in place, while further experts are copied to the device."""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, islice
from statistics import median

import numpy as np
import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.cost.pass_times import ComputeTimes
from offload_rt.models.layers import HostWork, LayerWeights
from offload_rt.system.numa import Cpus, stay_near
from offload_rt.weights.layout import Layout, PackedLayer

# Row counts and number of experts per timing. Each timing uses different experts, to avoid caches.
_WIDTHS = (1, 8, 64)
_N_TIMED = 5


class HostExperts:
    """Thread that computes experts from host memory on rows copied to the host.

    Missing experts of a layer are split between sequential copies and host compute, so that the
    later of both ends as early as possible. The split follows from row counts and measured rates.
    """

    def __init__(
        self,
        image: Callable[[int], PackedLayer],
        view: Callable[[Layout, Tensor], LayerWeights],
        copy_s: float,
        device: torch.device,
        n_threads: int,
        cpus: Cpus = frozenset(),
    ) -> None:
        """image: returns a present block; n_threads: threads per product; cpus: CPU affinity."""
        self._image = image
        self._view = view
        self._device = device
        self.copy_s = copy_s  # seconds of copying an expert to the device
        # Seconds per expert by row count, including row transfer; None until measured.
        self.times: ComputeTimes | None = None
        self.is_on = False  # False to copy all experts
        self.release: Callable[[int], None] = lambda block: None  # called after each block

        def begin() -> None:
            stay_near(cpus)
            torch.set_num_threads(n_threads)  # for this thread and its new worker threads

        self._thread = ThreadPoolExecutor(1, "experts", begin)

    def close(self) -> None:
        """Wait for running work and stop the thread."""
        self._thread.shutdown()

    def select(
        self,
        missing: Mapping[int, int],
        use: np.ndarray,
        coming: Collection[int] = (),
        n_before: int = 0,
    ) -> list[int]:
        """Select the missing blocks to compute on the host, in ascending order.

        missing   rows per missing block
        use       usage of every block; blocks with the most rows are copied, then the most used
        coming    missing blocks already being copied
        n_before  copies of further blocks in progress
        """
        if self.times is None or not self.is_on:
            return []
        blocks = sorted(
            missing, key=lambda block: (block not in coming, -missing[block], -use[block], block)
        )
        computed = self.times.at(np.array([missing[block] for block in blocks]))
        host_s = np.append(computed[::-1].cumsum()[::-1], 0.0)
        n_copied = np.arange(len(blocks) + 1)
        copies_s = self.copy_s * (n_copied + n_before) * (n_copied > 0)
        return sorted(blocks[int(np.maximum(host_s, copies_s).argmin()) :])

    def begin(self, first: int, blocks: Sequence[int], work: HostWork) -> "Future[list[Tensor]]":
        """Start computing blocks of a layer, counted from block `first`; see `finish`."""
        rows = [work.rows(block - first) for block in blocks]
        return self._thread.submit(self._compute_all, work, first, blocks, rows)

    def finish(self, begun: "Future[list[Tensor]]") -> list[Tensor]:
        """Return the outputs on the device. Raises errors of the computation."""
        return ops.to_device(begun.result(), self._device)

    def wait(self) -> None:
        """Wait for running work."""
        self._thread.submit(lambda: None).result()

    def _compute_all(
        self, work: HostWork, first: int, blocks: Sequence[int], rows: Sequence[Tensor]
    ) -> list[Tensor]:
        outputs = []
        waiting = deque(blocks)
        try:
            for x in rows:
                outputs.append(self._compute(work, first, waiting[0], x))
                self.release(waiting.popleft())
        finally:
            for block in waiting:
                self.release(block)
        return outputs

    @torch.inference_mode()
    def _compute(self, work: HostWork, first: int, block: int, rows: Tensor) -> Tensor:
        image = self._image(block)
        return work.compute(rows, block - first, self._view(image.layout, image.block))

    def measure(self, first: int, blocks: Sequence[int], row: Tensor, work: HostWork) -> None:
        """Time blocks of a layer, counted from block `first`, on copies of a row (1, width)."""
        numbers = cycle(blocks)
        on_link = 2 * row.nbytes / len(self._image(blocks[0]).block)

        def seconds(n_rows: int) -> float:
            times = []
            rows = row.repeat(n_rows, 1)
            for number in islice(numbers, _N_TIMED):
                started = time.perf_counter()
                self._compute(work, first, number, rows)
                times.append(time.perf_counter() - started)
            return median(times) + n_rows * on_link * self.copy_s

        # Discard the first timing, which includes kernel compilation.
        timed = self._thread.submit(lambda: [seconds(n) for n in (_WIDTHS[0], *_WIDTHS)])
        by_width = np.maximum.accumulate(timed.result()[1:])
        self.times = ComputeTimes(_WIDTHS, (0,), (tuple(by_width.tolist()),))
