"""`offload-rt serve`: OpenAI-compatible HTTP server with a web page."""

import gc
import os
import socket
import sys
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from offload_rt.cli.flags import Parser, engine_config, from_flags
from offload_rt.cli.process import command
from offload_rt.config import EngineConfig, check_settings, parse_size, setting
from offload_rt.errors import SettingsError
from offload_rt.system.progress import loading_bar
from offload_rt.text.images import DEFAULT_LIMITS

# Names of this machine in `--host` and in the Host header.
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})


@dataclass(frozen=True)
class ServeSettings:
    """Address and limits of the server."""

    host: str = setting(
        "127.0.0.1", "address to listen on; use 0.0.0.0 with an API key for other machines"
    )
    port: int = setting(8000, "port to listen on; 0: any free port")
    api_key: str | None = setting(
        None, "API key of clients; default: OFFLOAD_RT_API_KEY, or no key"
    )
    served_model_name: str | None = setting(
        None, "model name for clients; default: the last part of --model"
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "origin of web pages that may use the API, like https://example.org; *: all (repeatable)",
    )
    any_model_name: bool = setting(
        False, "answer requests for other model names, as llama.cpp does, instead of status 404"
    )
    tool_call_parser: str = setting(
        "auto",
        "format of tool calls: hermes, granite, lfm2, harmony or generic;"
        " auto: derived from the chat template",
    )
    reasoning_parser: str = setting(
        "auto",
        "format of the reasoning: think, mistral, harmony or none; auto: by the chat template",
    )
    embeddings: str = setting(
        "", "answer /v1/embeddings with this pooling of hidden states: mean or last"
    )
    allow_image_urls: bool = setting(
        False, "read images behind http URLs, from public addresses only; otherwise data URLs only"
    )
    max_body: str = setting("16MiB", "maximum size of a request body, with its images in base64")
    max_n: int = setting(16, "maximum answers per request", least=1)
    max_waiting: int = setting(
        128, "maximum answers in the queue; further requests get status 429", least=1
    )
    timeout: int = setting(3600, "maximum seconds of a request", least=1)
    prompt_wait: float = setting(
        2.0, "maximum additional seconds of a pass for new prompts while answers are running"
    )
    drain: int = setting(30, "seconds for running requests after SIGTERM or Ctrl-C", least=1)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.embeddings not in ("", "mean", "last"):
            raise SettingsError(f"--embeddings={self.embeddings}", need="mean or last")


def new_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(
        "offload-rt serve",
        "Serve an OpenAI-compatible API and a web page.",
        EngineConfig,
        ServeSettings,
        examples=(
            "offload-rt serve Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B",
            "offload-rt serve DIR --host 0.0.0.0 --port 8080 --api-key KEY --max-num-seqs 8",
        ),
    )
    parser.set_defaults(max_num_seqs=4)
    return parser


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
        from offload_rt.server.service import ServerLimits
        from offload_rt.text.image_urls import ImageFetcher
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
    limits = ServerLimits(
        parse_size(settings.max_body),
        settings.max_n,
        settings.max_waiting,
        settings.timeout,
        settings.any_model_name,
        settings.embeddings,
        ImageFetcher(DEFAULT_LIMITS.nbytes) if settings.allow_image_urls else None,
    )
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
        app = make_app(llm, name, limits, Access(key, hosts, settings.cors_origin), chat_format)
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
