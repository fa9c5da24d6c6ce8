"""Ceilings of the machine: a copy from pinned memory, a copy on the GPU, a matrix product.

Layers are copied in chunks that alternate two streams. The last of their rates by chunk size is of
a single copy on one stream.
"""

from collections.abc import Iterator

import torch

from bench.gpu.timing import CARD, device_gbps, seconds
from offload_rt.engine.link_rates import chunk_rates, copy_chunk
from offload_rt.engine.profile import upload_gbps

EXPECTED_S = 20
_NBYTES = 2 << 30
_WIDTH = 8192


def measure() -> Iterator[dict[str, object]]:
    """GB/s of copies, counting bytes read and written on the card, and TFLOP/s in bf16."""
    a, b = (torch.randn(_WIDTH, _WIDTH, dtype=torch.bfloat16, device=CARD) for _ in range(2))
    figures: dict[str, object] = {"pinned_host_to_device_gbps": upload_gbps(CARD, _NBYTES)}
    yield figures
    product = seconds(lambda: torch.mm(a, b))
    figures["bf16_matrix_product_tflops"] = 2 * _WIDTH**3 / product.median / 1e12
    figures["device_copy_gbps"] = device_gbps(_NBYTES)
    yield figures
    figures["in_chunks_gbps"] = {
        f"{size >> 20} MiB": rate for size, rate in chunk_rates(CARD, _NBYTES).items()
    }
    figures["selected_chunk_mib"] = copy_chunk(CARD) >> 20
    yield figures
