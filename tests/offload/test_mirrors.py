"""Mirrors: requests are divided by the rates of the disks, failing disks are dropped."""

import errno
import heapq
import os
import shutil
from pathlib import Path

import pytest
from support.checkpoints import raw_bytes
from support.layers import on_disk, some_layers
from support.tiny import open_llm, prompt_of

from offload_rt import SamplingParams
from offload_rt.errors import CheckpointError, LinkError
from offload_rt.offload import mirrors as mirrors_module
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.mirrors import Disk, Disks, Mirrors
from offload_rt.weights.layout import host_block


@pytest.fixture
def mirrored(tmp_path: Path) -> tuple[list, Mirrors]:
    (tmp_path / "first").mkdir()
    layers = on_disk(tmp_path / "first", some_layers(), n_files=2)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    return layers, Mirrors(tmp_path / "first", (tmp_path / "second",))


def prefer(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Let each request go to the disk with this folder while it is used."""
    monkeypatch.setattr(Disk, "seconds", lambda disk, _: not str(disk).endswith(folder))


def fail(monkeypatch: pytest.MonkeyPatch, folder: Path, after: int = 0) -> None:
    """Let reads of files in a folder fail, except for the first `after` reads."""
    read = os.preadv
    n_read = 0

    def preadv(file, buffers, offset):
        nonlocal n_read
        if Path(os.readlink(f"/proc/self/fd/{file}")).is_relative_to(folder):
            n_read += 1
            if n_read > after:
                raise OSError(errno.EIO, "Input/output error")
        return read(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("rates", [(1.0, 1.0), (3.0, 1.0), (0.5, 2.0)])
def test_requests_are_divided_by_the_rates_of_the_disks(rates, mirrored, monkeypatch):
    """Eight requests are in flight; each disk answers one after the other, in simulated time."""
    layers, mirrors = mirrored
    now = 0.0
    monkeypatch.setattr(mirrors_module.time, "perf_counter", lambda: now)
    disks = Disks({record.path: None for block in layers for record in block.tensors}, mirrors)
    rate_of = dict(zip(disks._all, rates, strict=True))
    free_at = dict.fromkeys(disks._all, 0.0)
    nbytes = dict.fromkeys(disks._all, 0)
    coming: list[tuple[float, int, mirrors_module.Disk]] = []
    for i in range(2000):
        if len(coming) == 8:
            now, _, disk = heapq.heappop(coming)
            disks.end(disk, 1 << 20)
        disk = disks.begin(1 << 20)
        free_at[disk] = max(free_at[disk], now) + (1 << 20) / (rate_of[disk] * 1e9)
        heapq.heappush(coming, (free_at[disk], i, disk))
        nbytes[disk] += 1 << 20
    disks.close()
    share = nbytes[disks._all[0]] / sum(nbytes.values())
    assert share == pytest.approx(rates[0] / sum(rates), abs=0.02)
    assert max(free_at.values()) < 1.05 * sum(nbytes.values()) / sum(rates) / 1e9


@pytest.mark.parametrize("broken", ["first", "second", None])
def test_blocks_are_complete_while_a_disk_fails(broken, mirrored, monkeypatch, capfd):
    layers, mirrors = mirrored
    tier = DiskTier(layers, mirrors=mirrors)
    assert tier.n_parallel == 2 * tier.settings.n_parallel
    if broken:
        prefer(monkeypatch, broken)
        fail(monkeypatch, mirrors.root.parent / broken)
    for i, layer in enumerate(some_layers()):
        layout = tier.layout(i)
        block = host_block(layout.nbytes)
        for read in tier.reads(i, block):
            read()
        for name, tensor in layer.items():
            assert raw_bytes(layout.by_name[name].view(block)) == raw_bytes(tensor)
    told = capfd.readouterr().err
    assert told.count("is no longer read") == (broken is not None)
    assert broken is None or f"{broken} is no longer read" in told
    fail(monkeypatch, mirrors.root.parent)
    with pytest.raises(LinkError, match="Input/output error"):
        tier.reads(0, host_block(tier.layout(0).nbytes))[0]()
    tier.close()


def test_changed_mirror_is_dropped(mirrored, monkeypatch, capfd):
    layers, mirrors = mirrored
    prefer(monkeypatch, "second")
    tier = DiskTier(layers, mirrors=mirrors)
    for path in mirrors.folders[0].iterdir():
        os.utime(path, (1, 1))
    for read in tier.reads(0, host_block(tier.layout(0).nbytes)):
        read()
    tier.close()
    assert capfd.readouterr().err.count("changed while in use") == 1


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


def test_text_with_a_mirror_that_disappears_equals_the_text_without(
    zoo, tmp_path, monkeypatch, capfd
):
    folder = zoo.directory("llama", 0)
    shutil.copytree(folder, tmp_path / "copy")
    params = SamplingParams(max_tokens=12, temperature=0.0)
    texts = []
    prefer(monkeypatch, "copy")
    for mirror in (None, str(tmp_path / "copy")):
        with open_llm(folder, "disk", mirror=mirror, drafter="none") as llm:
            if mirror:
                fail(monkeypatch, tmp_path / "copy", after=5)
            texts.append(llm.generate(prompt_of(1), params)[0].token_ids)
    assert texts[0] == texts[1]
    assert "copy is no longer read" in capfd.readouterr().err
