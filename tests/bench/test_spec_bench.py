"""Benchmarks of the real model, on the demo target with a chat template."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.common.measure import ROOT
from bench.compare import estimates
from bench.speculate import spec_bench
from bench.speculate.spec_bench import Sums
from offload_rt.config import EngineConfig


@pytest.fixture
def chat_model(tmp_path: Path) -> str:
    """The demo target with a chat template."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "models/demo-target", folder)
    shutil.copy(ROOT / "models/chat.jinja", folder / "chat_template.jinja")
    return str(folder)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Seven questions of MT-Bench by two names, and one translation."""
    kinds = ["writing", "coding"] * 3 + ["writing", "translation"]
    path = tmp_path / "questions.jsonl"
    lines = [
        json.dumps({"category": kind, "turns": [f"{kind} {i}", "later"]})
        for i, kind in enumerate(kinds)
    ]
    path.write_text("\n".join(lines))
    return path


def test_questions_are_spaced_evenly_after_the_skipped(questions):
    chosen = spec_bench.questions_of(questions, per_category=3, skip=1)
    assert chosen == {"mt_bench": ["coding 1", "coding 3", "coding 5"], "translation": []}


def test_figures_are_ratios_of_sums():
    sums = Sums()
    for tokens, passes, seconds, plain_s in ((10, 5, 1.0, 4.0), (20, 5, 2.0, 2.0)):
        part = Sums()
        part.tokens, part.passes, part.seconds, part.plain_s = tokens, passes, seconds, plain_s
        part.ratios = (plain_s / seconds,)
        sums.add(part)
    assert sums.figures() == {
        "tokens_per_pass": 3.0, "tokens_per_second": 10.0, "times_plain": 2.0,
        "least_times_plain": 1.0,
    }  # fmt: skip


def test_spec_bench_prints_each_category_and_their_sum(questions, chat_model, monkeypatch, capsys):
    flags = [str(questions), chat_model, "--drafters", "none", "ngram", "--per-category", "1"]
    monkeypatch.setattr("sys.argv", ["spec_bench", *flags, "--tokens", "6", "--max-len", "128"])
    spec_bench.main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(record["result"]) == {"none", "ngram"}
    for figures in record["result"].values():
        assert set(figures) == {"mt_bench", "translation", "all"}
        assert all(entry["times_plain"] > 0 for entry in figures.values())
    assert record["result"]["none"]["all"]["tokens_per_pass"] == 1


def test_estimates_are_divided_by_the_measurement(chat_model, monkeypatch, capsys):
    """A forecast of 2 s and one of 3 s a token."""
    config = EngineConfig(chat_model, drafter="none", max_model_len=128)
    asked = []

    def forecast(settings: object, config: EngineConfig) -> SimpleNamespace:
        asked.append(settings)
        return SimpleNamespace(run=SimpleNamespace(seconds_per_token=2.0))

    survey = SimpleNamespace(run=SimpleNamespace(seconds_per_token=3.0))
    monkeypatch.setattr(estimates, "config_of", lambda *_: config)
    monkeypatch.setattr(estimates, "of_run", forecast)
    monkeypatch.setattr(estimates, "without_weights", lambda settings, *_: settings.disk)
    monkeypatch.setattr(estimates, "request_of", lambda settings, *_: settings)
    monkeypatch.setattr(estimates, "predict", lambda request, machine: survey)
    monkeypatch.setattr(estimates, "measure_disk_gbps", lambda _: 1.5)
    flags = ["--models", "file", "--drafting", "none", "--tokens", "8"]
    monkeypatch.setattr("sys.argv", ["estimates", *flags])
    estimates.main()
    entry = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["file, none"]
    assert entry["plan"] == pytest.approx(2 * entry["tokens_per_second"])
    assert entry["doctor"] == pytest.approx(3 * entry["tokens_per_second"])
    assert entry["plain"] is None and entry["token"] > 0
    assert asked[0].max_new_tokens == 8 and asked[0].disk is None
