"""Generation by Llama2-70B's shape on a card whose link is slowed to that of a consumer card.

A kernel spins behind each chunk on the copy stream, so an H200 stands for PCIe 4.0. Its compute
remains that of an H200.
"""

from collections.abc import Iterator
from functools import cache
from unittest.mock import patch

import torch

from bench.gpu import generation
from bench.gpu.generation import Shapes
from bench.gpu.timing import CARD
from offload_rt.engine.profile import timed, upload_gbps
from offload_rt.offload.copy_device import CHUNK, CopyDevice
from offload_rt.offload.memory import pin, unpin
from offload_rt.weights.layout import host_block

EXPECTED_S = 200
GBPS = 25.0
_NBYTES = 128 << 20
_N_CYCLES = 100_000_000
_SHAPES = Shapes(n_new=48, temperatures=(0.0,))


class PacedDevice(CopyDevice):
    """A CUDA device with copies slowed to `GBPS`."""

    def __init__(self, device: torch.device, chunk_nbytes: int = CHUNK) -> None:
        super().__init__(device, chunk_nbytes)
        self._cycles_per_byte = spin_cycles_per_byte(device)

    def _move(self, to: torch.Tensor, source: torch.Tensor) -> None:
        super()._move(to, source)
        torch.cuda._sleep(int(len(to) * self._cycles_per_byte))


@cache
def spin_cycles_per_byte(device: torch.device) -> float:
    """Measure the clock of the spinning kernel. Return the cycles that `GBPS` leave for each byte
    beside its copy.
    """
    seconds = timed(device, lambda: torch.cuda._sleep(_N_CYCLES))
    return _N_CYCLES / min(seconds) * max(1 / GBPS - 1 / upload_gbps(device), 0.0) / 1e9


def measure(shapes: Shapes = _SHAPES) -> Iterator[dict[str, object]]:
    """Results of `generation` with the rate of the paced link."""
    link = f"{torch.cuda.get_device_name()}, link paced to {GBPS:.0f} GB/s"
    with patch("offload_rt.engine.loader.CopyDevice", PacedDevice):
        gbps = paced_gbps(CARD)
        for result in generation.measure(shapes):
            yield {"link": link, "link_gbps": gbps, **result}


def paced_gbps(device: torch.device) -> float:
    """Measure GB/s of a copy over the paced link."""
    source = host_block(_NBYTES)
    target = torch.empty(_NBYTES, dtype=torch.uint8, device=device)
    pin(source)
    link = PacedDevice(device)
    try:
        start, end = link.copy([(target, source)], link.event())
        link.wait(end)
        return _NBYTES / (link.seconds_between(start, end) or 0.0) / 1e9
    finally:
        unpin(source)
