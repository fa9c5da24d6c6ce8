"""Memory of the host that a GPU copies from by itself: registered with the driver, in blocks of any size.

torch's own pinned allocator rounds up to powers of two, which of 138 GB would make 154 or more.
"""

import torch
from torch import Tensor

_SUCCESS = 0


def pin(block: Tensor) -> bool:
    """Register a block of host memory; returns whether there is a driver that agreed (WSL and limits make it refuse)."""
    if not torch.cuda.is_available():
        return False
    return int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)) == _SUCCESS


def unpin(block: Tensor) -> None:
    """Undo `pin`, before the memory is released."""
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
