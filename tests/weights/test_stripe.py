"""Checkpoints divided between disks: the same text, balanced layers, whole files or none."""

import errno
import os
import shutil
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoints import llama_config, llama_tensors, write_checkpoint
from support.tiny import open_llm, prompt_of, say

from offload_rt.cli import convert
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.files import tensors_of
from offload_rt.weights.stripe import divide


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


def test_full_disk_leaves_no_partial_file(model, tmp_path, striped_to, monkeypatch):
    def full(*_: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "sendfile", full)
    striped = tmp_path / "striped"
    code, _, err = striped_to(model, striped)
    assert code != 0 and "No space left" in err and "Traceback" not in err
    assert not list(striped.glob("disk-*"))


def test_missing_room_is_reported_before_writing(model, tmp_path, striped_to, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    code, _, err = striped_to(model, tmp_path / "striped")
    assert code == 2 and "free" in err and "name a folder on another disk" in err


@pytest.mark.parametrize("flags", [("--ranks", "2"), ("--link-format", "raw")])
def test_stripe_refuses_other_conversions(model, tmp_path, striped_to, flags):
    code, _, err = striped_to(model, tmp_path / "x", *flags)
    assert code == 2 and "--stripe" in err
