"""Memory of the host that a GPU copies from by itself: registered with the driver, in blocks of any
size.

torch's own pinned allocator rounds up to powers of two, which of 138 GB would make 154 or more.
"""

from contextlib import suppress

import torch
from torch import Tensor

_SUCCESS = 0


def pin(block: Tensor) -> bool:
    """Register a block of host memory; returns whether there is a driver that agreed (WSL and
    limits make it refuse).
    """
    if not torch.cuda.is_available():
        return False
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types there
    if int(driver.cudaHostRegister(block.data_ptr(), block.nbytes, 0)) == _SUCCESS:
        return True
    # The driver's last error stays until somebody asks for it, which torch does at its next launch,
    # and raises it there.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unpin(block: Tensor) -> None:
    """Undo `pin`, before the memory is released."""
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())  # type: ignore[no-untyped-call]  # as above
