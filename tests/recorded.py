"""A stand-in for a CUDA graph: records the calls of one computation and repeats them on the same tensors.

As in a graph, values that Python or numpy computed at capture are fixed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TO_THE_HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class _Recording(TorchDispatchMode):
    """Every call, with its arguments and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in _TO_THE_HOST, f"{func} waits for the device while it is captured"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


def record(compute: Callable[[], None]) -> Callable[[], None]:
    """Compute once and return a function that repeats it into the same memory."""
    recording = _Recording()
    with recording:
        compute()

    @torch.inference_mode()
    def replay() -> None:
        for func, args, kwargs, out in recording.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                # A view shows what has been computed again already.
                if isinstance(old, Tensor) and _address(old) != _address(new):
                    old.copy_(new)

    return replay


def _address(x: Tensor) -> int:
    return vars(x).get("inner", x).data_ptr()  # also of a pretended card
