"""Stands for a CUDA graph: the calls of one computation, made again on the tensors they were made on.

As in a graph, what Python or numpy made of the numbers of that time stays as it was.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TO_THE_HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class _Recording(TorchDispatchMode):
    """Every call, with what it was given and what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _TO_THE_HOST, f"{func} waits for the device while it is captured"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def record(compute: Callable[[], None]) -> Callable[[], None]:
    """Compute once and return what computes the same again, into the same memory."""
    recording = _Recording()
    with recording:
        compute()

    @torch.inference_mode()
    def replay() -> None:
        for func, args, kwargs, out in recording.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                # A view is one of what has been computed again already.
                if isinstance(old, Tensor) and _address(old) != _address(new):
                    old.copy_(new)

    return replay


def _address(x: Tensor) -> int:
    return vars(x).get("inner", x).data_ptr()  # of a pretended card too
