"""Report of a run: speed first, traffic as measured."""

from dataclasses import fields

import pytest

from offload_rt import Stats
from offload_rt.cli.format import PlainPass, format_speed, report

ZERO = {item.name: 0 for item in fields(Stats)}


def stats(**changes: float) -> Stats:
    times = {"seconds": 5.0, "seconds_per_token": 0.5, "prefill_seconds": 1.5}
    counts = {"n_tokens": 10, "n_passes": 5, "tokens_per_pass": 2.0, "nodes_per_tree": 4.0}
    decoding = {"measured_seconds_per_token": 0.4, "predicted_seconds_per_token": 0.5}
    return Stats(**{**ZERO, **times, **counts, **decoding, **changes})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "25.0 tokens/s"),
        (0.5, "2.00 tokens/s"),
        (4.0, "0.25 tokens/s (4.00 s per token)"),
        (50.0, "0.020 tokens/s (50.00 s per token)"),
    ],
)
def test_speed_has_seconds_per_token_above_one(seconds, text):
    assert format_speed(seconds) == text


def test_report_begins_with_speed_and_gain():
    lines = report(stats(), PlainPass(1.2, True), {"import": 3.0, "load": 0.2}, False).splitlines()
    assert lines == [
        "2.50 tokens/s, 3.0 times plain decoding (measured)",
        "10 tokens in 5.00 s, 2.00 tokens per pass",
        "start: import 3.0 s, load 0.2 s, first pass 1.5 s",
    ]
    assert "estimated" in report(stats(), PlainPass(1.2, False), {}, False)


def test_traffic_of_the_report_is_measured():
    """A mixture whose layers are resident still reads experts."""
    text = report(stats(link_bytes=158_000_000, link_gbps=0.5), None, {}, True)
    assert "0.032 GB per pass at 0.50 GB/s" in text and "nothing crossed" not in text
    assert "nothing crossed a link" in report(stats(), None, {}, True)
