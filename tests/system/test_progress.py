"""Progress bars in narrow terminals."""

import io
import itertools
from types import SimpleNamespace

import pytest
from rich.console import Console

from offload_rt.system import progress
from offload_rt.system.progress import loading_bar


@pytest.mark.parametrize("width", [40, 60, 100])
def test_loading_bar_stays_on_a_line(width, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=clock.__next__))
    terminal = io.StringIO()
    console = Console(file=terminal, width=width, force_terminal=True, color_system=None)
    with loading_bar(console) as draw:
        for nbytes in (0, 61_700_000_000, 123_400_000_000, 138_000_000_000):
            draw(nbytes, 138_000_000_000)
        drawn = terminal.getvalue()
    assert "\n" not in drawn and "B/s" in drawn and "meas" in drawn
    assert all(len(line) <= width for line in drawn.split("\r\x1b[2K")[1:])
