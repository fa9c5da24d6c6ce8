"""Start and end of programs: imports, signals, exit codes and messages."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from unittest.mock import Mock

import pytest
from support.checkpoints import llama_config, llama_tensors, write_checkpoint

from offload_rt.cli import main, process
from offload_rt.cli.process import INTERRUPTED, exit_code, run_program
from offload_rt.errors import CacheError, LinkError, PromptError
from offload_rt.planning.known_models import KNOWN


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Restore signal handlers; background shells start programs with ignored signals."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in process._SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _fail(error: BaseException) -> None:
    print("text", end="")
    raise error


@pytest.mark.parametrize(("error", "code", "said"), [
    (PromptError("the prompt", change="give one"), 2, "error: the prompt; give one\n"),
    (LinkError("the disk has gone"), 3, "error: the disk has gone\n"),
    (OSError(28, "No space left on device"), 3, "error: the machine: No space left on device; "),
    (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
])  # fmt: skip
def test_early_end_is_one_sentence_after_the_output(error, code, said, capfd, monkeypatch):
    assert exit_code(partial(_fail, error), lambda code: print(f" and the rest, {code}")) == code
    out, err = capfd.readouterr()
    assert out == f"text and the rest, {code}\n"
    assert err.startswith(said) and err.count("\n") == 1
    assert exit_code(partial(_fail, BrokenPipeError()), lambda code: print("the rest")) == 0
    assert capfd.readouterr() == ("text", "")  # the reader of the output has gone
    with pytest.raises(AttributeError):
        exit_code(partial(_fail, AttributeError("half made")))
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=BrokenPipeError)))
    assert exit_code(partial(_fail, error)) == code


@pytest.mark.parametrize("number", process._SIGNALS)
def test_second_signal_ends_the_process(number, monkeypatch, capfd):
    ended = []
    now = [100.0]
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def tell_rest(code: int) -> None:
        # `timeout` sends its signal twice, to the process and to its group
        signal.raise_signal(number)
        assert not ended
        now[0] += 2
        signal.raise_signal(number)

    work = lambda: exit_code(lambda: signal.raise_signal(number), tell_rest)  # noqa: E731
    assert [run_program(work)] == ended == [INTERRUPTED]
    assert capfd.readouterr() == ("", "interrupted\n")
    assert signal.getsignal(number) == signal.SIG_DFL


def test_handled_interrupt_does_not_end_the_process():
    """An interrupt that passes through C makes Python end by SIGINT."""
    program = """
import signal
from offload_rt.cli.process import exit_code, run_program
signal.signal(signal.SIGINT, signal.default_int_handler)
work = lambda: exec("signal.raise_signal(signal.SIGINT)")
assert run_program(lambda: exit_code(work)) == 130
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "interrupted\n")


def test_warning_of_a_program_is_one_line(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(main, "run_program", lambda program: 7)
    with pytest.raises(SystemExit, match="7"):
        main.script("run")
    shown = warnings.formatwarning(CacheError("a full disk", change="make room"), CacheError, "", 1)
    assert shown == "warning: a full disk; make room\n"


def test_signal_before_a_command_is_one_line_and_ignored_signals_stay_ignored(capfd):
    assert run_program(lambda: signal.raise_signal(signal.SIGINT)) == INTERRUPTED
    assert capfd.readouterr() == ("", "interrupted\n")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    assert run_program(lambda: exit_code(lambda: signal.raise_signal(signal.SIGHUP))) == 0


# Neither torch nor transformers is imported for a plan or a wrong flag.
# Runs command lines, and prints the exit code of each and the large libraries loaded so far.
PROGRAM = """
import json, sys
from offload_rt.cli.main import main
for arguments in json.loads(sys.argv[1]):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code or 0
    loaded = sorted({"torch", "transformers", "numba", "huggingface_hub"} & {*sys.modules})
    print(json.dumps([code, loaded]), file=sys.stderr)
"""
VARIANTS = [
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0},
     "quantization_config": {"quant_method": "fp8"}},
    {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
     "max_window_layers": 2},
]  # fmt: skip


@pytest.mark.slow
def test_plans_help_and_flag_errors_import_no_large_library(tmp_path):
    """Plans of a config.json, its directory, files with weights, and a shape."""
    plans = []
    for name, more in enumerate(VARIANTS):
        path = tmp_path / f"{name}" / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(KNOWN["llama2-7b"] | more))
        plans += [[str(path.parent), "--json"], [str(path)]]
    config = llama_config(max_position_embeddings=512)
    weights = str(write_checkpoint(tmp_path / "weights", config, llama_tensors(config)))
    plans += [
        ["mistral-small-3"], ["qwen3-8b"], [weights], [weights, "--draft-model", weights],
        ["llama2-70b", "--draft-model", "llama2-7b", "--sweep", "memory"],
        ["llama2-70b", "--drafter", "self", "--gpu", "h100"],
        ["llama2-7b", "--kv-memory", "1GiB", "--kv-dtype", "fp8", "--link-format", "lossless"],
        ["llama3-8b", "--pipeline", "2"],
    ]  # fmt: skip
    commands = [["plan", "--gpu", "rtx4090", *plan] for plan in plans]
    codes = [0] * len(commands)
    more = {"run": ["--prompt", "x"], "calibrate": ["--draft-model", str(tmp_path)]}
    for verb in ("run", "chat", "serve", "plan", "convert", "calibrate"):
        wrong = ["--model", str(tmp_path / "nothing"), *more.get(verb, [])]
        commands += [[verb, "--help"], [verb, "--model", "m", "--frobnicate"], [verb, *wrong]]
        codes += [0, 2, 2]
    program = [sys.executable, "-c", PROGRAM, json.dumps([["--help"], *commands])]
    done = subprocess.run(program, capture_output=True, text=True)
    outcomes = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("[")]
    for command, code, outcome in zip(commands, codes, outcomes[1:], strict=True):
        assert outcome == [code, []], command
