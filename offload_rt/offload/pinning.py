"""Memory of the host that a GPU copies from by itself: registered with the driver, in blocks of any size.

torch's own pinned allocator rounds up to powers of two, which of 138 GB would make 154 or more.
"""

import ctypes

import torch
from torch import Tensor

_SUCCESS = 0
_MADV_DONTFORK = 10


def pin(block: Tensor) -> bool:
    """Register a block of host memory; returns whether there is a driver that agreed (WSL and limits make it refuse)."""
    if not torch.cuda.is_available():
        return False
    keep_from_children(block)
    has_agreed = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)) == _SUCCESS
    if not has_agreed:
        _forget_refusal()
    return has_agreed


def keep_from_children(block: Tensor) -> None:
    """Let processes that are forked from this one go without a block: of pinned pages they would get copies at once."""
    ctypes.CDLL(None).madvise(ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(block.nbytes), _MADV_DONTFORK)


def _forget_refusal() -> None:
    """The driver's last error stays until somebody asks for it, which torch does at its next launch, and raises it there."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        pass


def unpin(block: Tensor) -> None:
    """Undo `pin`, before the memory is released."""
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())
