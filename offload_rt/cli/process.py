"""Process start and exit: signals, exit codes, and error messages on stderr."""

import gc
import os
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from types import FrameType

from offload_rt.errors import INTERRUPTION, OffloadError, machine_error

INTERRUPTED = 130
_SIGNALS = signal.SIGINT, signal.SIGHUP, signal.SIGTERM
# `timeout` and a closed terminal signal the process and its group. Ignore the second signal within
# this time.
_PATIENCE_S = 1.0
# New objects until garbage is collected. Python's 700 slow imports down by a fifth.
_COLLECTED = 100_000


class _Interrupt(KeyboardInterrupt):
    """Subclass because Python ends by SIGINT after a plain KeyboardInterrupt passed through C."""


def run_program(main: Callable[[], int]) -> int:
    """Run a program as this process; returns its exit code.

    The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt.
    A second signal after at least a second ends the process.
    """
    gc.set_threshold(_COLLECTED)
    received: list[float] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(time.monotonic())
        if len(received) == 1:
            raise _Interrupt
        if received[-1] - received[0] > _PATIENCE_S:
            os._exit(INTERRUPTED)

    # nohup ignores SIGHUP
    handled = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, interrupt)
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # open until exit
    try:
        code = main()
    except _Interrupt:  # while a command was imported
        print(INTERRUPTION, file=sys.stderr)
        code = INTERRUPTED
    for number in handled:  # no exceptions while the interpreter shuts down
        signal.signal(number, signal.SIG_DFL)
    gc.freeze()  # exit need not search the packages for garbage, which takes 0.3 s
    return code


@contextmanager
def interrupts_held() -> Iterator[list[int]]:
    """Append a first SIGINT to the yielded list; raise KeyboardInterrupt on the second."""
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


def command(
    new_parser: Callable[[], ArgumentParser],
) -> Callable[[Callable[[Namespace], None]], Callable[..., int]]:
    """Convert a function of parsed flags to one of arguments that returns the exit code."""

    def decorate(work: Callable[[Namespace], None]) -> Callable[..., int]:
        return lambda arguments=None: exit_code(lambda: work(new_parser().parse_args(arguments)))

    return decorate


def exit_code(
    work: Callable[[], object], tell_rest: Callable[[int], None] = lambda code: None
) -> int:
    """Run `work` and print the error message after the output so far; returns the exit code.

    tell_rest  prints the remaining output, given the exit code
    Reraises bugs of this program.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # other encodings lack some characters of answers
        sys.stdout.reconfigure(errors="replace")
    # transformers reads this when it loads; its warnings quote arbitrary config contents.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    code, sentence = 0, ""
    try:
        work()
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        code, sentence = _verdict(error)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from offload_rt.system import ranks  # imports torch, slow for a wrong flag

        code, sentence = ranks.end(code, sentence)
    try:
        if sentence:
            tell_rest(code)
        sys.stdout.flush()
    except OSError as error:  # closed pipe or full disk
        with open(os.devnull, "w") as null:  # Python reports a failed flush at exit
            os.dup2(null.fileno(), sys.stdout.fileno())
        code, sentence = (code, sentence) if code else _verdict(error)
    if sentence:
        with suppress(OSError):
            print(sentence, file=sys.stderr)
    return code


def _verdict(error: BaseException) -> tuple[int, str]:
    """Return exit code and message of an error; reraise bugs of this program."""
    if isinstance(error, SystemExit):  # argparse after --help
        return int(error.code or 0), ""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, INTERRUPTION
    if isinstance(error, BrokenPipeError):
        return 0, ""  # the reader closed the pipe
    known = error if isinstance(error, OffloadError) else machine_error(error)
    return known.exit_code, f"error: {known.for_command_line}"
