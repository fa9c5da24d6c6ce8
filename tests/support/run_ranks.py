"""Runs of several ranks from preloaded processes, with the environment of torchrun."""

import atexit
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["support.run_ranks", "offload_rt.llm", "offload_rt.cli.run", "transformers"]
)
PATIENCE_S = 120.0  # what takes so long, even on a busy machine, has hung


@dataclass
class Rank:
    """A process, and where it writes."""

    process: ForkServerProcess
    folder: Path

    @property
    def out(self) -> str:
        """Contents of stdout so far."""
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        """Contents of stderr so far."""
        return (self.folder / "err").read_text()

    def code(self, seconds: float = PATIENCE_S) -> int | None:
        """Its exit code, once it has ended; None if it does not end in time."""
        self.process.join(seconds)
        return self.process.exitcode


@contextmanager
def started(
    program: str, arguments: Sequence[str], folder: Path, n: int = 2, given: str = ""
) -> Iterator[list[Rank]]:
    """Start the ranks of a module or script and kill them at the end of the body.

    given  stdin of rank 0
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {
        "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"),
    }  # fmt: skip
    ranks = []
    for i in range(n):
        (place := folder / str(i)).mkdir(parents=True)
        for name in ("in", "out", "err"):
            (place / name).write_text(given if (name, i) == ("in", 0) else "")
        of_rank = common | {"RANK": str(i), "LOCAL_RANK": str(i)}
        process = _CONTEXT.Process(target=_run, args=(program, list(arguments), place, of_rank))
        process.start()
        ranks.append(Rank(process, place))
    try:
        yield ranks
    finally:
        for one in ranks:
            one.process.kill()
            one.process.join()


def _run(program: str, arguments: list[str], folder: Path, env: dict[str, str]) -> None:
    """Run a program like an interpreter, from imported modules to its exit."""
    os.environ |= env
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_APPEND), number)
    sys.stdin = (folder / "in").open()
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
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
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
