"""`offload-rt serve`: an HTTP server that OpenAI's clients can talk to, and a page for people."""

import os
import socket
import sys
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.process import exit_code
from offload_rt.config import EngineConfig, check_positive, parse_size, setting
from offload_rt.errors import SettingsError

# Names of this machine, as `--host` and as the header Host give them.
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})


@dataclass(frozen=True)
class ServeSettings:
    """How the server is reached, and what its clients may take."""

    host: str = setting(
        "127.0.0.1", "address to listen at; 0.0.0.0 for other machines, then with an API key"
    )
    port: int = setting(8000, "port to listen at; 0: any that is free", parse=int)
    api_key: str | None = setting(
        None, "what clients give as their key; default: OFFLOAD_RT_API_KEY, else none is needed"
    )
    served_model_name: str | None = setting(
        None, "by which clients ask for the model; default: the end of --model"
    )
    max_body: str = setting("4MiB", "longest body of a request")
    max_n: int = setting(16, "most answers that one request may ask for", parse=int)
    max_waiting: int = setting(
        128, "most answers that wait for room; further requests get status 429", parse=int
    )
    timeout: int = setting(3600, "seconds that a request may take", parse=int)
    prompt_wait: float = setting(
        2.0,
        "seconds by which a pass may take longer for new prompts, while others are answered",
        parse=float,
    )
    drain: int = setting(
        30, "seconds that requests under way get at the end, after SIGTERM or Ctrl-C", parse=int
    )

    def __post_init__(self) -> None:
        for name in ("max_n", "max_waiting", "timeout", "drain"):
            check_positive(name, getattr(self, name))


def main(arguments: list[str] | None = None) -> int:
    """Run the server until it is told to end; returns its exit code."""
    parser = Parser(
        "offload-rt serve",
        "Serve a model to OpenAI's clients, and a page.",
        EngineConfig,
        ServeSettings,
    )
    parser.set_defaults(max_num_seqs=4)
    return exit_code(lambda: _serve(parser.parse_args(arguments)))


def _serve(flags: Namespace) -> None:
    settings = from_flags(ServeSettings, flags)
    config = from_flags(EngineConfig, flags)
    # Not at the top: a wrong flag or path is told before the seconds that torch takes to load.
    from offload_rt.weights.checkpoint import check_paths

    check_paths(config)
    try:
        from offload_rt.server.app import make_app
        from offload_rt.server.connection import ConnectionLimits, make_server
        from offload_rt.server.service import ServerLimits
    except ImportError as error:
        need = "FastAPI, uvicorn and prometheus-client"
        change = 'pip install "offload-rt[server]"'
        raise SettingsError(f"offload-rt serve: {error}", need=need, change=change) from error
    from rich.console import Console

    from offload_rt.cli.format import follow, quiet_libraries
    from offload_rt.llm import LLM
    from offload_rt.system.progress import loading_bar
    from offload_rt.system.ranks import is_first

    quiet_libraries()
    if not is_first():
        return follow(config)
    key = settings.api_key or os.environ.get("OFFLOAD_RT_API_KEY") or None
    name = settings.served_model_name or Path(config.model.rstrip("/")).name
    limits = ServerLimits(
        parse_size(settings.max_body), settings.max_n, settings.max_waiting, settings.timeout
    )
    with _listen(settings.host, settings.port) as listening, LLM.open(config) as llm:
        console = Console(stderr=True)
        with loading_bar(console) as bar:
            llm.load(progress=bar)
        llm.engine.prompt_seconds = settings.prompt_wait
        is_local = settings.host.lower() in _LOOPBACK
        app = make_app(llm, name, limits, key, _LOOPBACK if is_local else frozenset())
        server = make_server(app, settings.drain, ConnectionLimits.from_ulimit())
        if not is_local and key is None:
            warning = "every machine that reaches this address can use the model; set --api-key"
            print(f"warning: {warning}", file=sys.stderr)
        at = f"http://{settings.host}:{listening.getsockname()[1]}"
        print(f"{name}: {at}/v1 for clients, {at} for people", file=sys.stderr, flush=True)
        with suppress(KeyboardInterrupt):  # what told it to end, again, after it has ended
            server.run([listening])


def _listen(host: str, port: int) -> socket.socket:
    """A socket at an address, before anything is loaded. Raises SettingsError if it cannot be
    had.
    """
    try:
        family = socket.getaddrinfo(host, port)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        problem = (
            f"{host}:{port} cannot be listened at:"
            f" {error.strerror if isinstance(error, OSError) else error}"
        )
        raise SettingsError(problem, change="choose others with --host and --port") from error
