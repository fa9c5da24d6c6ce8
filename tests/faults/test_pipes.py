"""Streams and files that cannot be written."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

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
def test_closed_pipe_ends_a_run_quietly(kind, stdout, line, speaks):
    read, write = os.pipe()
    os.close(read)
    stdout(write)
    assert line(*speaks("--max-new-tokens", "4", *KINDS[kind])) == (0, "", "")


@pytest.mark.parametrize("kind", KINDS)
def test_full_disk_under_stdout_is_reported(kind, stdout, line, speaks):
    stdout(os.open("/dev/full", os.O_WRONLY))
    code, _, err = line(*speaks("--max-new-tokens", "4", *KINDS[kind]))
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
    Trace().write(tmp_path / "t.json")
    before = (tmp_path / "t.json").read_text()
    monkeypatch.setattr(
        os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space"):
        Trace().write(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
