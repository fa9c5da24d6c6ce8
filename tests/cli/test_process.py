"""Start and end of programs: signals, exit codes and messages."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest.mock import Mock

import pytest
from support.processes import handled

from offload_rt.cli import main, process
from offload_rt.cli.process import INTERRUPTED, exit_code, run_program
from offload_rt.errors import CacheError, LinkError, PromptError


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Restore signal handlers; background shells start programs with ignored signals."""
    with ExitStack() as stack:
        for number in process._SIGNALS:
            stack.enter_context(handled(number, signal.SIG_DFL))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield


def _raises(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        print("text", end="")
        raise error

    return work


@pytest.mark.parametrize(("error", "code", "said"), [
    (PromptError("the prompt", change="give one"), 2, "error: the prompt; give one\n"),
    (LinkError("the disk has gone"), 3, "error: the disk has gone\n"),
    (OSError(28, "No space left on device"), 3, "error: the machine: No space left on device; "),
    (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
])  # fmt: skip
def test_early_end_is_one_sentence_after_the_output(error, code, said, capfd, monkeypatch):
    assert exit_code(_raises(error), lambda code: print(f" and the rest, {code}")) == code
    out, err = capfd.readouterr()
    assert out == f"text and the rest, {code}\n"
    assert err.startswith(said) and err.count("\n") == 1
    assert exit_code(_raises(BrokenPipeError()), lambda code: print("the rest")) == 0
    assert capfd.readouterr() == ("text", "")  # the reader of the output has gone
    with pytest.raises(AttributeError):
        exit_code(_raises(AttributeError("half made")))
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=BrokenPipeError)))
    assert exit_code(_raises(error)) == code


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
