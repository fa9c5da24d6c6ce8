"""Streams that are closed, full, or that nobody reads any more."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.counting import Count
from faults.process import PATIENCE_S, Job, Zygote, judge, start_fresh
from offload_rt.system.trace import Trace

Speaks = Callable[..., list[str]]
Folder = Callable[[], Path]

KINDS = {
    "text": [],
    "json": ["--json"],
    "plan": ["--plan"],
    "help": ["--help"],
    "report": ["--show-tree", "--baseline"],
}
WORDS = {"stdout": ["No space left"], "stderr": []}


def _loud(arguments: list[str]) -> list[str]:
    return [one for one in arguments if one != "--quiet"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_has_gone_ends_no_run_with_a_traceback(
    stream: str, kind: str, zygote: Zygote, speaks: Speaks, folder: Folder, faults: Count
) -> None:
    read, write = os.pipe()
    os.close(read)
    arguments = speaks("--max-new-tokens", "12", *KINDS[kind])
    with faults.one():
        job = Job(arguments if stream == "stdout" else _loud(arguments), folder(), **{stream: write})
        ended = zygote.start(job).end()
        judge(ended, [0])
        assert stream == "stdout" or ended.out
    os.close(write)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk_under_a_stream(
    stream: str, kind: str, zygote: Zygote, speaks: Speaks, folder: Folder, faults: Count
) -> None:
    arguments = speaks("--max-new-tokens", "12", *KINDS[kind])
    with open("/dev/full", "wb") as full, faults.one():
        job = Job(arguments if stream == "stdout" else _loud(arguments), folder(), **{stream: full.fileno()})
        ended = zygote.start(job).end()
        # What is lost of the report is no reason to end; of the text it is.
        judge(ended, [3] if stream == "stdout" else [0], *WORDS[stream])
        assert stream == "stdout" or ended.out


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2), "fresh"])
def test_streams_that_are_closed_from_the_beginning(
    closed: Any, zygote: Zygote, speaks: Speaks, folder: Folder, begins_with: str, faults: Count
) -> None:
    start = start_fresh if closed == "fresh" else zygote.start
    closed = (0, 1, 2) if closed == "fresh" else closed
    with faults.one():
        ended = start(Job(speaks("--max-new-tokens", "12"), folder(), closed=closed)).end()
        judge(ended, [0])
        assert begins_with.startswith(ended.out.removesuffix("\n")) and (1 in closed or ended.out)


def test_a_prompt_from_a_stdin_that_is_closed(zygote: Zygote, model: Path, folder: Folder, faults: Count) -> None:
    with faults.one():
        arguments = ["--model", str(model), "--prompt-file", "-", "--quiet", "--device", "cpu"]
        judge(zygote.start(Job(arguments, folder(), closed=(0,))).end(), [2], "empty")


@pytest.mark.parametrize("n", [1, 5, 40])
def test_a_reader_that_has_had_enough(
    n: int, zygote: Zygote, speaks: Speaks, folder: Folder, begins_with: str, faults: Count
) -> None:
    read, write = os.pipe()
    with faults.one():
        head = subprocess.Popen(["head", "-c", str(n)], stdin=read, stdout=subprocess.PIPE)
        os.close(read)
        running = zygote.start(Job(speaks("--max-new-tokens", "60"), folder(), stdout=write))
        os.close(write)
        out, _ = head.communicate(timeout=PATIENCE_S)
        judge(running.end(), [0])
        assert out.decode() == begins_with[:n]


def test_a_reader_that_goes_while_it_speaks(zygote: Zygote, endless: list[str], folder: Folder, faults: Count) -> None:
    read, write = os.pipe()
    with faults.one():
        running = zygote.start(Job(endless, folder(), stdout=write))
        os.close(write)
        os.read(read, 20)
        os.close(read)
        judge(running.end(), [0])


@pytest.mark.parametrize("name", ["", ".", "/", "no/such/folder/t.json", "x" * 300, "cache"])
def test_a_timeline_that_cannot_be_written(
    name: str, zygote: Zygote, speaks: Speaks, folder: Folder, faults: Count
) -> None:
    with faults.one():
        path = folder()
        (path / "cache").mkdir()
        judge(zygote.start(Job(speaks("--trace", name), path)).end(), [2, 3])
        assert {one.name for one in path.iterdir()} == {"cache", "stdin", "stdout", "stderr"}


def test_a_timeline_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Trace().write(tmp_path / "t.json")
    before = (tmp_path / "t.json").read_text()
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        Trace().write(tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
