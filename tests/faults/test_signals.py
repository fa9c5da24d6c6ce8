"""Signals and closed readers of separate processes: a run ends soon and keeps its text."""

import os
import re
import signal
from pathlib import Path

import pytest
from support.command_line import PROMPT
from support.programs import started, wait_until

from offload_rt import LLM
from offload_rt.errors import CapacityError

ENOUGH = 20  # characters that show that generation is under way


@pytest.fixture(scope="module")
def endless(model: Path) -> list[str]:
    """Arguments of a run without end, with the smallest sufficient memory."""
    with pytest.raises(CapacityError) as least:
        LLM(str(model), device="cpu", max_model_len=8192, device_memory=1)
    budget = re.search(r"set device_memory to (\d+)", str(least.value))[1]
    flags = f"--device cpu --max-model-len 8192 --max-new-tokens 8000 --device-memory {budget}"
    return ["--model", str(model), "--prompt", PROMPT, "--quiet", *flags.split()]


def test_signal_ends_a_run_with_its_text(endless, begins_with, tmp_path):
    """SIGTERM only; test_process.py covers all handled signals."""
    with started("offload_rt.run", endless, tmp_path) as (program,):
        wait_until(lambda: len(program.out) >= ENOUGH)
        program.signal(signal.SIGTERM)
        assert (program.code(), program.err) == (130, "interrupted\n")
        text = program.out
        n = min(len(text) - 1, len(begins_with))
        assert text.endswith("\n") and n >= ENOUGH and text[:n] == begins_with[:n]
    assert {path.name for path in tmp_path.iterdir()} == {"0", "cache"}
    assert all(path.suffix == ".json" for path in (tmp_path / "cache" / "offload_rt").iterdir())


def test_closed_reader_ends_a_run_quietly(endless, begins_with, tmp_path):
    pipe = tmp_path / "0" / "out"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    with started("offload_rt.run", endless, tmp_path) as (program,), pipe.open() as reader:
        assert reader.read(ENOUGH) == begins_with[:ENOUGH]
        reader.close()
        assert (program.code(), program.err) == (0, "")


_FORGETFUL = """
import sys
from offload_rt import LLM, SamplingParams
target, draft = sys.argv[1:]
llm = LLM(target, draft, device="cpu", max_model_len=64, device_memory=1_500_000, tree_size=8)
assert llm.plan.tiers.count("disk")
print(len(llm.generate("a", SamplingParams(max_new_tokens=20))[0].token_ids))
"""


def test_program_without_close_ends_and_saves_statistics(model, draft, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_FORGETFUL)
    with started(str(script), [str(model), str(draft)], tmp_path) as (program,):
        assert (program.code(), program.out, program.err) == (0, "20\n", "")
    assert (tmp_path / "cache" / "offload_rt" / "pairs.json").exists()
