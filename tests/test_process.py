"""How a program ends: what is said, and what is not."""

import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from offload_rt.cli import process
from offload_rt.cli.process import INTERRUPTED, _settle, _Signals, exit_code, run_program, whole
from offload_rt.errors import PromptError


@pytest.mark.parametrize(
    "received, error, is_told",
    [
        (False, AttributeError("half made"), True),
        (True, AttributeError("half made"), False),
        (False, MemoryError(), False),
    ],
)
def test_what_is_told_of_an_error_that_nobody_can_catch(
    received: bool, error: Exception, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setattr(sys, "__unraisablehook__", told.append)
    signals = _Signals()
    signals.received = received
    signals._unraisable(SimpleNamespace(exc_value=error))
    assert len(told) == is_told


@pytest.fixture
def signals() -> Iterator[_Signals]:
    """What signals do to a program, while one is tested."""
    before = signal.getsignal(signal.SIGTERM)
    signals = _Signals()
    signal.signal(signal.SIGTERM, signals)
    yield signals
    signal.signal(signal.SIGTERM, before)


def test_a_signal_waits_for_what_is_to_be_done_whole(signals: _Signals) -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), whole():
        signal.raise_signal(signal.SIGTERM)
        done.append("whole")
    assert done
    with whole():
        _settle()
    assert signals.received


def test_a_program_that_takes_no_signals_does_things_whole_as_well() -> None:
    with whole():
        pass


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a program changes in its process is put back."""
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = {number: signal.getsignal(number) for number in process._HEEDED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class _SignalAt:
    """Sends a signal before the n-th step of the interpreter in `program`, from where signals are heeded on."""

    def __init__(self, n: int) -> None:
        self.n_left = n

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != process.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and isinstance(signal.getsignal(signal.SIGTERM), _Signals):
            self.n_left -= 1
            if self.n_left == 0:
                signal.raise_signal(signal.SIGTERM)
        return self


def _ends_well() -> None:
    with whole():
        print("text", flush=True)


def _ends_early() -> None:
    print("text", end="")
    raise PromptError("the prompt", change="give one")


def _ended(work: Callable[[], None], steps: _SignalAt) -> int:
    """The exit code of a program that is signalled at a step."""
    for number in process._HEEDED:
        signal.signal(number, signal.SIG_DFL)
    before = sys.gettrace()
    sys.settrace(steps)
    try:
        return run_program(lambda: exit_code(work, lambda code: print(" and the rest")))
    finally:
        sys.settrace(before)


@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize(
    ("work", "code", "said", "outs"),
    [
        (_ends_well, 0, "", ("", " and the rest\n", "text\n", "text\n and the rest\n")),
        (_ends_early, 2, "error: the prompt; give one\n", ("", " and the rest\n", "text and the rest\n")),
    ],
)
def test_a_signal_at_any_step_of_the_end_is_heeded_or_let_pass(
    work: Callable[[], None], code: int, said: str, outs: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    codes = set()
    _ended(work, _SignalAt(0))  # Python 3.12 tells of the steps of a function from the next time on
    capfd.readouterr()
    for n in itertools.count(1):
        steps = _SignalAt(n)
        ended = _ended(work, steps)
        out, err = capfd.readouterr()
        assert (ended, err) in ((code, said), (INTERRUPTED, "interrupted\n")), n
        codes.add(ended)
        assert out in outs, n
        if steps.n_left > 0:
            break
    assert codes == {code, INTERRUPTED} and n > 100
