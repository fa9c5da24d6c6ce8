"""Limits of memory, files and time, and what a machine does when one is reached."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from checkpoints import speaking_checkpoint
from test_command_line import PROMPT

from faults.counting import Count
from faults.process import Ended, Job, Zygote, judge, start_fresh

Speaks = Callable[..., list[str]]
Folder = Callable[[], Path]
RunAll = Callable[[Sequence[Job]], list[Ended]]

MIB = 1 << 20


@pytest.mark.parametrize("limits", [{"AS": 200 * MIB}, {"AS": 600 * MIB}, {"DATA": 100 * MIB}])
def test_too_little_memory_for_the_imports_alone(
    limits: dict[str, int], speaks: Speaks, folder: Folder, faults: Count
) -> None:
    with faults.one():
        judge(start_fresh(Job(speaks(), folder(), limits=limits)).end(), [3], "out of memory", "ulimit")


def test_too_little_memory_for_what_was_asked(zygote: Zygote, tmp_path: Path, folder: Folder, faults: Count) -> None:
    # Three kilobytes of cache for a token, and a million tokens: the plan allows it, what Python and torch take does not.
    speaking_checkpoint(tmp_path / "m", max_position_embeddings=2**21, num_key_value_heads=4)
    million = ["--max-model-len", "1150000", "--max-new-tokens", "1149000", "--device-memory", "4200000000"]
    arguments = ["--model", str(tmp_path / "m"), "--prompt", PROMPT, "--device", "cpu", "--quiet", *million]
    with faults.one():
        ended = zygote.start(Job(arguments, folder(), limits={"AS": 4 << 30})).end()
        judge(ended, [3], "out of memory", "--max-model-len")
        assert not ended.out


def test_memory_that_runs_out_anywhere(
    zygote: Zygote, speaks: Speaks, begins_with: str, folder: Folder, run_all: RunAll, faults: Count
) -> None:
    """From less than the process has already to just enough, in steps."""
    status = Path(f"/proc/{zygote.pid}/status").read_text()
    taken = int(re.search(r"VmSize:\s+(\d+) kB", status).group(1)) << 10
    limits = [max(taken, 1 << 30) + n * 4 * MIB for n in range(-6, 18)]
    jobs = [Job(speaks("--max-new-tokens", "20"), folder(), limits={"AS": limit}) for limit in limits]
    for ended in run_all(jobs):
        with faults.one():
            judge(ended, [0, 3])
            assert begins_with.startswith(ended.out.removesuffix("\n"))


def test_files_that_cannot_be_opened(speaks: Speaks, folder: Folder, run_all: RunAll, faults: Count) -> None:
    jobs = [Job(speaks("--max-new-tokens", "4"), folder(), limits={"NOFILE": n}) for n in range(5, 17)]
    for ended in run_all(jobs):
        with faults.one():
            judge(ended, [0, 2, 3])


@pytest.mark.parametrize("limits", [{"FSIZE": 0}, {"FSIZE": 100}, {"CORE": 0, "STACK": 1 * MIB}, {"MEMLOCK": 0}])
def test_other_limits(limits: dict[str, int], speaks: Speaks, folder: Folder, zygote: Zygote, faults: Count) -> None:
    read, write = os.pipe()  # the sentence may go through no file
    with faults.one(), os.fdopen(read) as told:
        arguments = speaks("--max-new-tokens", "60", "--trace", "t.json")
        ended = zygote.start(Job(arguments, folder(), limits=limits, stderr=write)).end()
        os.close(write)
        judge(ended, [3] if "FSIZE" in limits else [0])
        assert (told.read() == "") == (ended.code == 0)
