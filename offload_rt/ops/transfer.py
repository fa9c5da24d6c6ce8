"""Transfers of small tensors between host and GPU.

Layers occupy the queue of the GPU's copy engine. Small tensors bypass it: a kernel reads and writes
pinned host memory. Without kernels, asynchronous copies are used. On a CPU nothing is copied.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from offload_rt.ops import extension

# Alignment of tensors in a transfer, for vector accesses.
_ALIGNMENT = 16


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors to a device in one asynchronous transfer; a CPU returns them unchanged."""
    if device.type == "cpu":
        return list(tensors)
    block = _pinned(_starts(tensors)[-1])
    for view, tensor in zip(_views(block, tensors), tensors, strict=True):
        view.copy_(tensor)
    target = torch.empty(len(block), dtype=torch.uint8, device=device)
    _send(block, target)
    return list(_views(target, tensors))


def fill(target: Tensor, block: Tensor) -> None:
    """Copy a host block to a target of equal size, (n,) uint8, without waiting.

    The caller may overwrite `block` immediately.
    """
    if target.device.type == "cpu":
        target.copy_(block)
        return
    pinned = _pinned(len(block))
    pinned.copy_(block)
    _send(pinned, target)


def to_host(tensors: Sequence[Tensor], is_long: bool = False) -> list[Tensor]:
    """Copy dense tensors to the host and synchronize; a CPU returns them unchanged.

    is_long  sleep instead of polling; adds some microseconds at the end
    """
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    views = list(_views(_pinned(_starts(tensors)[-1]), tensors))
    for view, tensor in zip(views, tensors, strict=True):
        if extension.serves(tensor):
            extension.kernels().transfer(view, tensor)
        else:
            view.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event(blocking=is_long)  # type: ignore[no-untyped-call]  # untyped in torch
    event.record(torch.cuda.current_stream(tensors[0].device))
    event.synchronize()
    return views


def _send(pinned: Tensor, target: Tensor) -> None:
    if not extension.serves(target):
        target.copy_(pinned, non_blocking=True)  # torch keeps the source alive
        return
    extension.kernels().transfer(target, pinned)
    # Keep a block until the current stream has read it.
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
    event.record(torch.cuda.current_stream(target.device))
    lock, kept = _pending_reads(target.device)
    with lock:
        kept.append((event, pinned))
        while kept and kept[0][0].query():  # type: ignore[no-untyped-call]  # untyped in torch
            kept.popleft()


@cache
def _pending_reads(device: torch.device) -> tuple[Lock, deque[tuple[torch.cuda.Event, Tensor]]]:
    return Lock(), deque()


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Return the offset of each tensor in a block, and the size of the block."""
    padded = (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
    return [*itertools.accumulate(padded, initial=0)]


def _views(block: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield views of a block with the shapes and dtypes of tensors."""
    for start, like in zip(_starts(tensors), tensors, strict=False):
        yield block[start : start + like.nbytes].view(like.dtype).view(like.shape)
