"""Report of a run: speed first, traffic as measured."""

from offload_rt.cli.format import Totals, format_speed, report
from offload_rt.executor.stats import PassTimes


def passes(*, link_nbytes=0, n_tokens=2, n_rows=8):
    """A prompt pass of 1.5 s, and four passes of 0.8 s that wait for the link half of the time."""
    ends = [1.5, 2.3, 3.1, 3.9, 4.7]
    link_s = 0.4 if link_nbytes else 0.0
    prompt = PassTimes(0.0, 0.1, 1.4, 1.5, link_nbytes, 1.5 * bool(link_nbytes), 0.0, None, 9)
    rest = (PassTimes(x - 0.8, x, x, x, link_nbytes, link_s, 0.0, 1.0, n_rows) for x in ends[1:])
    return [(times, n_tokens) for times in (prompt, *rest)]


def test_report_begins_with_speed_and_gain():
    """The speed is that of decoding, without the pass over the prompt."""
    totals = Totals.of_passes(passes(), 1)
    lines = report(totals, 1.2, {"import": 3.0, "load": 0.2}).splitlines()
    assert lines == [
        "2.50 tokens/s, 3.0 times plain decoding at 0.833",
        "10 tokens in 4.70 s, 2.00 tokens per pass",
        "start: import 3.0 s, load 0.2 s, first pass 1.4 s",
    ]
    assert "times" not in report(totals, None, {})
    plain = passes(n_rows=1, n_tokens=1)
    assert "times" not in report(Totals.of_passes(plain, 1), None, {})
    mixed = Totals.of_passes([*plain, passes()[1]], 1)
    assert report(mixed, None, {}).startswith("1.50 tokens/s, 1.2 times plain decoding at 1.25\n")
    several = report(Totals.of_passes(passes(n_tokens=6), 3), None, {}).splitlines()
    assert several == ["7.50 tokens/s", "30 tokens of 3 answers in 4.70 s, 6.00 tokens per pass"]
    # A mixture whose layers are resident still reads experts.
    text = report(Totals.of_passes(passes(link_nbytes=200_000_000), 1), None, {}, True)
    assert "0.2 GB per pass at 0.50 GB/s, link busy 50% of the time; at most 5.00 tokens/s" in text
    assert "nothing crossed a link" in report(totals, None, {}, True)
    for seconds, text in (
        (0.04, "25.0 tokens/s"), (0.5, "2.00 tokens/s"), (4.0, "0.25 tokens/s (4.00 s per token)"),
        (50.0, "0.020 tokens/s (50.00 s per token)"),
    ):  # fmt: skip
        assert format_speed(seconds) == text
