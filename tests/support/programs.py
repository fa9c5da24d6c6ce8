"""Programs in processes forked from a preloaded process, alone or as ranks under torchrun."""

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["support.programs", "offload_rt.llm", "offload_rt.cli.run", "transformers"]
)
PATIENCE_S = 120.0  # what takes so long, even on a busy machine, has hung


@dataclass
class Program:
    """A process, and where it writes."""

    process: ForkServerProcess
    folder: Path

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def code(self, seconds: float = PATIENCE_S) -> int | None:
        """Its exit code, once it has ended; None if it does not end in time."""
        self.process.join(seconds)
        return self.process.exitcode

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def started(
    program: str,
    arguments: Sequence[str],
    folder: Path,
    n: int = 1,
    given: str = "",
    terminal: str = "",
    **changes: str,
) -> Iterator[list[Program]]:
    """Start a module or script, as n ranks if n > 1, and kill them at the end of the body.

    given     stdin of rank 0
    terminal  file of a terminal for all input and output
    changes   environment variables
    """
    common = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), **changes}
    if n > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        common |= {
            "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
        }  # fmt: skip
    programs = []
    for i in range(n):
        (place := folder / str(i)).mkdir(parents=True, exist_ok=True)
        (place / "in").write_text(given if i == 0 else "")
        for name in ("out", "err"):
            (place / name).touch()
        files = [terminal] * 3 if terminal else [str(place / name) for name in ("in", "out", "err")]
        environment = common | ({"RANK": str(i), "LOCAL_RANK": str(i)} if n > 1 else {})
        process = _CONTEXT.Process(target=_run, args=(program, list(arguments), files, environment))
        process.start()
        programs.append(Program(process, place))
    try:
        yield programs
    finally:
        for running in programs:
            running.process.kill()
            running.process.join()


def _run(program: str, arguments: list[str], files: list[str], environment: dict[str, str]) -> None:
    """Run a program like an interpreter, from imported modules to its exit."""
    os.environ |= environment
    os.setsid()  # the first terminal opened below then controls this process
    for number, file in enumerate(files):
        mode = os.O_WRONLY if number else os.O_RDONLY
        os.dup2(os.open(file, mode | os.O_APPEND), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [program, *arguments]
    code = 0
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
