"""Reports of runs, and of timelines: handmade, of a real run, and invalid."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from support.checkpoints import speaking_checkpoint
from support.command_line import one_sentence

from offload_rt.cli import report, run
from offload_rt.cli.format import format_speed
from offload_rt.cli.format import report as run_report
from offload_rt.errors import TraceError
from offload_rt.executor.sequence import PassTimes
from offload_rt.system import trace
from offload_rt.system.trace import COMPUTE, DRAFT, LINK, SLOTS_FULL, VERIFY, WAIT, slot_lane, waits

# A step of ten seconds: one of drafting with the link still, then the link works for seven, two of
# them without compute.
STEP = (
    (slot_lane(LINK, 0), "layer 0", 1.0, 5.0), (slot_lane(LINK, 1), "layer 1", 4.0, 8.0),
    (waits(LINK), SLOTS_FULL, 0.0, 1.0), (waits(LINK), SLOTS_FULL, 8.0, 9.5),
    (WAIT, "layer 0", 1.0, 3.0), (COMPUTE, "layer 0", 3.0, 6.0), (COMPUTE, "head", 6.0, 9.0),
    (DRAFT, "tree", 0.0, 1.0), (DRAFT, "level 1", 0.2, 0.8),
    (VERIFY, "2 tokens of 3 nodes", 9.0, 9.5),
)  # fmt: skip


def written(path: Path, spans: tuple = STEP) -> Path:
    timeline = trace.Trace()
    for span in spans:
        timeline.add(*span)
    timeline.write(path)
    return path


def test_shares_of_a_handmade_timeline(tmp_path, capsys):
    path = tmp_path / "t.json"
    disabled = trace.Trace(on=False)
    with disabled.span(COMPUTE, "layer 0"):
        disabled.state(waits(LINK), SLOTS_FULL)
    disabled.write(path)
    assert report.read(path) == []
    for spans in ((), STEP[:-1], STEP[5:7]):
        with pytest.raises(TraceError, match="no pass from draft to verdict"):
            report.shares(report.read(written(path, spans)))
    times = report.shares(report.read(written(path)))
    assert times.n_steps == 1
    assert times.seconds == pytest.approx(9.5)
    shares = (times.link, times.compute, times.draft, times.verify, times.wait, times.rest)
    assert [share * 9.5 for share in shares] == pytest.approx([7, 6, 1, 0.5, 2, 0], abs=1e-5)
    still = {lane: share * 9.5 for lane, share in times.idle[SLOTS_FULL].items()}
    assert still == pytest.approx({DRAFT: 1.0, COMPUTE: 1.0, VERIFY: 0.5})
    assert list(times.idle) == [SLOTS_FULL]
    assert report.main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "link was busy 73.7%" in out and "was idle 26.3%, slots full" in out
    assert report.main([str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n_steps"] == 1
    unexplained = tuple(span for span in STEP if span[0] != waits(LINK))
    times = report.shares(report.read(written(path, unexplained)))
    assert sum(times.idle["between two reads"].values()) * 9.5 == pytest.approx(2.5, abs=1e-5)
    resident = tuple(span for span in STEP if not span[0].startswith(LINK))
    times = report.shares(report.read(written(path, resident)))
    assert (times.link, times.idle) == (0, {})
    assert "all layers were resident" in report.text(times)


def event(**changes: object) -> str:
    span = {"ph": "X", "name": "n", "pid": 0, "tid": 0, "ts": 0, "dur": 1} | changes
    titles = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": COMPUTE}}
    return json.dumps({"traceEvents": [titles, span], "otherData": {"format": trace.FORMAT}})


@pytest.mark.parametrize("content", [
    "", "{", "[]", "7", "null", '"text"', "\x00\x01", '{"traceEvents": []}',
    '{"traceEvents": [], "otherData": {"format": "another"}}',
    json.dumps({"traceEvents": 7, "otherData": {"format": trace.FORMAT}}),
    event(ts="x"), event(ts=None), event(tid=5), "\xff",
])  # fmt: skip
def test_invalid_timeline_is_exit_code_2(content, tmp_path, line):
    (tmp_path / "trace.json").write_text(content, encoding="latin-1")
    for name in ("trace.json", "nothing.json", "."):
        code, out, err = line(str(tmp_path / name), main=report.main)
        assert (code, out) == (2, "")
        one_sentence(err, str(tmp_path / name))


@pytest.mark.parametrize("drafted", [False, True])
def test_real_run_is_traced_and_reported(drafted, tmp_path, capsys):
    model, path = speaking_checkpoint(tmp_path / "model"), tmp_path / "trace.json"
    flags = f"--model {model} --device cpu --max-model-len 64 --max-new-tokens 12 --trace {path}"
    if drafted:
        draft = speaking_checkpoint(tmp_path / "draft", num_hidden_layers=5)
        flags += f" --draft-model {draft} --tree-size 8 --tree-depth 3"
    else:
        flags += " --drafter none --device-memory 1000000"
    assert run.main([*flags.split(), "--quiet", "--prompt", "the quick brown"]) == 0
    capsys.readouterr()
    assert report.main([str(path), "--json"]) == 0
    times = json.loads(capsys.readouterr().out)
    assert 0 < times["compute"] < 1 and 0 < times["verify"] < 1
    parts = ("compute", "draft", "verify", "wait", "rest")
    assert 0.9 < sum(times[part] for part in parts) < 1.001
    spans = report.read(path)
    if drafted:
        assert any(span.lane == DRAFT and span.name == "level 1" for span in spans)
        return
    assert times["n_steps"] == [span.name for span in spans].count("head") == 12
    slots = slot_lane(LINK, 0), slot_lane(LINK, 1)
    assert {COMPUTE, DRAFT, VERIFY, waits(LINK), *slots} <= {span.lane for span in spans}
    idle = sum(sum(during.values()) for during in times["idle"].values())
    assert 0 < times["link"] + idle < 1.02
    for slot in slots:  # what is in a slot never overlaps
        mine = [span for span in spans if span.lane == slot]
        assert all(a.end_s <= b.start_s + 1e-6 for a, b in pairwise(mine))


def passes(*, link_nbytes=0, n_tokens=2, n_rows=8):
    """A prompt pass of 1.5 s, and four passes of 0.8 s that wait for the link half of the time."""
    ends = [1.5, 2.3, 3.1, 3.9, 4.7]
    link_s = 0.4 if link_nbytes else 0.0
    prompt = PassTimes(0.0, 0.1, 1.4, 1.5, link_nbytes, 1.5 * bool(link_nbytes), 0.0, None, 9)
    rest = (PassTimes(x - 0.8, x, x, x, link_nbytes, link_s, 0.0, 1.0, n_rows) for x in ends[1:])
    return [(times, n_tokens) for times in (prompt, *rest)]


def test_report_begins_with_speed_and_gain():
    """The speed is that of decoding, without the pass over the prompt."""
    totals = (passes(), 1)
    assert run_report(*totals, 1.2, {"import": 3.0, "load": 0.2}).splitlines() == [
        "2.50 tokens/s, 3.0 times plain decoding at 0.833",
        "10 tokens in 4.70 s, 2.00 tokens per pass",
        "start: import 3.0 s, load 0.2 s, first pass 1.4 s",
    ]
    assert "times" not in run_report(*totals, None, {})
    plain = passes(n_rows=1, n_tokens=1)
    assert "times" not in run_report(plain, 1, None, {})
    mixed = run_report([*plain, passes()[1]], 1, None, {})
    assert mixed.startswith("1.50 tokens/s, 1.2 times plain decoding at 1.25\n")
    several = run_report(passes(n_tokens=6), 3, None, {})
    assert several == "7.50 tokens/s\n30 tokens of 3 answers in 4.70 s, 6.00 tokens per pass"
    # A mixture whose layers are resident still reads experts.
    text = run_report(passes(link_nbytes=200_000_000), 1, None, {}, True)
    assert "0.2 GB per pass at 0.50 GB/s, link busy 50% of the time; at most 5.00 tokens/s" in text
    assert "nothing crossed a link" in run_report(*totals, None, {}, True)
    for seconds, text in (
        (0.04, "25.0 tokens/s"), (0.5, "2.00 tokens/s"), (4.0, "0.25 tokens/s (4.00 s per token)"),
        (50.0, "0.020 tokens/s (50.00 s per token)"),
    ):  # fmt: skip
        assert format_speed(seconds) == text
