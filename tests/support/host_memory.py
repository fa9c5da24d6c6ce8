"""Count and limit the blocks of host memory."""

import mmap
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch


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
