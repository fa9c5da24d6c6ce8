"""Signals and closed readers of separate processes: a run ends soon and keeps its text."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command_line import PROMPT, command, surroundings

from offload_rt import LLM
from offload_rt.errors import CapacityError

PATIENCE_S = 120.0  # what takes so long, even on a busy machine, has hung
ENOUGH = 20  # characters that show that generation is under way


@pytest.fixture(scope="module")
def endless(model: Path) -> list[str]:
    """Command of a run without end, with the smallest sufficient memory."""
    with pytest.raises(CapacityError) as least:
        LLM(str(model), device="cpu", max_model_len=8192, device_memory=1)
    budget = re.search(r"set device_memory to (\d+)", str(least.value)).group(1)
    flags = [
        "--model",
        str(model),
        "--prompt",
        PROMPT,
        "--quiet",
        "--device",
        "cpu",
        "--max-model-len",
        "8192",
    ]
    return command(*flags, "--max-new-tokens", "8000", "--device-memory", budget)


@contextmanager
def _started(line: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    # What a shell starts in the background ignores SIGINT, what nohup starts SIGHUP, and so would
    # their children.
    heeds = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", heeds, *line], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=surroundings(XDG_CACHE_HOME=str(folder / "cache")), cwd=folder,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _read(process: subprocess.Popen[bytes], n: int) -> str:
    return b"".join(os.read(process.stdout.fileno(), 1) for _ in range(n)).decode()


@pytest.mark.slow
def test_signal_ends_a_run_with_its_text(endless, begins_with, tmp_path):
    """SIGTERM only; test_process.py covers all handled signals."""
    with _started(endless, tmp_path) as process:
        text = _read(process, ENOUGH)
        process.send_signal(signal.SIGTERM)
        rest, err = process.communicate(timeout=PATIENCE_S)
        text += rest.decode()
        assert (process.returncode, err) == (130, b"interrupted\n")
        n = min(len(text) - 1, len(begins_with))
        assert text.endswith("\n") and n >= ENOUGH and text[:n] == begins_with[:n]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert all(path.suffix == ".json" for path in (tmp_path / "cache" / "offload_rt").iterdir())


@pytest.mark.slow
def test_closed_reader_ends_a_run_quietly(endless, begins_with, tmp_path):
    with _started(endless, tmp_path) as process:
        assert _read(process, ENOUGH) == begins_with[:ENOUGH]
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr.read() == b""


_FORGETFUL = """
import sys
from offload_rt import LLM, SamplingParams
target, draft = sys.argv[1:]
llm = LLM(target, draft, device="cpu", max_model_len=64, device_memory=1_500_000, tree_size=8)
assert llm.plan.tiers.count("disk")
print(len(llm.generate("a", SamplingParams(max_new_tokens=20))[0].token_ids))
"""


@pytest.mark.slow
def test_program_without_close_ends_and_saves_statistics(model, draft, tmp_path):
    with _started([sys.executable, "-c", _FORGETFUL, str(model), str(draft)], tmp_path) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (0, b"20\n", b"")
    assert (tmp_path / "cache" / "offload_rt" / "pairs.json").exists()
