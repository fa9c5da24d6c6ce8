"""Streams and files that cannot be written."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO
from unittest.mock import Mock

import pytest
from support.command_line import one_sentence

from offload_rt.system.trace import Trace

KINDS = {"text": [], "json": ["--json"], "plan": ["--plan"], "help": ["--help"]}


@pytest.fixture
def stdout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], TextIO]]:
    """Replace stdout by another file."""
    opened = []

    def replace(file: int) -> TextIO:
        opened.append(os.fdopen(file, "w", encoding="utf-8"))
        monkeypatch.setattr(sys, "stdout", opened[-1])
        return opened[-1]

    yield replace
    for stream in opened:
        stream.close()  # raises where what could not be written is still there


@pytest.mark.parametrize("kind", KINDS)
def test_closed_pipes_and_full_disks_under_stdout(kind, stdout, line, speaks):
    flags = speaks("--max-new-tokens", "4", *KINDS[kind])
    read, write = os.pipe()
    os.close(read)
    stdout(write)
    assert line(*flags) == (0, "", "")
    stdout(os.open("/dev/full", os.O_WRONLY))
    code, _, err = line(*flags)
    assert code == 3
    one_sentence(err, "No space left")


@pytest.mark.parametrize("name", [".", "no/such/folder/t.json", "x" * 300])
def test_unwritable_trace_is_reported_before_the_run(name, line, speaks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = line(*speaks("--trace", name))
    assert (code, out) == (2 if "/" in name else 3, "")
    one_sentence(err)
    assert not list(tmp_path.iterdir())


def test_trace_write_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    Trace().write(path)
    before = path.read_text()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        Trace().write(path)
    assert path.read_text() == before
    assert [*tmp_path.iterdir()] == [path]
