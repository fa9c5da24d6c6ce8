"""Pinned host memory: blocks of any size, registered with the CUDA driver.

torch's pinned allocator rounds up to powers of two: 138 GB of weights would need 154 GB or more.
"""

from contextlib import suppress

import torch
from torch import Tensor

_SUCCESS = 0


def pin(block: Tensor) -> bool:
    """Register a block of host memory; return success (WSL and limits prevent it)."""
    if not torch.cuda.is_available():
        return False
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types there
    if int(driver.cudaHostRegister(block.data_ptr(), block.nbytes, 0)) == _SUCCESS:
        return True
    # Clear the driver's last error, which torch would raise at its next launch.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unpin(block: Tensor) -> None:
    """Unregister a block before its memory is freed."""
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())  # type: ignore[no-untyped-call]
