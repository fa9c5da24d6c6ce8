"""Clients that send too much, read too little, or never finish a request."""

import asyncio
import gc
import http.client
import json
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, model_validator
from support.serving import (
    CONNECTIONS,
    LIMITS,
    MODELS,
    PROMPT,
    TURNS,
    Served,
    engine_held,
    running,
    serving,
    wait_until,
)

from offload_rt.errors import PromptError, SettingsError
from offload_rt.server import (
    bodies,
    completions,
    connection,
    messages,
    protocol,
    responses,
    service,
)
from offload_rt.server.connection import ConnectionLimits
from offload_rt.server.limits import Access

STREAM = {"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, "stream": True}


def parse_head(path: str, n_body: int) -> bytes:
    """Head of a POST request."""
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {n_body}\r\n\r\n"
    return f"POST {path} HTTP/1.1\r\n{fields}".encode()


def connect(served: Served, rcvbuf: int = 0) -> socket.socket:
    """Open a connection, with a small receive buffer for clients that do not read."""
    client = socket.socket()
    client.settimeout(20)
    if rcvbuf:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    client.connect(("127.0.0.1", served.port))
    return client


def read_all(client: socket.socket) -> bytes:
    """Read to the end of a connection, however it ends."""
    content = b""
    try:
        while data := client.recv(65536):
            content += data
    except ConnectionResetError:
        pass
    return content


class Recorder(BaseModel):
    """Body that counts its validations."""

    n_validations: int = 0

    @model_validator(mode="before")
    @classmethod
    def count(cls, body: Any) -> Any:
        pytest.fail("a body above the limits was validated")


@pytest.mark.parametrize(("kind", "name", "value", "limit"), [
    (protocol.ChatRequest, "messages", [{}], "4096 items"),
    (protocol.ChatRequest, "tools", [{}], "1024 items"),
    (protocol.CompletionRequest, "logit_bias", {"1": 1}, "1024 items"),
    (protocol.CompletionRequest, "stop", ["x"], "64 items"),
    (protocol.CompletionRequest, "stop", "x", "1024 characters"),
    (protocol.CompletionRequest, "stop_token_ids", [1], "1024 items"),
    (protocol.CompletionRequest, "allowed_token_ids", [1], "16384 items"),
    (protocol.CompletionRequest, "bad_words", ["x"], "1024 items"),
    (responses.ResponsesRequest, "input", [{}], "4096 items"),
    (messages.MessagesRequest, "stop_sequences", ["x"], "64 items"),
])  # fmt: skip
def test_lists_and_texts_have_limits(kind, name, value, limit):
    n = int(limit.split()[0])

    def of_length(n: int) -> Any:
        return {str(i): 1 for i in range(n)} if isinstance(value, dict) else value * n

    needed: dict[str, Any] = {"messages": [], "max_tokens": 1}
    if kind is protocol.CompletionRequest:
        needed["prompt"] = "x"
    bodies.validate(kind, needed | {name: of_length(n)})
    with pytest.raises(SettingsError, match=rf"{name}.* at most {limit}"):
        bodies.validate(kind, needed | {name: of_length(n + 1)})


@pytest.mark.parametrize(("body", "message"), [
    (b'{"prompt": [' + b"[1]," * 40_000 + b"[1]]}", "40003 containers"),
    (b'{"metadata": [' + b"{}," * 40_000 + b"{}]}", "40003 containers"),
    (b'{"prompt": [' + b'"",' * 40_000 + b'""]}', "40002 strings"),
    (b'{"prompt": [' + b"1," * 300_000 + b"1]}", "300000 values"),
    (b'{"prompt": [' + b"1.5," * 40_000 + b"1]}", "40000 fractions"),
    (b'{"prompt": [1' + (b"," + b"2" * 4300) * 21 + b"]}", "4284 blocks of 21 digits"),
    (b'{"prompt": "' + b"\\n" * 600_000 + b'"}', "600000 escapes"),
], ids=["lists", "objects", "strings", "values", "fractions", "numbers", "escapes"])  # fmt: skip
def test_values_are_counted_before_parsing(body, message, monkeypatch):
    def parse(text: str) -> Any:
        pytest.fail("a body above the limits was parsed")

    monkeypatch.setattr(bodies.json, "loads", parse)
    with pytest.raises(SettingsError, match=message):
        bodies.read_body(Recorder, body, 256)


@pytest.mark.parametrize(("body", "message"), [
    ({"guided_json": "[" * 40_000}, "40000 containers in the JSON schema"),
    ({"structured_outputs": {"json": "1," * 300_000}}, "300000 values in the JSON schema"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[],[]" * 10_000}},
        {"function": {"name": "f", "arguments": '"[[",[]' * 15_000}}]}]},
     "35000 containers in arguments of calls"),
])  # fmt: skip
def test_json_inside_texts_is_counted_before_parsing(body, message, monkeypatch):
    raw = json.dumps({"messages": TURNS} | body).encode()
    request = bodies.read_body(protocol.ChatRequest, raw, 256)
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("a text above the limits was parsed"))
    with pytest.raises(SettingsError, match=message):
        request.formats()
        request.turns()


def test_texts_do_not_count_as_values():
    text = 'x = [{"a": 1.5}, "\\\\"]\n' * 40_000
    body = json.dumps({"prompt": text}).encode()
    assert bodies.read_body(protocol.CompletionRequest, body, 256).prompt == [text]


def count_by_walking(value: Any) -> list[int]:
    """Strings, containers and separators of a JSON value."""
    if isinstance(value, str):
        return [1, 0, 0]
    if not isinstance(value, list | dict):
        return [0, 0, 0]
    children = [*value, *value.values()] if isinstance(value, dict) else value
    counts = [count_by_walking(child) for child in children]
    sums = [sum(column) for column in zip(*counts, strict=True)] or [0, 0, 0]
    return [sums[0], sums[1] + 1, sums[2] + max(len(value) - 1, 0)]


json_text = st.text(st.sampled_from('a"\\[]{},:.eé\n'), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | json_text,
    lambda children: st.lists(children) | st.dictionaries(json_text, children),
)


@given(json_values, st.booleans())
def test_counts_equal_those_of_the_parsed_value(value, is_ascii):
    raw = json.dumps(value, ensure_ascii=is_ascii).encode()
    counts = bodies.counts_of(raw)
    found = [counts[kind] for kind in ("strings", "containers", "values")]
    assert found == count_by_walking(value)


def is_on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def test_requests_are_parsed_and_checked_off_the_event_loop(served, monkeypatch):
    places: list[tuple[str, bool]] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            places.append((name, is_on_event_loop()))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(service, "read_body")
    builder = ("encode", "encode_messages", "check_prompt", "build")
    for name in builder:
        watch(served.llm.requests, name)
    watch(protocol.GenerationRequest, "sampling_params")
    for name in ("start", "end", "whole"):
        watch(responses.ResponsesWriter, name)
    for body in ({"prompt": "x"}, {"prompt": [5]}):
        assert served.post("/v1/completions", body | {"max_tokens": 1})[0] == 200
    assert served.post("/v1/chat/completions", {"messages": TURNS, "max_tokens": 1})[0] == 200
    for stream in (False, True):
        body = {"input": "x", "max_output_tokens": 1, "stream": stream}
        assert served.asked("/v1/responses", body)[0] == 200
    expected = {"read_body", "sampling_params", "start", "end", *builder}
    assert {name for name, _ in places} >= expected
    assert not any(on_loop for _, on_loop in places)


def test_bodies_are_parsed_one_at_a_time(served, monkeypatch):
    """Parsers hold the interpreter lock; several at once would stall the event loop for longer."""
    original = service.read_body
    entered = threading.Semaphore(0)
    proceed = threading.Event()
    n_inside = []
    inside = set()

    def held(*args: Any) -> Any:
        inside.add(threading.get_ident())
        n_inside.append(len(inside))
        entered.release()
        assert proceed.wait(60)
        inside.remove(threading.get_ident())
        return original(*args)

    monkeypatch.setattr(service, "read_body", held)
    results: list[int] = []
    body = {"prompt": "x", "max_tokens": 1}
    clients = [
        threading.Thread(target=lambda: results.append(served.post("/v1/completions", body)[0]))
        for _ in range(3)
    ]
    for client in clients:
        client.start()
    assert entered.acquire(timeout=60)
    # The event loop is free, although a body is being parsed.
    assert served.request("GET", "/health")[0] == 200
    proceed.set()
    for client in clients:
        client.join()
    assert results == [200] * 3 and n_inside == [1] * 3


def test_the_first_validation_error_is_reported(served):
    bias = {f"k{i}": 1 for i in range(1000)}
    status, answer = served.post("/v1/completions", {"prompt": "x", "logit_bias": bias})
    message = answer["error"]["message"]
    assert status == 400 and message.count("logit_bias") == 1 and len(message) < 200


@pytest.fixture
def large_events(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make each event larger than all buffers. Without the collector, only code frees places."""
    event = completions.event
    monkeypatch.setattr(completions, "event", lambda content: event(content) + ":" * 10**6 + "\n\n")
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("large_events")
def test_client_that_does_not_read_loses_its_place(llm):
    raw = json.dumps(STREAM).encode()
    impatient = replace(CONNECTIONS, write_s=0.3)
    with running(llm, impatient, 4096) as server, closing(connect(server, 4096)) as client:
        client.sendall(parse_head("/v1/completions", len(raw)) + raw)
        assert client.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: server.service.n_open == 0)
        assert b"[DONE]" not in read_all(client)
        server.wait_until_idle()


@pytest.mark.usefixtures("large_events")
def test_stream_ends_at_its_deadline_if_the_client_does_not_read(llm, monkeypatch):
    monkeypatch.setattr(service, "_STREAM_GRACE_S", 0.1, raising=False)
    raw = json.dumps(STREAM).encode()
    patient = replace(CONNECTIONS, write_s=600)
    serving = running(llm, patient, 4096, limits=replace(LIMITS, timeout_s=2))
    with serving as server, closing(connect(server, 4096)) as client:
        client.sendall(parse_head("/v1/completions", len(raw)) + raw)
        client.recv(12)
        wait_until(lambda: server.service.n_open == 0)


def test_slow_reader_keeps_its_connection():
    """Any progress within the write timeout suffices."""
    sizes = [1000, 900, 900]
    aborted: list[bool] = []
    scheduled: list[tuple[Any, int]] = []

    class Transport:
        def get_write_buffer_size(self) -> int:
            return sizes.pop(0)

        def abort(self) -> None:
            aborted.append(True)

    class Loop:
        def call_later(self, delay_s: float, act: Any, n_unsent: int) -> None:
            assert delay_s == 7
            scheduled.append((act, n_unsent))

    slow = connection.BoundedProtocol.__new__(connection.BoundedProtocol)
    vars(slow).update(transport=Transport(), loop=Loop(), limits=ConnectionLimits(1, write_s=7))
    slow._watch_write(slow.transport.get_write_buffer_size())
    act, n_unsent = scheduled.pop()
    act(n_unsent)
    assert not aborted
    act, n_unsent = scheduled.pop()
    act(n_unsent)
    assert aborted and not scheduled


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"])
def test_half_sent_heads_time_out(llm, sent):
    with (
        running(llm, replace(CONNECTIONS, header_s=0.2)) as server,
        closing(connect(server)) as client,
    ):
        client.sendall(sent)
        assert read_all(client) == b""


def test_half_sent_heads_of_later_requests_time_out(llm):
    with (
        running(llm, replace(CONNECTIONS, header_s=0.2)) as server,
        closing(connect(server)) as client,
    ):
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        client.recv(65536)
        with suppress(ConnectionError):
            client.sendall(b"GET /health HTTP/1.1\r\nX: ")
        read_all(client)


def test_header_timeout_ends_with_the_head(llm):
    with (
        running(llm, replace(CONNECTIONS, header_s=600)) as server,
        closing(connect(server)) as client,
    ):
        wait_until(lambda: server.http_server.server_state.connections)
        (accepted,) = server.http_server.server_state.connections
        assert accepted._header_timer is not None
        client.sendall(parse_head("/v1/completions", 100) + b"{")
        wait_until(lambda: accepted.cycle is not None)
        assert accepted._header_timer is None


def test_incomplete_requests_do_not_delay_the_end(llm):
    """A half-sent body is refused at once, while a running answer is finished."""
    with running(llm) as server, closing(connect(server)) as client:
        statuses: list[int] = []
        body = {"prompt": PROMPT, "max_tokens": 2}
        asking = threading.Thread(
            target=lambda: statuses.append(server.post("/v1/completions", body)[0])
        )
        with engine_held(llm):
            asking.start()
            wait_until(lambda: server.service.n_open)
            client.sendall(parse_head("/v1/completions", 100) + b"{")
            wait_until(lambda: len(server.http_server.server_state.tasks) == 2)
            server.http_server.should_exit = True
            assert read_all(client).startswith(b"HTTP/1.1 503")
            assert not statuses
        asking.join()
    assert statuses == [200]


def test_surplus_connections_are_refused(llm):
    with running(llm, replace(CONNECTIONS, n_connections=3, header_s=600)) as server:
        idle = [connect(server) for _ in range(3)]
        with closing(connect(server)) as surplus:
            assert read_all(surplus).startswith(b"HTTP/1.1 503")
        idle.pop().close()

        def is_healthy() -> bool:
            try:
                return server.request("GET", "/health")[0] == 200
            except (OSError, http.client.HTTPException):
                return False

        wait_until(is_healthy)
        for client in idle:
            client.close()


def test_connection_limit_leaves_files_for_the_engine(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    limits = ConnectionLimits.from_ulimit()
    assert 300 < limits.n_connections < 1024 - connection._RESERVED_FILES


_FEW_FILES = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))
runpy.run_module("offload_rt.serve", run_name="__main__")
"""


def test_flood_of_connections_and_shutdown(tmp_path):
    """Of a program with few files."""
    script = tmp_path / "script.py"
    script.write_text(_FEW_FILES)
    with serving(str(script), tmp_path, "--drain", "1") as (program, port):
        clients = []
        for _ in range(600):
            client = socket.create_connection(("127.0.0.1", port), timeout=20)
            client.sendall(b"GET /health HTTP/1.1\r\nX: ")
            clients.append(client)
        for client in clients:
            client.close()

        def is_healthy() -> bool:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                    client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                    return client.recv(12) == b"HTTP/1.1 200"
            except OSError:
                return False

        wait_until(is_healthy)
        # Half a head, half a body, and an answer that outlasts the drain.
        body = {"prompt": PROMPT, "max_tokens": 10**6, "ignore_eos": True, "temperature": 1, "n": 9}
        raw = json.dumps(body).encode()
        open_requests = [
            b"GET /health HTTP/1.1\r\nX: ",
            parse_head("/v1/completions", 1000).replace(b"Host: x", b"Host: localhost") + b"{",
            parse_head("/v1/completions", len(raw)).replace(b"Host: x", b"Host: localhost") + raw,
        ]
        clients = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in open_requests]
        for client, content in zip(clients, open_requests, strict=True):
            client.sendall(content)
        wait_until(is_healthy)
        program.signal(signal.SIGTERM)
        answers = [read_all(client) for client in clients]
        assert program.code() == 0
        assert answers[1].startswith(b"HTTP/1.1 503")
        assert answers[2].startswith(b"HTTP/1.1 503") and b"shutting down" in answers[2]
        assert "Traceback" not in program.err and len(program.err) < 20_000


def test_head_requests_are_answered_like_get(served):
    for path in ("/health", "/v1/models", "/v1/models/demo", "/metrics", "/", "/page/app.js"):
        status, headers, body = served.request("HEAD", path)
        assert (status, body) == (200, b"")
        assert headers["Content-Type"] == served.request("GET", path)[1]["Content-Type"]
    assert served.request("HEAD", "/v1/completions")[0] == 405


def test_redirects_never_use_the_host_header(served):
    for path in ("/page", "/health/", "/v1/models/", "/tokenize/"):
        status, headers, _ = served.request("GET", path, headers={"Host": "evil.example"})
        assert status in (200, 404, 405) and "Location" not in headers


@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1", 200), ("127.0.0.1:8000", 200), ("LOCALHOST:80", 200), ("[::1]", 200),
    ("[::1]:8000", 200), ("127.0.0.1:evil.com", 403), ("localhost@evil.com", 403), ("", 403),
    ("evil.com", 403), ("[::1].evil.com", 403), ("127.0.0.1:8000:evil.com", 403),
])  # fmt: skip
def test_host_names_are_parsed(llm, host, status):
    hosts = frozenset({"127.0.0.1", "localhost", "[::1]"})
    with running(llm, access=Access(hosts=hosts)) as guarded:
        assert guarded.request("GET", "/health", headers={"Host": host})[0] == status


@pytest.mark.parametrize(("authorization", "status"), [
    ("Bearer secret", 200), ("bearer secret", 200), ("BEARER  secret", 200),
    ("Bearer wrong", 401), ("Basic secret", 401), ("secret", 401), ("Bearer", 401),
])  # fmt: skip
def test_authorization_scheme_ignores_case(llm, authorization, status):
    with running(llm, access=Access("secret")) as guarded:
        headers = {"Authorization": authorization}
        code, _, body = guarded.request("GET", "/v1/models", headers=headers)
        assert code == status
        if status == 401:
            error = json.loads(body)["error"]
            assert error["type"] == "authentication_error" and error["code"] == "invalid_api_key"


def test_bodies_need_the_content_type_of_json(served):
    """Pages of other origins can send text/plain without asking."""
    raw = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    for content_type, status in (("text/plain", 415), ("application/json; charset=utf-8", 200)):
        headers = {"Content-Type": content_type}
        assert served.request("POST", "/v1/completions", raw, headers)[0] == status


@pytest.mark.parametrize(("path", "body"), [
    ("completions", {"prompt": "x " * 5000}),
    ("completions", {"prompt": [1] * 5000}),
    ("completions", {"prompt": "x", "temperature": -1}),
    ("completions", {"prompt": "x", "logit_bias": {"99999999": 1}}),
    ("completions", {"prompt": "x", "model": "m" * 50_000}),
    ("completions", {"prompt": "x", "stop": ""}),
    ("chat/completions", {"messages": [{"role": "user", "content": {"type": "t" * 50_000}}]}),
    ("chat/completions", {"messages": TURNS, "tool_choice": {"type": "t" * 50_000}}),
    ("chat/completions", {"messages": TURNS, "response_format": {"type": "t" * 50_000}}),
    ("chat/completions", {"messages": TURNS, "chat_template_kwargs": {"tokenize": 1}}),
    ("chat/completions", {"messages": TURNS, "logit_bias": {"k" * 50_000: 1}}),
])  # fmt: skip
def test_messages_are_short_and_name_no_flags(served, path, body):
    status, answer = served.post(f"/v1/{path}", body)
    message = answer["error"]["message"]
    assert 400 <= status < 500 and "--" not in message and len(message) < 400


def test_too_long_prompts_name_the_maximum_context_length(served):
    for prompt in ("x " * 5000, [1] * 5000, "x" * 150_000):
        status, answer = served.post("/v1/completions", {"prompt": prompt})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert "maximum context length is 256 tokens" in answer["error"]["message"]


def test_serve_warns_of_open_addresses_and_unknown_templates(monkeypatch, capsys, tmp_path):
    from offload_rt.cli import serve as serve_command

    class Stopped:
        def __init__(self, *_: Any) -> None: ...

        def run(self, sockets: list[socket.socket]) -> None:
            assert gc.get_freeze_count() > 0, "collections traverse the objects of libraries"
            gc.unfreeze()

    monkeypatch.setattr(connection, "make_server", Stopped)
    model = ["--model", str(MODELS / "demo-target"), "--port", "0", "--device-memory", "1GB"]
    template = tmp_path / "template"
    template.write_text("{{ tools }}")
    for flags, warning in (
        (["--host", "0.0.0.0"], "set --api-key"),
        (["--host", "0.0.0.0", "--api-key", "secret"], ""),
        (["--host", "localhost"], ""),
        (["--chat-template", str(template)], "format generic is used"),
        (["--chat-template", str(template), "--tool-call-parser", "generic"], ""),
    ):
        assert serve_command.main([*model, "--drafter", "none", *flags]) == 0
        printed = capsys.readouterr().err
        assert ("warning" in printed) == bool(warning) and warning in printed


def test_prompts_of_other_types_are_one_sentence():
    for prompt in (5, [1, "x"], [1.5], [[1], "x"], [[1], [True]], {"text": "x"}, []):
        with pytest.raises((SettingsError, PromptError), match=r"prompt: .* needs a text"):
            raw = json.dumps({"prompt": prompt}).encode()
            bodies.read_body(protocol.CompletionRequest, raw, 256)
