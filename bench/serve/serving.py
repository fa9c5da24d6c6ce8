"""Servers of benchmarks: a thread of this process, or another process."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection, create_server

from bench.common.measure import ROOT
from bench.common.processes import family
from bench.serve.client import Server
from offload_rt import LLM
from offload_rt.server.app import make_app
from offload_rt.server.connection import ConnectionLimits, make_server
from offload_rt.server.settings import ServeSettings


@contextmanager
def served(llm: LLM) -> Iterator[Server]:
    """Serve a model in a thread."""
    app = make_app(llm, "demo", ServeSettings(max_waiting=256))
    server = make_server(app, 5, ConnectionLimits.from_ulimit())
    with create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def started(*command: str) -> Iterator[str]:
    """Start a server process and yield its address once it listens."""
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name(command[0]))
    arguments = [program, *command[1:], "--port", str(port)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with family(subprocess.Popen(arguments, cwd=ROOT, **silent)) as process:
        while process.poll() is None:
            try:
                create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
