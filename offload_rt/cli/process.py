"""How a program of this package begins and ends: its streams, its signals, its exit code, and one sentence on stderr."""

import io
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from offload_rt.errors import DeviceError, OffloadError, machine_error

INTERRUPTED = 130
_HEEDED = signal.SIGINT, signal.SIGHUP, signal.SIGTERM
# Address space in which torch and transformers can be imported (0.65 GB for the CPU's build). With less they do not raise:
# the loader, C++ and the interpreter itself each give up in a way of their own.
_LEAST_ADDRESS_SPACE = 1 << 30
# What an interrupted program has to clean up before it takes another signal for a wish to end at any price.
_PATIENCE_S = 1.0


def run_program(main: Callable[[], int]) -> int:
    """Run a program as the whole of this process; returns its exit code, with nothing left to be written at exit.

    The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt, unless the program is ending of itself; another one, some
    time later, ends the process at once.
    """
    signals = _Signals()
    try:
        code = _run(main, signals)
    except _Interrupt as error:  # it came after the program's end, before that was known; no other one can follow
        code = _end(error)
    signals.ignore()
    return code


def exit_code(work: Callable[[], None], tell_rest: Callable[[int], None] = lambda code: None) -> int:
    """Do what a program is for; returns its exit code. If it ends early, that is said after what it had produced.

    tell_rest  prints what is still to be printed of that, given the exit code
    Raises an error that is a fault of this program again.
    """
    try:
        try:
            work()
        except (Exception, KeyboardInterrupt) as error:
            return _end(error, tell_rest)
    except _Interrupt as error:  # it came between the other error and the word on it; no other one can follow
        return _end(error, tell_rest)
    return 0


def check_address_space() -> None:
    """Raises DeviceError where a limit leaves no room to import torch."""
    for kind, flag in ((resource.RLIMIT_AS, "-v"), (resource.RLIMIT_DATA, "-d")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and soft < _LEAST_ADDRESS_SPACE:
            raise DeviceError(
                "out of memory", need=f"{_LEAST_ADDRESS_SPACE} bytes to load torch", have=f"a limit of {soft}",
                change=f"raise it by ulimit {flag}",
            )  # fmt: skip


@contextmanager
def whole() -> Iterator[None]:
    """What is done in here is done to its end: a signal interrupts the program after it."""
    signals = _heeding()
    if signals is None:
        yield
        return
    signals.held = True
    try:
        yield
    finally:
        signals.held = False
    signals.interrupt()


def _run(main: Callable[[], int], signals: "_Signals") -> int:
    try:
        _open_streams()
        signals.listen()
        code = main()
    except SystemExit as ended:  # of argparse, which has said why
        code = ended.code
    except BaseException as error:
        if not (signals.received or isinstance(error, KeyboardInterrupt)):
            raise
        code = _end(error)
    _settle()
    try:
        sys.stdout.flush()
    except OSError as error:
        _drop_stdout()
        code = code or _end(error)
    return code


def _end(error: BaseException, tell_rest: Callable[[int], None] = lambda code: None) -> int:
    """Say why a program ended early, after the rest of what it had produced; returns the exit code."""
    _settle()
    code, sentence = _verdict(error)
    try:
        tell_rest(code)
        sys.stdout.flush()
    except OSError:
        _drop_stdout()  # its reader has gone, or its disk is full
    if sentence:
        print(sentence, file=sys.stderr)
    return code


def _settle() -> None:
    """From here on the program is ending: a signal no longer interrupts it."""
    signals = _heeding()
    if signals is not None:
        signals.settled = True


def _heeding() -> "_Signals | None":
    """What heeds this process's signals, some of which may be ignored."""
    # No generator: a signal that meets the end of one cannot be raised.
    for handler in map(signal.getsignal, _HEEDED):
        if isinstance(handler, _Signals):
            return handler
    return None


class _Interrupt(KeyboardInterrupt):
    """Raised once at most, by the first signal.

    Of another class, for Python remembers a plain one that has passed through C, and kills itself by SIGINT at exit.
    """


class _Signals:
    """What signals do to a program."""

    def __init__(self) -> None:
        self.received = self.settled = self.held = False
        self._since = 0.0

    def listen(self) -> None:
        """Take the signals that are not ignored, as SIGINT is in the background of a shell."""
        sys.unraisablehook = self._unraisable
        for number in _HEEDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self)

    def ignore(self) -> None:
        """Let them pass: the interpreter, once it tears itself down, would leave them to the system, which kills."""
        for number in _HEEDED:
            if signal.getsignal(number) is self:
                signal.signal(number, signal.SIG_IGN)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received:
            # At once it may be the same one, sent to the process and to its group, and a file half written.
            if now - self._since > _PATIENCE_S:
                self._leave()
            return
        self.received, self._since = True, now
        self.interrupt()

    def interrupt(self) -> None:
        """Raise the interrupt of a signal that was received, unless what is going on is to be ended first."""
        if self.received and not (self.settled or self.held):
            raise _Interrupt

    def _unraisable(self, ignored: Any) -> None:
        # In a destructor or a callback of the interpreter: there the exception would be printed, and the run go on.
        if isinstance(ignored.exc_value, KeyboardInterrupt):
            self._leave()
        # What was interrupted half made may fail once more when it is thrown away. And of a thread that memory ran out for
        # as it began, the one who started it tells.
        if not self.received and not isinstance(ignored.exc_value, MemoryError):
            sys.__unraisablehook__(ignored)

    def _leave(self) -> None:
        if not self.settled:
            try:
                os.write(2, b"interrupted\n")
            except OSError:
                pass  # nobody reads it
        os._exit(INTERRUPTED)


def _verdict(error: BaseException) -> tuple[int, str]:
    """Exit code and sentence of an error. Raises it again if it is a fault of this program."""
    signals = _heeding()
    # What a library makes of an interrupt in the middle of its import may be any exception.
    if isinstance(error, KeyboardInterrupt) or (signals is not None and signals.received):
        return INTERRUPTED, "interrupted"
    if isinstance(error, BrokenPipeError):
        return 0, ""  # whoever read it has had enough
    known = error if isinstance(error, OffloadError) else machine_error(error)
    return known.exit_code, f"error: {known}"


class _Lossy(io.FileIO):
    """stderr of which no one depends: what cannot be written there is dropped, and the run goes on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _open_streams() -> None:
    """Let no stream be missing, so that no file of the run takes its number, and none fail for want of a character."""
    while (lowest := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(lowest)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    coding = sys.stderr.encoding if sys.stderr else None
    lossy = io.BufferedWriter(_Lossy(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(lossy, coding, errors="backslashreplace", line_buffering=True)


def _drop_stdout() -> None:
    """Send what is still to be written nowhere: Python would complain once more when it flushes stdout at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
