"""Ceilings of the machine: a copy from pinned memory, a copy on the GPU, a matrix product.

Layers are copied in chunks that alternate two streams. Their rates by chunk size are measured
beside one copy on one stream.
"""

from collections.abc import Iterator
from unittest.mock import patch

import torch

from bench.common.measure import Spread
from bench.gpu.timing import CARD, device_gbps, seconds
from offload_rt.engine.profile import upload_gbps
from offload_rt.offload import copy_device
from offload_rt.offload.pinning import pin, unpin
from offload_rt.weights.layout import host_block

EXPECTED_S = 40
_NBYTES = 2 << 30
_WIDTH = 8192
_CHUNKS_MIB = (32, 64, 128)
_ROUNDS = 5


def measure() -> Iterator[dict[str, object]]:
    """GB/s of copies, counting bytes read and written on the card, and TFLOP/s in bf16."""
    a, b = (torch.randn(_WIDTH, _WIDTH, dtype=torch.bfloat16, device=CARD) for _ in range(2))
    product = seconds(lambda: torch.mm(a, b))
    yield {
        "pinned_host_to_device_gbps": upload_gbps(CARD, _NBYTES),
        "in_chunks_gbps": chunked_gbps(_NBYTES),
        "device_copy_gbps": device_gbps(_NBYTES),
        "bf16_matrix_product_tflops": 2 * _WIDTH**3 / product.median / 1e12,
    }


def chunked_gbps(nbytes: int) -> dict[str, float]:
    """Measure GB/s of the streamer's copies by chunk size in MiB, interleaved; the median of some
    rounds.
    """
    source = host_block(nbytes)
    target = torch.empty(nbytes, dtype=torch.uint8, device=CARD)
    device = copy_device.CopyDevice(CARD)
    taken = {size: list[float]() for size in _CHUNKS_MIB}
    pin(source)
    try:
        for _ in range(1 + _ROUNDS):
            for size, times in taken.items():
                with patch.object(copy_device, "_CHUNK", size << 20):
                    start, end = device.copy([(target, source)], device.event())
                device.wait(end)
                times.append(device.seconds_between(start, end) or 0.0)
    finally:
        unpin(source)
    return {
        f"{size} MiB": nbytes / Spread.of(times[1:]).median / 1e9 for size, times in taken.items()
    }
