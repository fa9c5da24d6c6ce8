"""Tiers on one disk or several: complete blocks, requests by the rates of disks, LinkError."""

import errno
import heapq
import os
import re
import shutil
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import llama_config, llama_tensors, pack, raw_bytes, write_checkpoint
from support.layers import on_disk, some_layers
from support.programs import wait_until
from support.spies import before_calls
from support.tiny import open_llm, prompt_of, say
from torch import Tensor

from offload_rt.cli import convert
from offload_rt.errors import CheckpointError, LinkError
from offload_rt.offload import mirrors as mirrors_module
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.memory import pin
from offload_rt.offload.mirrors import DirectFiles, Disk, Mirrors
from offload_rt.offload.tier import Tier, done_ahead, read_parallel
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.files import tensors_of
from offload_rt.weights.layout import host_block
from offload_rt.weights.stripe import divide


def filled(tier: Tier, i: int, n_parallel: int = 1) -> dict[str, Tensor]:
    """The tensors of block i after reading it over poison; nothing behind it is written."""
    nbytes = tier.layout(i).nbytes
    block = host_block(nbytes + 3 * 4096)
    block.fill_(0xA5)
    read_parallel(tier.reads(i, block), n_parallel)
    assert bool((block[nbytes:] == 0xA5).all())
    return tier.layout(i).views(block)


def content(tensors: dict[str, Tensor]) -> dict[str, object]:
    return {name: (x.dtype, x.shape, raw_bytes(x)) for name, x in tensors.items()}


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


@pytest.fixture(params=["direct", "buffered", "short reads"])
def place(request, tmp_path, monkeypatch):
    """A folder with or without direct I/O; a signal or a busy disk may end a read early."""
    refused = []
    read = os.preadv

    def refuse(path: Path, flags: int, *_: Any, **how: Any) -> None:
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(22, "Invalid argument")

    if request.param == "buffered":
        before_calls(monkeypatch, os, "open", refuse)
    elif request.param == "short reads":
        monkeypatch.setattr(os, "preadv", lambda n, views, at: read(n, [views[0][:4096]], at))
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
        assert content(filled(tier, i, tier.n_parallel)) == content(layer)
    tier.close()


def test_adjacent_tensors_are_read_together(tmp_path):
    with closing(DiskTier(on_disk(tmp_path, some_layers(1)))) as tier:
        assert len(tier.reads(0, host_block(tier.layout(0).nbytes))) == 1


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
    query = Mock(side_effect=[RuntimeError("CUDA error: operation not supported"), None])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Mock(cudaHostRegister=lambda *_: 1))
    block = host_block(4096)
    monkeypatch.setattr(torch, "zeros", query)
    assert not pin(block)
    query.assert_called_once_with(1, device="cuda")


@pytest.fixture
def mirrored(tmp_path: Path) -> tuple[list, Mirrors]:
    (tmp_path / "first").mkdir()
    layers = on_disk(tmp_path / "first", some_layers(), n_files=2)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    return layers, Mirrors(tmp_path / "first", (tmp_path / "second",))


def prefer(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Let each request go to the disk with this folder while it is used."""
    monkeypatch.setattr(Disk, "seconds", lambda disk, _: not str(disk).endswith(folder))


def fail(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def refuse(file, buffers, offset):
        if Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(folder):
            raise OSError(errno.EIO, "Input/output error")

    before_calls(monkeypatch, os, "preadv", refuse)


@pytest.mark.parametrize("rates", [(1.0, 1.0), (3.0, 1.0), (0.5, 2.0)])
def test_requests_are_divided_by_the_rates_of_the_disks(rates, mirrored, monkeypatch):
    """Eight requests are in flight; each disk answers one after the other, in simulated time."""
    layers, mirrors = mirrored
    now = 0.0
    monkeypatch.setattr(mirrors_module.time, "perf_counter", lambda: now)
    disks = DirectFiles((record for block in layers for record in block.tensors), mirrors)
    rate_of = dict(zip(disks._all, rates, strict=True))
    free_at = dict.fromkeys(disks._all, 0.0)
    nbytes = dict.fromkeys(disks._all, 0)
    coming: list[tuple[float, int, mirrors_module.Disk]] = []
    for i in range(2000):
        if len(coming) == 8:
            now, _, disk = heapq.heappop(coming)
            disk.end(1 << 20)
        disk = disks.begin(1 << 20)
        free_at[disk] = max(free_at[disk], now) + (1 << 20) / (rate_of[disk] * 1e9)
        heapq.heappush(coming, (free_at[disk], i, disk))
        nbytes[disk] += 1 << 20
    disks.close()
    share = nbytes[disks._all[0]] / sum(nbytes.values())
    assert share == pytest.approx(rates[0] / sum(rates), abs=0.02)
    assert max(free_at.values()) < 1.05 * sum(nbytes.values()) / sum(rates) / 1e9


@pytest.mark.parametrize(("broken", "reason"), [
    ("first", "Input/output error"), ("second", "Input/output error"),
    ("second", "changed while in use"), (None, ""),
])  # fmt: skip
def test_blocks_are_complete_while_a_disk_fails(broken, reason, mirrored, monkeypatch, capfd):
    layers, mirrors = mirrored
    tier = DiskTier(layers, mirrors=mirrors)
    assert tier.n_parallel == 2 * tier.settings.n_parallel
    if broken:
        prefer(monkeypatch, broken)
        folder = mirrors.root.parent / broken
        if reason.startswith("changed"):
            os.utime(next(folder.iterdir()), (1, 1))
        else:
            fail(monkeypatch, folder)
    for i, layer in enumerate(some_layers()):
        assert content(filled(tier, i)) == content(layer)
    told = capfd.readouterr().err
    assert told.count("is no longer read") == (broken is not None)
    assert broken is None or re.search(f"{broken}.* is no longer read: .*{reason}", told)
    fail(monkeypatch, mirrors.root.parent)
    with pytest.raises(LinkError, match=r"part-\d\.safetensors.*Input/output error"):
        filled(tier, 0)
    tier.close()


def test_missing_and_different_mirrors_are_refused_by_name(mirrored):
    layers, mirrors = mirrored
    path = next(iter(sorted(mirrors.folders[0].iterdir())))
    content = path.read_bytes()
    for changed in (content[:-1] + bytes([content[-1] ^ 1]), content + b"x"):
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=f"{path} differs"):
            DiskTier(layers, mirrors=mirrors)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path}: No such file"):
        DiskTier(layers, mirrors=mirrors)


@pytest.fixture
def model(tmp_path):
    config = llama_config(
        num_hidden_layers=4, vocab_size=40, hidden_size=128, max_position_embeddings=256,
        torch_dtype="float32",
    )  # fmt: skip
    return write_checkpoint(tmp_path / "model", config, llama_tensors(config))


@pytest.fixture
def striped_to(capfd, monkeypatch):
    """Run `offload-rt convert --stripe`; returns exit code, output and messages."""
    monkeypatch.setattr("offload_rt.system.disk_rate.measure_disk_gbps", lambda _: 1.0)

    def run(model: Path, folders: object, *flags: str) -> tuple[int, str, str]:
        code = convert.main(["--model", str(model), "--stripe", str(folders), *flags])
        return code, *capfd.readouterr()

    return run


def test_divided_checkpoint_continues_equally(model, tmp_path, striped_to):
    first, second = tmp_path / "first", tmp_path / "second"
    code, out, _ = striped_to(model, f"{first},{second}")
    assert code == 0 and f"run with {first}; keep {model}" in out
    texts = []
    for directory in (model, first):
        with open_llm(directory, "disk", dtype="float32") as llm:
            texts.append(say(llm, prompt_of(0, vocab_size=40), 8))
    assert texts[0] == texts[1]
    places = {record.path.resolve().parent for record in tensors_of(first).values()}
    assert places == {model.resolve(), first.resolve(), second.resolve()}


def test_disks_read_each_layer_in_equal_time():
    """A disk of three times the rate gets three quarters; later layers even out earlier ones."""
    sizes = {"gate": 11, "up": 11, "down": 11, "q": 4, "k": 1, "v": 1, "o": 4, "norm": 0.1}
    records = [
        SimpleNamespace(name=f"model.layers.{i}.{name}.weight", nbytes=size)
        for i in range(20)
        for name, size in sizes.items()
    ]
    fast, slow = divide(records, (3.0, 1.0))
    layers = Counter()
    for record in slow:
        layers[record.name.split(".")[2]] += record.nbytes
    assert sum(layers.values()) == pytest.approx(sum(sizes.values()) * 20 / 4, rel=0.02)
    assert max(layers.values()) <= sum(sizes.values()) / 4 + 11
    assert len(fast) + len(slow) == len(records)


def test_requests_alternate_between_folders(model, tmp_path, striped_to):
    striped = tmp_path / "striped"
    assert striped_to(model, striped)[0] == 0
    settings = ReadSettings(4096, 3)
    with (
        closing(DiskTier(open_checkpoint(striped).layers, settings)) as tier,
        closing(DiskTier(open_checkpoint(model).layers, settings)) as whole,
    ):
        assert (whole.n_parallel, tier.n_parallel) == (3, 6)
        folders = [read.args[0].path.resolve().parent for read in tier.reads(1, None)]
    counts = Counter(folders)
    assert min(counts.values()) > 3
    assert set(counts) == {model.resolve(), striped.resolve()}
    for n in range(1, len(folders)):
        for folder, count in Counter(folders[:n]).items():
            assert abs(count - n * counts[folder] / len(folders)) <= 1


def test_failures_leave_no_partial_file(model, tmp_path, striped_to, monkeypatch):
    """Other conversions at once, a full disk, and missing room before writing."""

    def full(*_: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    striped = tmp_path / "striped"
    for flags in (("--ranks", "2"), ("--link-format", "raw")):
        code, _, err = striped_to(model, striped, *flags)
        assert code == 2 and "--stripe" in err
    monkeypatch.setattr(os, "sendfile", full)
    code, _, err = striped_to(model, striped)
    assert code != 0 and "No space left" in err and "Traceback" not in err
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    code, _, err = striped_to(model, striped)
    assert code == 2 and "free" in err and "name a folder on another disk" in err
    assert not list(striped.glob("disk-*"))
