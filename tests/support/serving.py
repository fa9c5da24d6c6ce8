"""Serve the demonstration model on this machine, for tests of the server."""

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from openai import OpenAI
from write_vision import write_vision

from offload_rt import LLM, Piece, SamplingParams
from offload_rt.server.app import make_app
from offload_rt.server.connection import ConnectionLimits, make_server
from offload_rt.server.settings import ServeSettings
from support.programs import Program, started, wait_until

MODELS = Path(__file__).resolve().parents[2] / "models"
PROMPT = "def read_lines(path):\n"
TURNS = [{"role": "user", "content": "import os\n"}]
TEMPLATE = (
    "{# calls like <tool_call> #}"
    "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{{ mark or '' }}{% if tools %}# {{ tools | length }}\n{% endif %}"
    "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
)
SETTINGS = ServeSettings(max_body="200KB", max_n=4, max_waiting=32, timeout=60)
CONNECTIONS = ConnectionLimits(500)


@dataclass
class Served:
    llm: LLM
    port: int
    app: FastAPI
    http_server: uvicorn.Server

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="any", max_retries=0)

    @property
    def anthropic(self) -> Any:
        """Client of Anthropic, whose import lasts seconds."""
        from anthropic import Anthropic

        url = f"http://127.0.0.1:{self.port}"
        return Anthropic(base_url=url, api_key="any", max_retries=0)

    @property
    def service(self) -> Any:
        return self.app.state.service

    def request(
        self, method: str, path: str, raw: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, Any, bytes]:
        """Send a request. Returns status, headers and body."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, raw, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def asked(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, str]:
        """Post bytes or JSON. Returns status, headers and text."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        status, response_headers, content = self.request("POST", path, raw, headers)
        return status, response_headers, content.decode()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Post bytes or JSON. Returns status and parsed body."""
        status, _, text = self.asked(path, body, headers)
        return status, json.loads(text or "null")

    def chunks(self, path: str, body: Any) -> list[Any]:
        """Ask for a stream. Returns its events."""
        events = self.asked(path, body | {"stream": True})[2].split("\n\n")
        return [json.loads(event[6:]) for event in events if event.startswith("data: {")]

    def wait_until_idle(self) -> None:
        wait_until(lambda: not (self.llm.engine.n_running or self.llm.engine.n_waiting))


def serve(
    llm: LLM, connections: ConnectionLimits = CONNECTIONS, sndbuf: int = 0, **settings: Any
) -> Iterator[Served]:
    """Run the server in a thread until the generator closes.

    sndbuf  send buffer of each connection in bytes; 0: default of the system
    """
    app = make_app(llm, "demo", **{"settings": SETTINGS, **settings})
    server = make_server(app, 5, connections)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if sndbuf:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield Served(llm, listening.getsockname()[1], app, server)
        finally:
            server.should_exit = True
            thread.join()


running = contextmanager(serve)


@contextmanager
def serving(program: str, folder: Path, *flags: str) -> Iterator[tuple[Program, int]]:
    """Run a server of the demonstration model as a program; yields it and its port."""
    line = ["--model", str(MODELS / "demo-target"), "--port", "0", "--device-memory", "1GB"]
    with started(program, [*line, "--drafter", "none", *flags], folder) as (child,):
        wait_until(lambda: "for clients" in child.err)
        address = re.search(r"127\.0\.0\.1:(\d+)", child.err)
        assert address is not None
        yield child, int(address[1])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The demonstration models with a chat template."""
    with LLM(
        str(MODELS / "demo-target"), str(MODELS / "demo-draft"), dtype="float32",
        device_memory="1500MB", max_model_len=256, tree_size=16,
    ) as model:  # fmt: skip
        assert model.tokenizer is not None
        model.tokenizer.chat_template = TEMPLATE
        yield model


@pytest.fixture(scope="module")
def served(llm: LLM) -> Iterator[Served]:
    yield from serve(llm)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("vision")
    write_vision(path)
    with LLM(str(path), device="cpu", dtype="float32", max_model_len=128) as model:
        yield from serve(model)


@contextmanager
def engine_held(llm: LLM) -> Iterator[None]:
    """Keep the engine thread between two steps."""
    is_held, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        may_go_on.wait()

    llm._open_thread._thread.submit(hold)
    assert is_held.wait(60)
    try:
        yield
    finally:
        may_go_on.set()


def script(llm: LLM, monkeypatch: pytest.MonkeyPatch, *texts: str, **ending: Any) -> list[Any]:
    """Replace the answers of a model by texts, a piece of one token per text.

    ending  fields of the last piece beside `finish_reason`
    Returns a list that receives the prompts and the sampling parameters of later requests.
    """
    requests: list[Any] = []

    async def pieces(prompts: Any, params: SamplingParams) -> Any:
        requests.append((prompts, params))
        for i, text in enumerate(texts):
            end = {"finish_reason": "stop", **ending} if i == len(texts) - 1 else {}
            yield 0, Piece(text, [1], **end)

    monkeypatch.setattr(llm, "astream_all", pieces)
    return requests


def head_of(n_body: int) -> bytes:
    """Head of a request for a completion."""
    kind = f"Content-Type: application/json\r\nContent-Length: {n_body}"
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{kind}\r\n\r\n".encode()


def alone(llm: LLM, prompt: str | list[int], **params: Any) -> str:
    return llm.generate(prompt, SamplingParams(**params))[0].text
