"""What the machine can do at most: a copy from pinned memory, a copy on the card, a matrix product."""

from collections.abc import Iterator

import torch

from bench.gpu.timing import CARD, device_gbps, seconds
from offload_rt.engine.profile import upload_gbps

EXPECTED_S = 30
_NBYTES, _WIDTH = 2 << 30, 8192


def measure() -> Iterator[dict[str, object]]:
    """GB/s of both copies, counting bytes read and written on the card, and TFLOP/s in bf16."""
    a, b = (torch.randn(_WIDTH, _WIDTH, dtype=torch.bfloat16, device=CARD) for _ in range(2))
    product = seconds(lambda: torch.mm(a, b))
    yield {
        "pinned_host_to_device_gbps": upload_gbps(CARD, _NBYTES),
        "device_copy_gbps": device_gbps(_NBYTES),
        "bf16_matrix_product_tflops": 2 * _WIDTH**3 / product.median / 1e12,
    }
