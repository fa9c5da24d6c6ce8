"""Contract of tiers: reads fill a block completely, in any order, or raise LinkError."""

import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import pack, raw_bytes
from support.layers import on_disk, some_layers
from support.programs import wait_until
from torch import Tensor

from offload_rt.errors import LinkError
from offload_rt.offload import mirrors
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.memory import pin
from offload_rt.offload.tier import Tier, done_ahead, read_parallel
from offload_rt.weights.layout import host_block


def filled(tier: Tier, i: int, n_parallel: int = 1) -> dict[str, Tensor]:
    """The tensors of block i after reading it over poison; nothing behind it is written."""
    nbytes = tier.layout(i).nbytes
    block = host_block(nbytes + 3 * 4096)
    block.fill_(0xA5)
    read_parallel(tier.reads(i, block), n_parallel)
    assert bool((block[nbytes:] == 0xA5).all())
    return tier.layout(i).views(block)


def same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return set(got) == set(wanted) and all(
        got[name].dtype == tensor.dtype
        and got[name].shape == tensor.shape
        and raw_bytes(got[name]) == raw_bytes(tensor)
        for name, tensor in wanted.items()
    )


@pytest.mark.parametrize("kind", [LinkError, KeyboardInterrupt])
def test_error_cancels_waiting_reads_and_waits_for_running_reads(kind, monkeypatch):
    shutdown = ThreadPoolExecutor.shutdown
    is_given_up = threading.Event()
    begun: list[int] = []
    ended: list[int] = []

    def fails() -> int:
        raise kind("gone")

    def read() -> int:
        begun.append(1)
        assert is_given_up.wait(20)
        time.sleep(0.02)  # for who would not wait for it
        ended.append(1)
        return 1

    def given_up(pool: ThreadPoolExecutor, wait: bool = True, cancel_futures: bool = False) -> None:
        shutdown(pool, False, cancel_futures=cancel_futures)
        is_given_up.set()
        shutdown(pool, wait)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", given_up)
    with pytest.raises(kind, match="gone"):
        read_parallel([fails, *[read] * 9], 3)
    assert len(ended) == len(begun) <= 3


def test_done_ahead_works_one_ahead_in_order():
    """And releases returned results, which are layers of gigabytes."""
    begun: list[int] = []

    def work(i: int) -> Tensor:
        begun.append(i)
        return torch.tensor(i)

    results = done_ahead((partial(work, i) for i in range(5)), "works")
    for i in range(5):
        result = next(results)
        n_begun = min(i + 2, 5)
        wait_until(lambda n=n_begun: len(begun) >= n)
        assert (int(result), len(begun)) == (i, n_begun)
        held = weakref.ref(result)
        del result
        assert held() is None
    assert list(done_ahead([], "works")) == []


@pytest.fixture(params=["direct", "buffered"])
def place(request, tmp_path, monkeypatch):
    """A folder on a file system with and without direct I/O."""
    refused = []
    open_file = os.open

    def refuse(path: Path, flags: int, *more: Any, **how: Any) -> int:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(22, "Invalid argument")
        return open_file(path, flags, *more, **how)

    if request.param == "buffered":
        monkeypatch.setattr(os, "open", refuse)
    yield tmp_path
    assert bool(refused) == (request.param == "buffered")


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    n_files=st.integers(1, 4),
    shuffle=st.integers(0, 100),
    odd=st.integers(0, 7),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    request_nbytes=st.sampled_from([4096, 8192, 1 << 20]),
    n_parallel=st.integers(1, 8),
    packed=st.booleans(),
)
def test_tensors_can_be_anywhere_in_any_file(
    place, n_files, shuffle, odd, dtype, request_nbytes, n_parallel, packed
):
    layers = some_layers(3, dtype, shuffle)
    records = on_disk(place, layers, n_files, shuffle, odd)
    tier = DiskTier(records, ReadSettings(request_nbytes, n_parallel), packed=packed)
    for i, layer in enumerate(layers):
        assert not packed or tier.layout(i) == pack(layer).layout
        assert same(filled(tier, i, tier.n_parallel), layer)
    tier.close()


def test_adjacent_tensors_are_read_together(tmp_path):
    with closing(DiskTier(on_disk(tmp_path, some_layers(1)))) as tier:
        assert len(tier.reads(0, host_block(tier.layout(0).nbytes))) == 1


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """A signal or a busy disk may end a read early."""
    whole = os.preadv
    layers = some_layers()
    short = lambda file, views, at: whole(file, [views[0][:4096]], at)  # noqa: E731
    monkeypatch.setattr(mirrors.os, "preadv", short)
    with closing(DiskTier(on_disk(tmp_path, layers, n_files=2))) as tier:
        assert all(same(filled(tier, i), layer) for i, layer in enumerate(layers))


def test_close_and_failed_open_release_the_files(tmp_path):
    records = on_disk(tmp_path, some_layers(), n_files=3)
    n_open = len(os.listdir("/proc/self/fd"))
    tier = DiskTier(records)
    assert len(os.listdir("/proc/self/fd")) == n_open + 3
    tier.close()
    (tmp_path / "part-2.safetensors").unlink()
    with pytest.raises(LinkError, match=r"part-2\.safetensors"):
        DiskTier(records)
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_pinning_error_is_not_raised_by_later_calls(monkeypatch):
    """The driver keeps its last error until the next query."""
    block = host_block(4096)
    stale = []
    zeros = torch.zeros

    def launch(*sizes: int, device: str = "cpu") -> torch.Tensor:
        if stale:
            raise RuntimeError(f"CUDA error: {stale.pop()}")
        return zeros(*sizes)

    cudart = SimpleNamespace(
        cudaHostRegister=lambda *_: stale.append("operation not supported") or 1
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", launch)
    assert not pin(block)
    launch(1)
