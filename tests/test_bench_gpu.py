"""The bench for a card, as far as it goes without one: models of a shape, sections, and the table made from results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pretended_card import pretended_card

from bench.gpu import _shapes, onchip, streamed
from bench.gpu._table import table, written_into
from offload_rt import LLM, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
PROMPT = [5, 300, 17, 511, 42]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Expanded checkpoints lie in a folder of this test, at a size that a test can bear."""
    home = tmp_path_factory.mktemp("shapes")

    def written(source, shape, *sizes):
        out = home / source.name
        if not out.exists():
            n = str(_shapes._N_OWN[source] + 1)
            subprocess.run(
                [sys.executable, "scripts/expand.py", "--source", str(source), "--out", str(out), "--layers", n],
                cwd=ROOT, check=True, capture_output=True,
            )  # fmt: skip
        return out

    return written


def test_a_repeated_layer_changes_nothing(small):
    with LLM(str(_shapes.TARGET), device="cpu", dtype="float32", drafter="none", max_model_len=64) as llm:
        want = llm.generate(PROMPT, SamplingParams(max_new_tokens=20))[0].token_ids
    target = small(_shapes.TARGET, "")
    with _shapes.opened(target, 11, device="cpu", dtype="float32", drafter="none", max_model_len=64) as llm:
        assert len(llm.plan.tiers) == 11
        assert llm.generate(PROMPT, SamplingParams(max_new_tokens=20))[0].token_ids == want


def test_the_streamed_section_runs(small, monkeypatch):
    monkeypatch.setattr(streamed, "written", small)
    monkeypatch.setattr(streamed, "upload_gbps", lambda device: 1.0)
    sizes = streamed.Shapes("", 11, "", 5, "275MiB", (1, 8), 1, 12)
    with pretended_card(monkeypatch):
        found = json.loads(json.dumps(streamed.measure(sizes)))
    assert found["plan"]["streamed_layers"] > 0 and found["plan"]["streamed_bytes"] > 0
    assert [one["rows"] for one in found["passes"]] == [1, 8]
    assert {one["temperature"] for one in found["generation"]} == {0.0, 0.6}


def test_the_section_of_models_on_the_card_runs(small, monkeypatch):
    monkeypatch.setattr(onchip, "written", small)
    monkeypatch.setattr(onchip, "device_gbps", lambda: 1.0)
    with pretended_card(monkeypatch):
        found = onchip.measure(onchip.Shapes((("llama-2-7b", 9),), 12, (1, 8)))
    shape = json.loads(json.dumps(found))["shapes"][0]
    assert shape["floor_s"] > 0 and set(shape["levels"]) == {"1", "8"} and shape["times_faster"] > 0


def test_the_table_says_what_is_missing(tmp_path):
    made = table(tmp_path)
    assert made.startswith("Nothing has been measured on a card yet.")
    assert made.count("not measured yet") == made.count("\n") - 3


def test_the_table_shows_figures_and_failures(tmp_path):
    about = {"device": "a card", "torch": "2", "commit": "abc"}
    passes = [
        {"rows": 1, "seconds": [2.0, 2.02], "floor_s": 1.99, "link_gbps": 50.0},
        {"rows": 768, "seconds": [2.1], "floor_s": 2},
    ]
    runs = {"temperature": 0.0, "times_faster": 11.0, "runs": [{"link_busy": 0.98}]}
    (tmp_path / "streamed.json").write_text(json.dumps({**about, "result": {"passes": passes, "generation": [runs]}}))
    (tmp_path / "peers.json").write_text(json.dumps({**about, "failed": "no room"}))
    made = table(tmp_path)
    for words in ("abc", "1.010", "1.045", "98.0%", "11.00x at T=0.0", "failed: no room", "not measured yet"):
        assert words in made


def test_the_readme_has_the_table_of_the_results_that_are_there():
    text = (ROOT / "README.md").read_text()
    assert written_into(text, table(ROOT / "bench/results/gpu")) == text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(monkeypatch, capsys):
    from bench.gpu import __main__

    monkeypatch.setattr("sys.argv", ["bench.gpu"])
    assert __main__.main() == 3
    assert "needs a CUDA device" in capsys.readouterr().err
