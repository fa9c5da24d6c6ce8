"""Small tensors between host and card.

A card's copy engine serves its copies in the order in which they are ready, and whole layers stand
in that queue. So small tensors do not go by it: a kernel reads and writes pinned memory of the
host. Where the kernels are not built, copies that nobody waits for serve. On a CPU nothing is
copied.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from offload_rt.ops import extension

# Tensors of one transfer begin at multiples of so many bytes, so that whole vectors are moved.
_ALIGNMENT = 16


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies of tensors of the host on a device, by one transfer that nobody waits for; on a CPU
    the tensors themselves.
    """
    if device.type == "cpu":
        return list(tensors)
    block = _pinned(_starts(tensors)[-1])
    for view, tensor in zip(_views(block, tensors), tensors, strict=True):
        view.copy_(tensor)
    there = torch.empty(len(block), dtype=torch.uint8, device=device)
    _send(block, there)
    return list(_views(there, tensors))


def fill(there: Tensor, block: Tensor) -> None:
    """Copy a block of the host to one of the same size, (n,) uint8, without waiting; `block` may
    change at once.
    """
    if there.device.type == "cpu":
        there.copy_(block)
        return
    pinned = _pinned(len(block))
    pinned.copy_(block)
    _send(pinned, there)


def to_host(tensors: Sequence[Tensor], is_long: bool = False) -> list[Tensor]:
    """Copies of dense tensors on the host, after one wait for all that the device was given; on a
    CPU the tensors themselves.

    is_long  the wait is long: the thread sleeps, which costs some microseconds at its end, instead
             of asking again and again
    """
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    views = list(_views(_pinned(_starts(tensors)[-1]), tensors))
    for view, tensor in zip(views, tensors, strict=True):
        if extension.serves(tensor):
            extension.kernels().transfer(view, tensor)
        else:
            view.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event(blocking=is_long)  # type: ignore[no-untyped-call]  # torch gives it no types
    event.record(torch.cuda.current_stream(tensors[0].device))
    event.synchronize()
    return views


def _send(pinned: Tensor, there: Tensor) -> None:
    if extension.serves(there):
        extension.kernels().transfer(there, pinned)
        _reading(there.device).keep(pinned)
    else:
        there.copy_(pinned, non_blocking=True)  # torch keeps what it copies from


class _Reading:
    """Pinned memory of the host that kernels of a device may still read: torch knows only of those
    that it copies from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, Lock()
        self._kept: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def keep(self, pinned: Tensor) -> None:
        """Keep a block until all that the device was given so far has been computed."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
        event.record(torch.cuda.current_stream(self._device))
        with self._lock:
            self._kept.append((event, pinned))
            while self._kept[0][0].query():  # type: ignore[no-untyped-call]  # as above
                self._kept.popleft()
                if not self._kept:
                    break


@cache
def _reading(device: torch.device) -> _Reading:
    """One for each device, as torch has one allocator of pinned memory."""
    return _Reading(device)


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor begins in one block, and where the block ends."""
    padded = (-(-one.nbytes // _ALIGNMENT) * _ALIGNMENT for one in tensors)
    return [*itertools.accumulate(padded, initial=0)]


def _views(block: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Places for tensors of these shapes and dtypes in a block."""
    for start, one in zip(_starts(tensors), tensors, strict=False):
        yield block[start : start + one.nbytes].view(one.dtype).view(one.shape)
