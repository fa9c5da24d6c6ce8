"""`offload-rt serve`: OpenAI-compatible HTTP server with a web page."""

import gc
import os
import socket
import sys
from argparse import Namespace
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from offload_rt.cli.flags import Parser, engine_config, from_flags
from offload_rt.cli.process import command
from offload_rt.config import EngineConfig
from offload_rt.errors import SettingsError
from offload_rt.server.settings import ServeSettings
from offload_rt.system.progress import loading_bar

# Names of this machine in `--host` and in the Host header.
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})


new_parser = partial(
    Parser,
    "offload-rt serve",
    "Serve an OpenAI-compatible API and a web page.",
    *(EngineConfig, ServeSettings),
    examples=(
        "offload-rt serve Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B",
        "offload-rt serve DIR --host 0.0.0.0 --port 8080 --api-key KEY --max-num-seqs 8",
    ),
    defaults={"max_num_seqs": 4},
)


@command(new_parser)
def main(flags: Namespace) -> None:
    """Run the server until a signal."""
    settings = from_flags(ServeSettings, flags)
    config = engine_config(flags)
    # Imported late: report wrong flags and paths before loading torch, which takes seconds.
    try:
        from offload_rt.server.app import make_app
        from offload_rt.server.chat_format import ChatFormat
        from offload_rt.server.connection import ConnectionLimits, make_server
        from offload_rt.server.limits import Access
    except ImportError as error:
        need = "FastAPI, uvicorn and prometheus-client"
        change = 'pip install "offload-rt[server]"'
        raise SettingsError(f"offload-rt serve: {error}", need=need, change=change) from error
    from offload_rt.cli.format import follows
    from offload_rt.llm import LLM

    if follows(config):
        return
    key = settings.api_key or os.environ.get("OFFLOAD_RT_API_KEY") or None
    name = settings.served_model_name or Path(config.model.rstrip("/")).name
    with _listen(settings.host, settings.port) as listening, LLM.open(config) as llm:
        if settings.embeddings:
            llm.check_embeddings(settings.embeddings)
        parsers = settings.tool_call_parser, settings.reasoning_parser
        chat_format = ChatFormat.select(llm.tokenizer, *parsers)
        if chat_format.is_unknown and settings.tool_call_parser == "auto":
            form = chat_format.tool_format.name
            warning = f"the chat template renders no known tool calls; format {form} is used"
            print(f"warning: {warning}", file=sys.stderr)
        with loading_bar(Console(stderr=True)) as bar:
            llm.load(progress=bar)
        llm.engine.prompt_seconds = settings.prompt_wait
        is_local = settings.host.lower() in _LOOPBACK
        hosts = _LOOPBACK if is_local else frozenset()
        app = make_app(llm, name, settings, Access(key, hosts, settings.cors_origin), chat_format)
        server = make_server(app, settings.drain, ConnectionLimits.from_ulimit())
        if not is_local and key is None:
            warning = "every machine that reaches this address can use the model; set --api-key"
            print(f"warning: {warning}", file=sys.stderr)
        at = f"http://{settings.host}:{listening.getsockname()[1]}"
        print(f"{name}: {at}/v1 for clients, {at} for people", file=sys.stderr, flush=True)
        gc.collect()
        gc.freeze()  # a full collection of all libraries holds the interpreter lock for 0.2 s
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again after its end
            server.run([listening])


def _listen(host: str, port: int) -> socket.socket:
    """Open the listening socket before loading. Raises SettingsError for an unusable address."""
    try:
        family = socket.getaddrinfo(host, port)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"cannot listen on {host}:{port}: {reason}"
        raise SettingsError(problem, change="change --host and --port") from error
