"""GPU benchmarks without a GPU: models of a shape, sections, and the table of results."""

import json
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import expand
import pytest
import torch
from support.fake_gpu import fake_gpu
from support.processes import is_running, is_written
from support.programs import wait_until
from support.tiny import keep_steady
from transformers import Qwen3MoeConfig

from bench.common.measure import UNKNOWN, Spread
from bench.gpu import __main__ as sections
from bench.gpu import (
    attention,
    correctness,
    experts,
    formats,
    generation,
    memcheck,
    onchip,
    pinning,
    products,
    shapes,
    streamed,
)
from bench.gpu.__main__ import _is_measured, run_section
from bench.gpu.table import table, written_into
from offload_rt import LLM

ROOT = Path(__file__).resolve().parents[2]
FEW_A_PASS = {"tree_size": 8, "tree_depth": 3}  # so that passes of a short text are timed


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Expand checkpoints to a small size in a temporary folder."""
    home = tmp_path_factory.mktemp("shapes")

    def written(source, shape, *sizes):
        out = home / source.name
        if not out.exists():
            n = str(shapes._N_OWN[source] + 1)
            assert expand.main(["--source", str(source), "--out", str(out), "--layers", n]) == 0
        return out

    return written


def told(measure):
    return [json.loads(json.dumps(record)) for record in measure]


@pytest.mark.slow
def test_experts_section_runs(monkeypatch):
    config = Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=128, num_experts=16, num_hidden_layers=6,
        vocab_size=512, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64,
    )  # fmt: skip
    monkeypatch.setattr(experts, "configs", lambda nbytes: {"some": config})
    # grouped products of 16 bits are a card's alone
    monkeypatch.setattr(experts, "WAYS", experts.WAYS[1:])
    with fake_gpu(monkeypatch):
        *_, record = told(experts.measure(experts.Shapes(0, "268MiB", ("some",), 4, 1)))
    assert len(record) == 2 and record["some, all moved"]["same"]
    assert all(way["seconds"]["median"] > 0 for way in record.values())
    assert record["some, host computes some"]["host_s"] and record["some, all moved"]["n_slots"]


def test_streamed_section_measures_the_link_without_layer_copies(small, monkeypatch):
    streamers = []
    park = streamed.park
    monkeypatch.setattr(streamed, "written", small)
    monkeypatch.setattr(streamed, "park", lambda given: streamers.append(given) or park(given))
    monkeypatch.setattr(streamed, "link_gbps", lambda _: float(streamers[-1]._is_parked))
    with fake_gpu(monkeypatch):
        records = told(streamed.measure(streamed.Shapes("", 11, "275MiB", (1, 8))))
    assert [timing["link_gbps"] for timing in records[-1]["passes"]] == [1, 1]
    plan = records[-1]["plan"]
    assert plan["streamed_layers"] > 0 and plan["streamed_bytes"] > 0
    assert [[timing["rows"] for timing in each["passes"]] for each in records] == [[1], [1, 8]]


@pytest.mark.slow
def test_formats_section_continues_after_a_failure(small, monkeypatch):
    sizes = streamed.Shapes("", 11, "275MiB", (1,))
    ways = {
        "lossless": (None, replace(sizes, settings=(("link_format", "lossless"),))),
        "int4": ("gptq", replace(sizes, device_memory="286MiB")),
        "host": (None, replace(sizes, context=600, settings=(("kv_memory", "4MiB"),))),
    }
    monkeypatch.setattr(formats, "written", small)
    monkeypatch.setattr(formats, "link_gbps", lambda device: 1.0)
    with fake_gpu(monkeypatch):
        results = told(formats.measure(ways))[-1]
    assert "no kernel decodes lossless weights" in results["lossless"]["failed"]
    plain, quantised = (results[name]["passes"][0]["floor_s"] for name in ("host", "int4"))
    assert quantised < 0.5 * plain


def test_only_the_first_section_begins_late(monkeypatch, tmp_path, capsys):
    """A step of a single section uses the time that is left. A card is needed."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("sys.argv", ["bench.gpu"])
        assert sections.main() == 3
        assert "needs a CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(sections, "device", lambda: {"device": "a card"})
    begun = []

    def run_section(command, seconds, log, record):
        begun.append(command[-1])
        record({"failed": "late"})
        return {}

    monkeypatch.setattr(sections, "run_section", run_section)
    assert sections._run(("ceilings", "streamed"), 0.0, True, tmp_path) == 0
    assert begun == ["ceilings"] and "streamed: left out" in capsys.readouterr().out
    assert json.loads((tmp_path / "ceilings.json").read_text())["failed"] == "late"


def test_correctness_section_keeps_output_and_exit_codes(monkeypatch, capfd):
    """It has failed if tests failed, or were skipped for want of kernels."""
    monkeypatch.setattr(correctness, "ON_CARD", {"4": 1, "0": 1})
    program = "import sys; print('no tests ran'); raise SystemExit(int(sys.argv[1]))"
    monkeypatch.setattr(correctness, "PYTEST", (sys.executable, "-c", program))
    monkeypatch.setattr(correctness.extension, "missing", lambda: "no card")
    records = []
    with pytest.raises(RuntimeError, match=r"^no card, 4$"):
        for record in correctness.measure():
            records.append(dict(record))
    codes = {code: f"no tests ran; exit code {code}" for code in "40"}
    assert records[-1] == {"kernels": "no card", **codes}
    assert "no tests ran" in capfd.readouterr().err
    monkeypatch.setattr(memcheck, "shutil", SimpleNamespace(which=lambda _: None))
    assert told(memcheck.measure()) == [{"memory checker": "not installed"}]


def test_pinning_section_runs(monkeypatch):
    monkeypatch.setattr(pinning, "_gbps", lambda block: 1.0)
    with fake_gpu(monkeypatch):
        results = told(pinning.measure(1 << 20))[-1]
    assert results["huge pages"]["pinned"] and results["small pages"]["seconds"] > 0


@pytest.mark.slow
def test_generation_section_runs(small, monkeypatch):
    monkeypatch.setattr(generation, "written", small)
    monkeypatch.setattr(generation, "opened", partial(shapes.opened, **FEW_A_PASS))
    keep_steady(monkeypatch)
    with fake_gpu(monkeypatch):
        first, last = told(generation.measure(generation.Shapes("", 11, "", 5, "275MiB", 1, 8)))
    assert last["plan"]["streamed_layers"] > 0
    assert last["acceptance"] == "of the demonstration pair"
    grown = [(entry["temperature"], len(entry["runs"])) for entry in last["generation"]]
    assert grown == [(0.0, 1), (0.6, 1)] and first["generation"] == last["generation"][:1]


@pytest.mark.slow
def test_onchip_section_runs(small, monkeypatch):
    monkeypatch.setattr(onchip, "written", small)
    monkeypatch.setattr(onchip, "device_gbps", lambda: 1.0)
    for name in ("time_passes", "time_plain"):
        timed = getattr(LLM, name)
        once = lambda *args, timed=timed: timed(*args[:-1], 1)  # noqa: E731
        monkeypatch.setattr(LLM, name, once)
    monkeypatch.setattr(onchip, "opened", partial(shapes.opened, **FEW_A_PASS))
    keep_steady(monkeypatch)
    with fake_gpu(monkeypatch):
        targets = (("llama-2-7b", 8, 1e9), ("llama-33b", 60, 65e9))
        records = told(onchip.measure(onchip.Shapes(targets, 12, (1, 8))))
    shape, left_out = records[-1]["shapes"]
    assert left_out == {"shape": "llama-33b", "left out": "65 GB of weights, 4 GB are free"}
    assert shape["floor_s"] > 0 and set(shape["levels"]) == {"1", "8"} and shape["times_faster"] > 0


def test_products_section_runs(monkeypatch):
    def in_turn(replays):
        for work in replays.values():
            work()
        return dict.fromkeys(replays, Spread.of([1.0]))

    monkeypatch.setattr(products, "captured", lambda work: work)
    monkeypatch.setattr(products, "device_gbps", lambda: 1000.0)
    monkeypatch.setattr(products, "in_turn", in_turn)
    with fake_gpu(monkeypatch):
        *_, record = told(products.measure(products.Shapes(64, 128, (1, 40))))
    assert set(record) == {"device_gbps", "1", "40"}
    floors = {name: entry["floor_s"] for name, entry in record["40"].items()}
    assert floors["bf16"] == 64 * 128 * 2 / 1e12
    assert floors["int4"] < floors["int8"] < floors["bf16"]


def test_attention_section_runs(monkeypatch):
    """A fake clock measures 1 s per product and copy, and 2 s per attention."""
    short = (attention._PRODUCT, attention._COPY)
    monkeypatch.setattr(attention, "captured", lambda work: (work(), work)[1])
    monkeypatch.setattr(
        attention, "in_turn",
        lambda replays: {name: Spread.of([1.0 if name in short else 2.0]) for name in replays},
    )  # fmt: skip
    monkeypatch.setattr(attention, "_flex", Mock(side_effect=RuntimeError("no compiler")))
    sizes = attention.Shapes((3, 1), 4, 2, 64, 10, 16, 1024)
    with fake_gpu(monkeypatch):
        records = told(attention.measure(sizes))
        (with_flex,) = told(attention.measure(replace(sizes, n_nodes=(3,), has_flex=True)))
    assert [list(each) for each in records] == [["3"], ["3", "1"]]
    three, single = records[-1]["3"], records[-1]["1"]
    assert with_flex["3"]["flex_attention"] == {"failed": "no compiler"}
    assert "flex_attention" not in three and with_flex["3"].keys() > three.keys()
    # The root sees itself and each of its two descendants as many as are above it.
    depths = [len(shapes.random_tree(3).path_to(node)) for node in range(3)]
    seconds = 4 * 4 * 64 * (3 * 10 + sum(depths) + 3) / (2 * 16**3)
    floor = {"products": seconds, "memory": 2 * 64 * 2 * (4 * 3 + 2 * 13) / 2048}
    assert three["floor"] == pytest.approx(floor | {"seconds": max(floor.values())})
    against = {"floor": 2 / three["floor"]["seconds"], "flash, no mask": 1.0}
    assert three["tree_attention against"] == against
    assert not any("failed" in value for value in single.values())


def test_section_results_are_kept(tmp_path):
    for code, expected in (
        ("print('{\"a\": 1}'); print('{\"a\": 2}')", {"result": {"a": 2}}),
        ("print('{\"a\": 1}'); print('[W1 a warning]')", {"result": {"a": 1}}),
        ("print('{\"a\": 1}'); raise SystemExit('no room')",
         {"result": {"a": 1}, "failed": "no room"}),
        ("raise SystemExit(7)", {"failed": "exit code 7"}),
        ("", {"failed": "it printed nothing"}),
    ):  # fmt: skip
        assert run_section([sys.executable, "-c", code], 60, tmp_path / "log") == expected


def test_section_timeout_ends_its_processes(tmp_path, monkeypatch):
    """It is over when the section has started another process, which holds its output open."""
    pid, ended = tmp_path / "pid", tmp_path / "ended"

    class Timer(threading.Timer):
        def run(self):
            wait_until(lambda: is_written(pid))
            self.function()

    monkeypatch.setattr(sections.threading, "Timer", Timer)
    child = f"echo $$ > {pid}; sleep 20; touch {ended}"
    code = f"import os; print('{{\"a\": 1}}', flush=True); os.system({child!r})"
    records = []
    result = run_section([sys.executable, "-c", code], 5, tmp_path / "log", records.append)
    assert result == {"failed": "took more than 5 s", "result": {"a": 1}}
    assert records == [{"failed": "it was killed", "result": {"a": 1}}, result]
    wait_until(lambda: not is_running(int(pid.read_text())))
    assert not ended.exists()


def test_failed_or_outdated_sections_run_again(tmp_path):
    path = tmp_path / "streamed.json"
    assert not _is_measured(path, "abc")
    for entry, now, is_measured in (
        ({"commit": "abc"}, "abc", True),
        ({"commit": "abc"}, "abd", False),
        ({"commit": "abc", "failed": "no room"}, "abc", False),
        ({"commit": UNKNOWN}, UNKNOWN, False),
    ):
        path.write_text(json.dumps(entry))
        assert _is_measured(path, now) == is_measured


def test_table_of_measurements_matches_the_results(tmp_path):
    text = (ROOT / "docs" / "measurements.md").read_text()
    assert written_into(text, table(ROOT / "bench/results/gpu")) == text
    made = table(tmp_path)
    assert made.startswith("Nothing has been measured on a card yet.")
    assert made.count("not measured yet") == made.count("\n") - 3
