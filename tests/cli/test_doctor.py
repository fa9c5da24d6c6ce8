"""`offload-rt doctor` names each missing part and its fix."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import measure_little
from torch import Tensor

from offload_rt.cli import doctor
from offload_rt.ops import cpu
from offload_rt.planning import survey
from offload_rt.planning.hardware import find_card
from offload_rt.planning.machine import Machine
from offload_rt.system import machine
from offload_rt.system.disk_rate import measure_disk_gbps


def run(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {check["name"]: check for check in found["checks"]} | {"models": found["models"]}


@pytest.fixture(autouse=True)
def fast_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk of 3 GB/s, and a forecast of a single pair of models."""
    measure_little(monkeypatch)
    monkeypatch.setattr(doctor, "measure_disk_gbps", lambda _: 3.0)
    monkeypatch.setattr(survey, "PAIRS", {"qwen3-1.7b": "qwen3-0.6b"})


def test_known_models_have_a_speed_and_the_faster_draft(capsys, monkeypatch):
    monkeypatch.setattr(survey, "PAIRS", {"llama2-70b": "llama2-7b", "qwen3-0.6b": None})
    fast = Machine.with_card(find_card("rtx4090"), 160 << 30, 7.0)
    tiny = replace(fast, budget=replace(fast.budget, device=1 << 30))
    for described, verdict in ((tiny, "does not fit"), (fast, "slow")):
        monkeypatch.setattr("offload_rt.planning.local.this_machine", lambda *_, at=described: at)
        large, small = run(capsys)["models"]
        assert (large["verdict"], small["verdict"]) == (verdict, "interactive")
    assert large["draft"] == "llama2-7b" and large["rate"] > 5 * large["plain"]
    assert small["draft"] is None and small["rate"] == small["plain"]


def test_complete_machine_needs_no_fix(capsys, monkeypatch):
    monkeypatch.setattr(machine, "cards", list)
    monkeypatch.setattr(machine, "memory_free", machine.memory_limit)
    assert doctor.main([]) == 0
    out = capsys.readouterr().out
    assert "disk          " in out and "reads 3.00 GB/s" in out
    assert re.search("CPU kernels   (pre)?built, using", out)
    assert "GPU           none" in out
    assert "nothing to fix\n" in out and re.search(r"qwen3-1.7b +(qwen3-0.6b|none) ", out)


def test_paths_are_those_that_remain_after_removal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "offload_rt" / "kernels").mkdir(parents=True)
    (tmp_path / "offload_rt" / "kernels" / "library").write_bytes(bytes(3 << 20))
    assert doctor.main(["--paths"]) == 0
    package, cache, models = capsys.readouterr().out.splitlines()
    assert str(Path(cpu.__file__).parents[1]) in package and "pip uninstall" in package
    assert f"{tmp_path / 'offload_rt'}: 3.00 MiB of" in cache
    assert "shared" in models


def test_amx_is_recommended_where_it_is_a_gain(capsys, monkeypatch):
    seconds = {False: 0.3, True: 0.2}
    clock = [0.0]

    def product(x: Tensor, weight: Tensor, allows_torch: bool) -> None:
        assert x.dtype == weight.dtype == torch.bfloat16
        clock[0] += seconds[allows_torch]

    with monkeypatch.context() as patch:
        patch.setattr("offload_rt.ops.linear.linear", product)
        patch.setattr(doctor.time, "perf_counter", lambda: clock[0])
        assert doctor.torch_gain() == pytest.approx(1.5)
    for has_amx, gain, advice in (
        (True, 1.44, "; --torch-products uses AMX: 1.44 times as fast, equal up to rounding"),
        (True, 0.9, "; AMX is no gain (0.90 times as fast)"), (False, 1.44, ""),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        monkeypatch.setattr(doctor, "torch_gain", lambda gain=gain: gain)
        kernels = run(capsys)["CPU kernels"]
        assert kernels["value"].partition("; ")[0] + advice == kernels["value"]
        assert kernels["fix"] == ""


def test_missing_parts_have_a_fix(capsys, monkeypatch):
    monkeypatch.setattr(cpu, "library", lambda: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(doctor, "measure_disk_gbps", lambda _: 0.1)
    monkeypatch.setattr(machine, "memory_free", lambda: 1)
    monkeypatch.setattr(machine, "cards", lambda: ["NVIDIA GeForce RTX 4090"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, fix in ((None, "--index-url"), ("13.0", "install a driver for CUDA 13.0")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        checks = run(capsys)
        assert checks["GPU"]["value"] == "NVIDIA GeForce RTX 4090"
        for part, said in (("CUDA", fix), ("CPU kernels", "install g++"), ("disk", "faster disk"),
                           ("memory", "close other programs")):  # fmt: skip
            assert said in checks[part]["fix"]


def test_disk_rate_is_none_without_a_writable_folder(tmp_path, capsys, monkeypatch):
    assert measure_disk_gbps(tmp_path / "missing") is None
    rate = measure_disk_gbps(tmp_path)
    assert rate is None or rate > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "XDG_CACHE_HOME" in run(capsys)["disk"]["fix"]
