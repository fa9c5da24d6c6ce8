"""Count and limit the blocks of host memory, and count the memory of tensors."""

import mmap
import sys
import threading
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountingHost:
    """Count bytes of host blocks, current and peak, for layers and for read buffers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = {"layers": 0, "buffers": 0}
        self.most = {"layers": 0, "buffers": 0}
        self._lock = threading.RLock()
        host = self

        class Counted(mmap.mmap):
            def __new__(cls, fileno: int, length: int, **how: int) -> "Counted":
                block = super().__new__(cls, fileno, length, **how)
                kind = "buffers" if sys._getframe(2).f_code.co_name == "bounced" else "layers"
                host.add(kind, length)
                weakref.finalize(block, host.add, kind, -length)
                return block

        monkeypatch.setattr(mmap, "mmap", Counted)

    def add(self, kind: str, nbytes: int) -> None:
        with self._lock:
            self.now[kind] += nbytes
            self.most[kind] = max(self.most[kind], self.now[kind])


class TensorMemory(TorchDispatchMode):
    """Count bytes of tensors made within a `with`, current and peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._n_views: Counter[int] = Counter()  # by address of the storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                weakref.finalize(tensor, self._add, storage.data_ptr(), storage.nbytes(), -1)
                self._add(storage.data_ptr(), storage.nbytes(), 1)
        return out

    def _add(self, address: int, nbytes: int, n: int) -> None:
        self._n_views[address] += n
        if self._n_views[address] == max(n, 0):
            self.now += n * nbytes
            self.most = max(self.most, self.now)


def pin_at_most(monkeypatch: pytest.MonkeyPatch, n_blocks: int) -> None:
    """A driver that pins so many blocks and refuses more."""
    pinned = set()

    def register(address: int, *_: int) -> int:
        if len(pinned) == n_blocks:
            return 1
        pinned.add(address)
        return 0

    driver = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.remove)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
