"""Comparison of systems: computed figures, failing peers, and one run of two real peers."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import speaking_checkpoint
from transformers import AutoModelForCausalLM

from bench.common import processes
from bench.common.checkpoints import gguf_model
from bench.common.measure import ROOT
from bench.common.processes import ProcessRun, run_json
from bench.common.prompts import QUESTIONS, chat_prompts
from bench.compare import chart, contract, gguf_types, outcome
from bench.compare.contract import Answer, Job, Report, Supply
from bench.compare.outcome import Parting, Row, Run
from bench.compare.peers import llama_cpp
from bench.compare.peers.__main__ import main as peers_main
from offload_rt.errors import SettingsError
from offload_rt.text.detokenize import load_tokenizer
from scripts import compare

DEMO = ROOT / "models/demo-target"


def run_of(
    token_ids: list[int], arrivals: list[tuple[float, int]], source: str = "disk", nbytes=10**9
) -> Run:
    answers = [Answer(token_ids, arrivals)]
    return Run(Report(1.0, Supply(source, nbytes), answers, [8 * 10**9], 0, {}), 5)


def test_rows_have_a_floor_and_are_sorted_by_kind_and_speed(tmp_path):
    runs = {
        "transformers_resident": [run_of([1, 2, 3], [(1.0, 1), (2.0, 2), (3.0, 3)], "memory")],
        "offload_rt_speculative": [run_of([1, 2, 4], [(1.0, 1), (2.0, 3)])],
        "vllm_prefetch": [],
    }
    gbps = {"disk": [1.0, 2.0, 3.0], "memory": [10.0]}
    rows = outcome.rows(list(runs), runs, {"vllm_prefetch": "not installed: vllm"}, gbps)
    plain, drafted, missing = rows
    # faster, but of another kind
    assert (drafted.name, missing.name) == ("offload_rt_speculative", "vllm_prefetch")
    # 1 GB at 3 GB/s at best, for two tokens a pass
    assert (drafted.floor_s, plain.floor_s) == pytest.approx((1 / 3 / 2, 0.1))
    assert drafted.parted == (Parting(0, 2),) and plain.parted == ()
    lines = outcome.table(rows).splitlines()
    assert "parts at token 3 of prompt 1" in lines[3] and "2.67 GB" not in lines[3]
    assert "did not run: not installed: vllm" in lines[4]
    assert [Row.of(json.loads(json.dumps(row.entry()))) for row in rows] == rows
    # Of a resident model nothing moves; a system that would read the disk has no floor.
    runs = {"accelerate_disk": [run_of([1, 2], [(1.0, 1), (2.0, 2)], "disk", 0)]}
    rows = outcome.rows(list(runs), runs, {}, {"disk": [0.0]})
    assert rows[0].floor_s == 0 and "| -       |" in outcome.table(rows)
    chart.draw(rows, "title", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_start_with_a_different_peer_and_failing_peers_are_rows(monkeypatch):
    turns = []

    def run_peer(name: str, job: Job, prompts: list[list[int]], *_: Any) -> Run:
        turns.append((name, prompts))
        if name == "offload_rt_automatic":
            raise RuntimeError("out of luck")
        return run_of([1, 2], [(1.0, 1), (2.0, 2)])

    monkeypatch.setattr(compare, "measure_floor", lambda course: ({"disk": 1.0}, 2))
    monkeypatch.setattr(compare, "run_peer", run_peer)
    here = Path()
    job = Job(here, here, here, 1, 0, 256, here)
    peers = [
        "offload_rt_plain",
        "offload_rt_speculative",
        "transformers_resident",
        "offload_rt_automatic",
    ]
    comparison = compare.run_all(compare.Course(job, [[1], [2]], [3], 4, 1.0), peers)
    second = (*peers[1:3], peers[0])
    assert turns == [(name, [[1]]) for name in peers] + [(name, [[2]]) for name in second]
    assert comparison.reasons == {"offload_rt_automatic": "out of luck"}
    rows = outcome.rows(peers, comparison.runs, comparison.reasons, comparison.gbps)
    assert "did not run: out of luck" in outcome.table(rows)
    of_its_kind = {"transformers_resident": [1.0, 1.0]}
    ratios = compare.ratios(comparison, compare.decode_rate)
    assert ratios == {"offload_rt_plain": of_its_kind, "offload_rt_speculative": {}}


def test_peers_have_titles_and_refusals(tmp_path):
    job = Job(tmp_path, tmp_path, tmp_path, 1, 0, 1, tmp_path, gguf=tmp_path)
    with pytest.raises(SettingsError, match="control group"):
        contract.find("llama_cpp_mapped").load(job)
    for each in map(contract.find, contract.names()):
        assert each.title and len(each.refusal() or "x" * 11) > 10


@pytest.mark.skipif(llama_cpp.unfit() is not None, reason=str(llama_cpp.unfit()))
def test_llama_cpp_text_equals_transformers(tmp_path):
    """With and without a draft, in float32; the prompt pass and the passes of one token."""
    wide = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    wide.save_pretrained(tmp_path / "float32")
    path = gguf_model(DEMO, "F32", tmp_path)
    job = Job(path, path, ROOT / "models/demo-draft", 1 << 30, 0, 128, tmp_path, gguf=path)
    resident = Job(DEMO, tmp_path / "float32", DEMO, 1 << 30, 0, 128, tmp_path)
    plain, assisted, expected = (
        outcome.run_peer(name, at, [[5, 6, 7, 8]], [3], 24)
        for name, at in (
            ("llama_cpp", job), ("llama_cpp_assisted", job), ("transformers_resident", resident),
        )
    )  # fmt: skip
    assert plain.token_ids == assisted.token_ids == expected.token_ids
    assert plain.tokens_per_pass == 1 < assisted.tokens_per_pass
    assert plain.peak_rss > path.stat().st_size  # of node


def test_gguf_types_are_compared_round_by_round(tmp_path, monkeypatch):
    """Figures are rates of offload_rt over those of llama.cpp; the order alternates."""
    turns = []

    def answer(name: str, *_: Any) -> Run:
        turns.append(name)
        tokens, first_s = ([1, 2, 3], 2.0) if name == "llama_cpp" else ([1, 2, 4], 4.0)
        return run_of(tokens, [(first_s, 1), (first_s + 1 + len(turns), 3)])

    monkeypatch.setattr(gguf_types, "run_peer", answer)
    runs = gguf_types.measure(tmp_path, [[7] * 100] * 2, [7], 3, tmp_path)
    assert turns == ["llama_cpp", "offload_rt_plain", "offload_rt_plain", "llama_cpp"]
    assert gguf_types.n_equal(*runs) == 4
    figures = gguf_types.figures(*runs, [100, 100])
    assert figures["prompt llama.cpp"].median == 50
    # 2 tokens in 2, 3, 4 and 5 s
    ratios = figures["decode ratio"]
    assert [ratios.least, ratios.largest] == pytest.approx([2 / 3, 5 / 4])


def test_chat_prompts_have_the_asked_length():
    tokenizer = load_tokenizer(DEMO)
    tokenizer.chat_template = "{% for m in messages %}user: {{ m.content }}\n{% endfor %}reply:"
    short = chat_prompts(tokenizer, 3)
    assert [tokenizer.decode(ids) for ids in short] == [
        f"user: {question}\nreply:" for question in QUESTIONS[:3]
    ]
    long = chat_prompts(tokenizer, 2, 200)
    assert [len(ids) for ids in long] == [200, 200]
    text = tokenizer.decode(long[1])
    assert text.startswith("user:") and text.endswith(f"{QUESTIONS[1]}\nreply:")


def test_two_peers_give_the_same_tokens(tmp_path, monkeypatch, capfd):
    def run_here(arguments: list[str], *_: Any) -> ProcessRun:
        monkeypatch.setattr("sys.argv", arguments[1:])
        peers_main()
        return ProcessRun(json.loads(capfd.readouterr().out.splitlines()[-1]), 1.0, 1)

    monkeypatch.setattr(outcome, "run_json", run_here)
    model = speaking_checkpoint(tmp_path / "model")
    job = Job(model, model, model, 1_000_000, 1, 64, tmp_path)
    peers = ("transformers_resident", "offload_rt_plain")
    resident, ours = (outcome.run_peer(name, job, [[5, 6, 7]], [3], 6) for name in peers)
    assert resident.token_ids == ours.token_ids and len(ours.token_ids) == 6
    for run in (resident, ours):
        assert [n for _, n in run.arrivals] == [1, 2, 3, 4, 5, 6]
    assert ours.report.supply.source == "disk" and ours.report.supply.pass_bytes > 0


def test_process_reports_its_result_and_peak_memory(tmp_path, monkeypatch):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert processes._high_water(os.getpid()) == pytest.approx(peak, rel=0.01)
    was_read = tmp_path / "read"
    monkeypatch.setattr(processes, "_high_water", lambda _: was_read.touch() or 7)
    wait = f"import os\nwhile not os.path.exists({str(was_read)!r}): pass\nprint('{{}}')"
    run = run_json(["-c", wait])
    assert (run.result, run.peak_rss) == ({}, 7)
    with pytest.raises(RuntimeError, match="exit code 1: ValueError: out of luck"):
        run_json(["-c", "raise ValueError('out of luck')"])
