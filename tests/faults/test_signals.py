"""SIGINT, SIGTERM and SIGHUP at random moments of a run: it ends soon, with what it had produced."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faults.counting import Count
from faults.process import Ended, Job, Running, Zygote, judge, start_fresh
from offload_rt.cli import process

ENOUGH = 20  # characters that show that generation is under way
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP}
KINDS = {"text": [], "json": ["--json"], "plan": ["--plan"], "trace": ["--trace", "trace.json"]}

Speaks = Callable[..., list[str]]
Folder = Callable[[], Path]
Start = Callable[[Job], Running]


def _interrupted(start: Start, job: Job, moment: float, *numbers: int) -> Ended:
    """Run, and send signals so many seconds after the program's first line, one close behind the other."""
    running = start(job)
    running.wait_for(running.has_begun)
    time.sleep(moment)
    for number in numbers:
        running.send(number)
        time.sleep(moment / 1000)
    return running.end()


def _seconds(start: Start, job: Job) -> float:
    """What the same run takes undisturbed."""
    running = start(job)
    running.wait_for(running.has_begun)
    ended = running.end()
    judge(ended, [0])
    return ended.seconds


def _judge_all(jobs: list[tuple[Job, float, tuple[int, ...]]], start: Start, faults: Count, check: Callable) -> None:
    with ThreadPoolExecutor(2) as pool:
        for ended in pool.map(lambda one: _interrupted(start, one[0], one[1], *one[2]), jobs):
            with faults.one():
                judge(ended, [0, 130])
                assert (ended.err == "interrupted\n") == (ended.code == 130), ended.err
                check(ended)


@pytest.mark.parametrize(
    ("kind", "name", "n_moments"),
    [
        ("text", "SIGINT", 20),
        ("text", "SIGTERM", 20),
        ("text", "SIGHUP", 6),
        ("json", "SIGINT", 8),
        ("plan", "SIGTERM", 8),
        ("trace", "SIGINT", 8),
    ],
)
def test_random_moments(
    kind: str,
    name: str,
    n_moments: int,
    zygote: Zygote,
    speaks: Speaks,
    folder: Folder,
    begins_with: str,
    faults: Count,
) -> None:
    arguments, moments = speaks("--max-new-tokens", "50", *KINDS[kind]), random.Random(f"{kind} {name}")
    whole = _seconds(zygote.start, Job(arguments, folder()))
    jobs = [
        (Job(arguments, folder()), moments.uniform(0, whole), (SIGNALS[name],) * moments.choice((1, 1, 2)))
        for _ in range(n_moments)
    ]

    def check(ended: Ended) -> None:
        if kind in ("text", "trace"):
            assert begins_with.startswith(ended.out.removesuffix("\n"))
        if kind == "json":
            assert all(begins_with.startswith(json.loads(line)["text"]) for line in ended.out.splitlines())
            assert len(ended.out.splitlines()) <= 1
        left = {path.name for path in ended.job.folder.iterdir()} - {"cache", "trace.json"}
        assert left == {"stdin", "stdout", "stderr"}

    _judge_all(jobs, zygote.start, faults, check)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_moments_of_a_fresh_process_imports_included(
    name: str, speaks: Speaks, folder: Folder, begins_with: str, faults: Count
) -> None:
    arguments, moments = speaks("--max-new-tokens", "50"), random.Random(name)
    whole = _seconds(start_fresh, Job(arguments, folder()))
    jobs = [(Job(arguments, folder()), moments.uniform(0, whole), (SIGNALS[name],)) for _ in range(4)]
    _judge_all(jobs, start_fresh, faults, lambda ended: _is_a_beginning(ended, begins_with))


def _is_a_beginning(ended: Ended, text: str) -> None:
    assert text.startswith(ended.out.removesuffix("\n"))


@pytest.mark.parametrize("name", SIGNALS)
def test_an_interrupted_run_ends_soon_with_what_it_had_produced(
    name: str, zygote: Zygote, endless: list[str], folder: Folder, begins_with: str, faults: Count
) -> None:
    with faults.one():
        running = zygote.start(Job(endless, folder()))
        running.wait_for(lambda: len(running.said()) > ENOUGH)
        running.send(SIGNALS[name])
        ended = running.end()
        judge(ended, [130])
        assert ended.err == "interrupted\n" and ended.out.endswith("\n")
        n = min(len(ended.out) - 1, len(begins_with))
        assert n >= ENOUGH and ended.out[:n] == begins_with[:n]


def test_an_interrupt_when_nobody_reads_any_more_is_no_traceback(
    zygote: Zygote, endless: list[str], folder: Folder, faults: Count
) -> None:
    """As Ctrl-C on a pipeline does: the reader dies of it too."""
    read, write = os.pipe()
    with faults.one():
        running = zygote.start(Job(endless, folder(), stdout=write))
        os.close(write)
        os.read(read, ENOUGH)
        running.send(signal.SIGSTOP)
        os.close(read)
        running.send(signal.SIGINT)
        running.send(signal.SIGCONT)
        judge(running.end(), [0, 130])


def test_a_run_that_is_killed_leaves_a_cache_for_the_next(
    zygote: Zygote, pair: list[str], folder: Folder, tmp_path: Path, faults: Count
) -> None:
    arguments, moments = [*pair, "--prompt", "the quick brown", "--quiet", "--max-new-tokens", "12"], random.Random(9)
    whole = _seconds(zygote.start, Job(arguments, folder()))
    for _ in range(6):
        with faults.one():
            killed = _interrupted(zygote.start, Job(arguments, folder()), moments.uniform(0, whole), signal.SIGKILL)
            assert killed.code in (0, -signal.SIGKILL)
            for path in (killed.job.cache_home / "offload_rt").glob("*.json"):
                assert set(json.loads(path.read_text())) == {"version", "entries"}
    judge(zygote.start(Job(arguments, folder(), cache=killed.job.cache_home)).end(), [0])


@pytest.mark.parametrize("name", SIGNALS)
def test_calibrating(name: str, zygote: Zygote, pair: list[str], folder: Folder, faults: Count) -> None:
    arguments, moments = [*pair, "--tokens", "8", "--json"], random.Random(name)
    running = zygote.start(Job(arguments, folder(), program="calibrate"))
    running.wait_for(running.has_begun)
    ended = running.end()
    assert ended.code == 0, ended.err
    for _ in range(3):
        with faults.one():
            job = Job(arguments, folder(), program="calibrate")
            disturbed = _interrupted(zygote.start, job, moments.uniform(0, ended.seconds), SIGNALS[name])
            lines = disturbed.err.splitlines()
            assert disturbed.code in (0, 130), disturbed.err
            assert "Traceback" not in disturbed.err and "Exception" not in disturbed.err
            assert (lines[-1] == "interrupted") == (disturbed.code == 130)


def test_another_signal_ends_what_does_not_end_of_itself(monkeypatch: pytest.MonkeyPatch, faults: Count) -> None:
    codes, now = [], [100.0]
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    signals = process._Signals()
    with faults.one():
        with pytest.raises(KeyboardInterrupt):
            signals(signal.SIGINT, None)
        signals(signal.SIGINT, None)
        assert codes == []  # it may be the same one, sent twice
        now[0] += 2
        signals.settled = True  # which says nothing more on stderr
        signals(signal.SIGTERM, None)
        assert codes == [130]
