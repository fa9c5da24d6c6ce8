"""Benchmarks of the real model, on the demo target with a chat template."""

import json
import shutil
from pathlib import Path

import pytest

from bench.common.measure import ROOT
from bench.speculate import spec_bench
from bench.speculate.spec_bench import Sums


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Seven questions of MT-Bench by two names, and one translation."""
    kinds = ["writing", "coding"] * 3 + ["writing", "translation"]
    lines = [{"category": kind, "turns": [f"{kind} {i}", "later"]} for i, kind in enumerate(kinds)]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_questions_are_spaced_evenly_and_figures_are_ratios_of_sums(questions):
    chosen = spec_bench.questions_of(questions, per_category=3, skip=1)
    assert chosen == {"mt_bench": ["coding 1", "coding 3", "coding 5"], "translation": []}
    sums = Sums()
    for part in (Sums(10, 5, 1.0, 4.0, (4.0,)), Sums(20, 5, 2.0, 2.0, (1.0,))):
        sums.add(part)
    figures = (3.0, 10.0, 2.0, 1.0)
    names = "tokens_per_pass", "tokens_per_second", "times_plain", "least_times_plain"
    assert sums.figures() == dict(zip(names, figures, strict=True))


def test_spec_bench_prints_each_category_and_their_sum(questions, tmp_path, monkeypatch, capsys):
    model = shutil.copytree(ROOT / "models/demo-target", tmp_path / "model")
    shutil.copy(ROOT / "models/chat.jinja", model / "chat_template.jinja")
    flags = [str(questions), str(model), "--drafters", "none", "ngram", "--per-category", "1"]
    monkeypatch.setattr("sys.argv", ["spec_bench", *flags, "--tokens", "6", "--max-len", "128"])
    spec_bench.main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(record["result"]) == {"none", "ngram"}
    for figures in record["result"].values():
        assert set(figures) == {"mt_bench", "translation", "all"}
        assert all(entry["times_plain"] > 0 for entry in figures.values())
    assert record["result"]["none"]["all"]["tokens_per_pass"] == 1
