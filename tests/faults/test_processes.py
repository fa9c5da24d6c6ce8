"""Killed, interrupted or failing processes: all ranks end soon, with one sentence of the reason."""

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.command_line import PROMPT
from support.programs import PATIENCE_S, Program, started, wait_until

from offload_rt import LLM
from offload_rt.errors import CapacityError

ENDLESS = [
    "--device", "cpu", "--prompt", "the quick brown", "--quiet", "--max-tokens", "8000",
    "--drafter", "none",
]  # fmt: skip
SHORT = ["--device", "cpu", "--prompt", "the quick brown", "--max-tokens", "5", "--pipeline", "2"]
SOON_S = 10.0

_LOADS = """
import os, signal, sys
from unittest.mock import Mock
from offload_rt.cli import run
from offload_rt.cli.process import run_program
from offload_rt.engine.loader import Loader
from offload_rt.errors import LinkError
from offload_rt.executor.runner import Runner
how, *arguments = sys.argv[1:]
if os.environ["RANK"] == "1":
    if how == "dies":
        Loader.fill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif how == "fails":
        Runner.layers = Mock(side_effect=LinkError("the disk has gone"))
    else:
        arguments[arguments.index("--model") + 1] = how
sys.exit(run_program(lambda: run.main(arguments)))
"""

_FORGETFUL = """
import json, sys
from offload_rt import LLM, SamplingParams
settings = {"device": "cpu", "max_model_len": 64} | json.loads(sys.argv[1])
llm = LLM(*sys.argv[2:], **settings)
n_tokens = len(llm.generate("a", SamplingParams(max_tokens=20))[0].token_ids)
print(n_tokens, llm.plan.tiers.count("disk") > 0)
try:
    LLM(*sys.argv[2:], **settings)
except Exception as error:
    print(error)
"""

_RAISING = """
import os, sys
from offload_rt import LLM
LLM(sys.argv[1] if os.environ["RANK"] == "0" else "/no/such/model", device="cpu", max_model_len=64)
"""


def run_script(text: str, folder: Path, *arguments: object) -> Any:
    (folder / "script.py").write_text(text)
    return started(str(folder / "script.py"), [*map(str, arguments)], folder, 2)


def _ends(ranks: list[Program]) -> list[int | None]:
    until = time.monotonic() + SOON_S
    return [rank.code(max(until - time.monotonic(), 0)) for rank in ranks]


def _named(rank: int, ranks: list[Program]) -> str:
    return f"error: rank {rank} (process {ranks[rank].process.pid} on {os.uname().nodename})"


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_rank_ends_the_others_with_its_name(killed, model, begins_with, tmp_path):
    with started("offload_rt.run", ["--model", str(model), *ENDLESS], tmp_path, 2) as ranks:
        wait_until(lambda: len(ranks[0].out) > 20)
        ranks[killed].signal(signal.SIGKILL)
        assert _ends(ranks) == ([-9, 3] if killed == 0 else [3, -9])
        assert ranks[1 - killed].err == f"{_named(killed, ranks)} has ended\n"
        assert ranks[0].out[:20] == begins_with[:20] and ranks[1].out == ""


@pytest.mark.parametrize(("how", "code", "why"), [
    ("dies", -9, " has ended\n"), ("fails", 3, ": the disk has gone\n"),
    ("/no/such/model", 2, ": no model called /no/such/model: no such"),
])  # fmt: skip
def test_rank_that_fails_to_start_is_named(how, code, why, model, tmp_path):
    with run_script(_LOADS, tmp_path, how, "--model", model, *ENDLESS) as ranks:
        wait_until(lambda: ranks[1].process.exitcode is not None)
        assert _ends(ranks) == [3, code]
        assert ranks[0].err.startswith(_named(1, ranks) + why) and ranks[0].err.count("\n") == 1
        assert ranks[1].err == ""


def test_interrupt_ends_all_ranks_with_one_message(model, tmp_path):
    with started("offload_rt.run", ["--model", str(model), *ENDLESS], tmp_path, 2) as ranks:
        wait_until(lambda: len(ranks[0].out) > 20)
        for rank in ranks:
            rank.signal(signal.SIGINT)
        assert _ends(ranks)[0] == 130
        assert (ranks[0].err, ranks[1].err) == ("interrupted\n", "")
        assert ranks[0].out.endswith("\n")
    assert all(path.suffix == ".json" for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_script_with_one_llm_need_not_close_it(model, tmp_path):
    with run_script(_FORGETFUL, tmp_path, json.dumps({"drafter": "none"}), model) as ranks:
        assert [rank.code() for rank in ranks] == [0, 0]
        refusal = "a second LLM in a run of several ranks; use the existing LLM, or start a new run"
        assert ranks[0].out.splitlines() == ["20 False", refusal]
        assert (ranks[1].out, ranks[1].err) == ("", "")


def test_uncaught_error_names_the_failed_rank(model, tmp_path):
    with run_script(_RAISING, tmp_path, model) as ranks:
        assert _ends(ranks) == [1, 1]
        said = f"{_named(1, ranks)[7:]}: no model called /no/such/model"
        assert said in ranks[0].err.splitlines()[-1]
        assert ranks[1].err == ""


def test_only_rank_0_prints_and_writes(model, tmp_path):
    path = tmp_path / "trace.json"
    flags = ["--model", str(model), *SHORT, "--json", "--trace", str(path)]
    with started("offload_rt.run", flags, tmp_path, 2) as ranks:
        assert [rank.code() for rank in ranks] == [0, 0]
        assert len(json.loads(ranks[0].out)["token_ids"]) == 5
        assert json.loads(path.read_text())["traceEvents"]
        assert "5 tokens in" in ranks[0].err and (ranks[1].out, ranks[1].err) == ("", "")


def test_chat_with_several_ranks(model, tmp_path):
    template = tmp_path / "template"
    template.write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
    flags = f"--device cpu --max-tokens 5 --drafter none --pipeline 2 --chat-template {template}"
    line = ["--model", str(model), *flags.split()]
    with started("offload_rt.chat", line, tmp_path, 2, given="the quick\nbrown\n") as ranks:
        assert [rank.code() for rank in ranks] == [0, 0], ranks[0].err
        assert ranks[0].out.count("\n") >= 2 and (ranks[1].out, ranks[1].err) == ("", "")


def test_server_ends_when_a_rank_dies_between_passes(model, tmp_path):
    line = ["--model", str(model), "--device", "cpu", "--port", "0", "--pipeline", "2"]
    with started("offload_rt.serve", line, tmp_path, 2) as ranks:
        wait_until(lambda: "for people" in ranks[0].err)
        url = re.search(r"http://127.0.0.1:\d+/v1", ranks[0].err)[0] + "/completions"
        body = json.dumps({"prompt": "the quick", "max_tokens": 4}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        answer = json.load(urllib.request.urlopen(request, timeout=PATIENCE_S))
        assert answer["usage"]["completion_tokens"] == 4
        ranks[1].signal(signal.SIGKILL)
        assert _ends(ranks) == [3, -9]
        assert ranks[0].err.splitlines()[-1] == f"{_named(1, ranks)} has ended"
        assert ranks[1].err == ""


@pytest.mark.slow
def test_torchrun_ends_all_ranks(model, tmp_path):
    flags = ["--standalone", "--nproc-per-node", "2", "-m", "offload_rt.run", "--model"]
    with started("torch.distributed.run", [*flags, str(model), *ENDLESS], tmp_path) as (program,):
        wait_until(lambda: program.out)
        ranks = psutil.Process(program.process.pid).children()
        (killed,) = (rank for rank in ranks if rank.environ()["RANK"] == "1")
        killed.kill()
        assert program.code() != 0 and not any(rank.is_running() for rank in ranks)
        lines = program.err.splitlines()
        (said,) = (line for line in lines if line.startswith(("error: ", "interrupted")))
        assert said.startswith(f"error: rank 1 (process {killed.pid} on ")


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


def test_program_without_close_ends_and_saves_statistics(model, draft, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_FORGETFUL)
    settings = json.dumps({"device_memory": 1_500_000, "tree_size": 8})
    with started(str(script), [settings, str(model), str(draft)], tmp_path) as (program,):
        assert (program.code(), program.out, program.err) == (0, "20 True\n", "")
    assert (tmp_path / "cache" / "offload_rt" / "pairs.json").exists()
