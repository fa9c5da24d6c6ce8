"""How a program of this package begins and ends: its signals, its exit code, and one sentence on
stderr.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import FrameType

from offload_rt.errors import INTERRUPTION, OffloadError, machine_error

INTERRUPTED = 130
_SIGNALS = signal.SIGINT, signal.SIGHUP, signal.SIGTERM
# `timeout` and a closed terminal send the same signal twice, to the process and to its group: a
# second signal this soon is taken for the first one.
_PATIENCE_S = 1.0


class _Interrupt(KeyboardInterrupt):
    """Of another class: Python remembers a plain one that has passed through C, and kills itself by
    SIGINT at its end.
    """


def run_program(main: Callable[[], int]) -> int:
    """Run a program as the whole of this process; returns its exit code.

    The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt. Another one, a second later or
    more, ends the process.
    """
    received: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(time.monotonic())
        if len(received) == 1:
            raise _Interrupt
        if received[-1] - received[0] > _PATIENCE_S:
            os._exit(INTERRUPTED)

    # nohup ignores some
    heeded = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, interrupt)
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
    code = main()
    for number in heeded:  # what the interpreter does at its end is not interrupted by an exception
        signal.signal(number, signal.SIG_DFL)
    return code


@contextmanager
def interrupts_held() -> Iterator[list[int]]:
    """Let a first SIGINT be added to what this gives, and a second one interrupt."""
    received: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def show_any_text() -> None:
    """Replace a character that stdout's encoding lacks: the run matters more than the character."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def exit_code(
    work: Callable[[], object], tell_rest: Callable[[int], None] = lambda code: None
) -> int:
    """Do what a program is for; returns its exit code. If it ends early, that is said after what it
    had produced.

    tell_rest  prints what is still to be printed of that, given the exit code
    Raises an error that is a fault of this program again.
    """
    code = 0
    sentence = ""
    try:
        work()
    except SystemExit as ended:  # of argparse, after the text of --help
        code = int(ended.code or 0)
    except (Exception, KeyboardInterrupt) as error:
        code, sentence = _verdict(error)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from offload_rt.system import ranks  # with torch, which a wrong flag need not wait for

        code, sentence = ranks.end(code, sentence)
    try:
        if sentence:
            tell_rest(code)
        sys.stdout.flush()
    except OSError as error:  # its reader has gone, or its disk is full
        _drop_stdout()
        code, sentence = (code, sentence) if code else _verdict(error)
    if sentence:
        with suppress(OSError):
            print(sentence, file=sys.stderr)
    return code


def _verdict(error: BaseException) -> tuple[int, str]:
    """Exit code and sentence of an error. Raises it again if it is a fault of this program."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, INTERRUPTION
    if isinstance(error, BrokenPipeError):
        return 0, ""  # whoever read it has had enough
    known = error if isinstance(error, OffloadError) else machine_error(error)
    return known.exit_code, f"error: {known}"


def _drop_stdout() -> None:
    """Send what is still to be written nowhere: Python would complain once more when it flushes
    stdout at exit.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
