"""A process that has imported the program already and forks a run of it for each request.

Importing torch takes seconds, and a run of a tiny model a tenth of one; so hundreds of runs can be disturbed in the time in
which a few could be started afresh. A fork runs `python -m offload_rt.<program>` to its end as a fresh process would.
"""

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

from faults.injected import Failure, inject, limit


def main(control: socket.socket, rehearsal: list[str]) -> None:
    """Answer requests until the other side goes; returns in the fork that is to run the program.

    rehearsal  arguments of a run that is made first, so that its imports are done
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    _rehearse(rehearsal)
    gc.freeze()  # a collection in a fork would copy all that it looks at
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.send(b"ready")
    while True:
        text, files, _, _ = socket.recv_fds(control, 1 << 20, 4)
        if not text:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            _keep(json.loads(text), *files)
            return
        for file in files:
            os.close(file)


def _rehearse(arguments: list[str]) -> None:
    from offload_rt.cli import run

    handler = signal.getsignal(signal.SIGTERM)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        assert run.main(arguments) == 0
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in sys.modules if name in ("offload_rt.cli.run", "offload_rt.cli.calibrate")]:
        del sys.modules[name]


def _keep(request: dict[str, Any], answers: int, *streams: int) -> None:
    """Fork the run, tell its process id and then its end; returns in the run."""
    if pid := os.fork():
        os.write(answers, f"{pid}\n".encode())
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(pid, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.setsid()
    os.close(answers)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # Those of this process were made for what its own streams are.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    for number in request["closed"]:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [request["program"], *request["arguments"]]
    limit(request["limits"])
    inject(Failure(**failure) for failure in request["failures"])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    runpy.run_module(f"offload_rt.{sys.argv[0]}", run_name="__main__", alter_sys=True)
