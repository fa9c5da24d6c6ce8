"""Clients that send too much, read too little, or never finish a request."""

import asyncio
import gc
import json
import resource
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.programs import wait_until
from support.serving import CONNECTIONS, PROMPT, SETTINGS, engine_held, head_of, running, serving

from offload_rt.errors import SettingsError
from offload_rt.server import bodies, completions, connection, protocol, responses, service
from offload_rt.server.connection import ConnectionLimits
from offload_rt.server.limits import Access, Limits


def connect(port: int, content: bytes = b"", rcvbuf: int = 0) -> socket.socket:
    """Open a connection, with a small receive buffer for clients that do not read."""
    client = socket.socket()
    client.settimeout(20)
    if rcvbuf:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    client.connect(("127.0.0.1", port))
    client.sendall(content)
    return client


def read_all(client: socket.socket) -> bytes:
    content = b""
    with suppress(ConnectionResetError):
        while data := client.recv(65536):
            content += data
    return content


@pytest.mark.parametrize(("body", "message"), [
    (b'{"prompt": [' + b"[1]," * 40_000 + b"[1]]}", "40003 containers"),
    (b'{"metadata": [' + b"{}," * 40_000 + b"{}]}", "40003 containers"),
    (b'{"prompt": [' + b'"",' * 40_000 + b'""]}', "40002 strings"),
    (b'{"prompt": [' + b"1," * 300_000 + b"1]}", "300000 values"),
    (b'{"prompt": [' + b"1.5," * 40_000 + b"1]}", "40000 fractions"),
    (b'{"prompt": [1' + (b"," + b"2" * 4300) * 21 + b"]}", "4284 blocks of 21 digits"),
    (b'{"prompt": "' + b"\\n" * 600_000 + b'"}', "600000 escapes"),
    ({"guided_json": "[" * 40_000}, "40000 containers in the JSON schema"),
    ({"structured_outputs": {"json": "1," * 300_000}}, "300000 values in the JSON schema"),
    ({"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[],[]" * 10_000}},
        {"function": {"name": "f", "arguments": '"[[",[]' * 15_000}}]}]},
     "35000 containers in arguments of calls"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_values_are_counted_before_parsing(body, message, monkeypatch):
    """Also those of JSON inside texts."""
    request = None if isinstance(body, bytes) else protocol.ChatRequest(**{"messages": [], **body})
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("a text above the limits was parsed"))
    with pytest.raises(SettingsError, match=message):
        if request is None:
            bodies.read_body(protocol.CompletionRequest, body, 256)
        else:
            request.formats()
            request.turns()


def count_by_walking(value: Any) -> list[int]:
    if isinstance(value, str):
        return [1, 0, 0]
    if not isinstance(value, list | dict):
        return [0, 0, 0]
    children = [*value, *value.values()] if isinstance(value, dict) else value
    own = [0, 1, max(len(value) - 1, 0)]
    return [sum(column) for column in zip(own, *map(count_by_walking, children), strict=True)]


json_text = st.text(st.sampled_from('a"\\[]{},:.eé\n'), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | json_text,
    lambda children: st.lists(children) | st.dictionaries(json_text, children),
)


@given(json_values, st.booleans())
def test_counts_equal_those_of_the_parsed_value(value, is_ascii):
    counts = bodies.counts_of(json.dumps(value, ensure_ascii=is_ascii).encode())
    found = [counts[kind] for kind in ("strings", "containers", "values")]
    assert found == count_by_walking(value)


def test_requests_are_parsed_and_checked_off_the_event_loop(served, monkeypatch):
    places: set[tuple[str, Any]] = set()

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **more: Any) -> Any:
            places.add((name, asyncio._get_running_loop()))
            return original(*args, **more)

        monkeypatch.setattr(owner, name, watched)

    names = "read_body sampling_params start end whole encode encode_messages check_prompt build"
    owners = [service, protocol.GenerationRequest, *[responses.ResponsesWriter] * 3]
    for owner, name in zip(owners + [served.llm.requests] * 4, names.split(), strict=True):
        watch(owner, name)
    for path, body in (
        ("completions", {"prompt": "x", "max_tokens": 1}),
        ("completions", {"prompt": [5], "max_tokens": 1}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        *(("responses", {"input": "x", "max_output_tokens": 1, "stream": stream})
          for stream in (False, True)),
    ):  # fmt: skip
        assert served.asked(f"/v1/{path}", body)[0] == 200
    assert places == {(name, None) for name in names.split()}


def test_bodies_are_parsed_one_at_a_time(served, monkeypatch):
    """Parsers hold the interpreter lock; several at once would stall the event loop for longer."""
    original = service.read_body
    parser, entered, proceed = threading.Lock(), threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        assert parser.acquire(blocking=False)
        entered.set()
        assert proceed.wait(60)
        parser.release()
        return original(*args)

    monkeypatch.setattr(service, "read_body", held)
    body = {"prompt": "x", "max_tokens": 1}
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(served.post, "/v1/completions", body) for _ in range(3)]
        assert entered.wait(60)
        # The event loop is free, although a body is being parsed.
        assert served.request("GET", "/health")[0] == 200
        proceed.set()
    assert [future.result()[0] for future in asked] == [200] * 3


@pytest.mark.parametrize(("write_s", "timeout"), [(0.3, 60), (600, 2)])
def test_client_that_does_not_read_loses_its_place(llm, monkeypatch, write_s, timeout):
    """After the write timeout, or at the deadline of its answer.

    Each event is larger than all buffers. Without the collector, only code frees places.
    """
    event = completions.event
    monkeypatch.setattr(completions, "event", lambda content: event(content) + ":" * 10**6 + "\n\n")
    monkeypatch.setattr(service, "_STREAM_GRACE_S", 0.1)
    body = {"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, "stream": True}
    raw = json.dumps(body).encode()
    connections = replace(CONNECTIONS, write_s=write_s)
    serving = running(llm, connections, 4096, settings=replace(SETTINGS, timeout=timeout))
    with ExitStack() as stack, serving as server:
        stack.callback(gc.enable)
        gc.disable()
        client = stack.enter_context(closing(connect(server.port, head_of(len(raw)) + raw, 4096)))
        assert client.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: server.service.n_open == 0)
        if write_s < timeout:
            assert b"[DONE]" not in read_all(client)
            server.wait_until_idle()


def test_slow_reader_keeps_its_connection():
    """Any progress within the write timeout suffices."""
    transport, loop = Mock(), Mock()
    transport.get_write_buffer_size.side_effect = [1000, 900, 900]
    slow = connection.BoundedProtocol.__new__(connection.BoundedProtocol)
    vars(slow).update(transport=transport, loop=loop, limits=ConnectionLimits(1, write_s=7))
    slow._check_write(2000)
    for is_aborted in (False, True):
        delay_s, act, n_unsent = loop.call_later.call_args.args
        act(n_unsent)
        assert delay_s == 7 and transport.abort.called == is_aborted
    assert loop.call_later.call_count == 2


@pytest.mark.parametrize(("is_later", "sent"), [
    (False, b""), (False, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"),
    (True, b"GET /health HTTP/1.1\r\nX: "),
])  # fmt: skip
def test_half_sent_heads_time_out(llm, is_later, sent):
    patience = replace(CONNECTIONS, header_s=0.2)
    with running(llm, patience) as server, closing(connect(server.port)) as client:
        if is_later:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(65536)
        with suppress(ConnectionError):
            client.sendall(sent)
        assert is_later >= bool(read_all(client))


def test_incomplete_requests_do_not_delay_the_end(llm):
    """A half-sent body is refused at once, while a running answer is finished."""
    with (
        running(llm) as server,
        closing(connect(server.port)) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        with engine_held(llm):
            asked = pool.submit(server.post, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
            wait_until(lambda: server.service.n_open)
            client.sendall(head_of(100) + b"{")
            state = server.http_server.server_state
            wait_until(lambda: len(state.tasks) == 2)
            wait_until(lambda: not any(each._header_timer for each in state.connections))
            server.http_server.should_exit = True
            assert read_all(client).startswith(b"HTTP/1.1 503")
            assert not asked.done()
        assert asked.result()[0] == 200


def test_surplus_connections_are_refused(llm, monkeypatch):
    patience = replace(CONNECTIONS, n_connections=3, header_s=600)
    with running(llm, patience) as server, ExitStack() as stack:
        idle, *_ = [stack.enter_context(closing(connect(server.port))) for _ in range(3)]
        with closing(connect(server.port)) as surplus:
            assert read_all(surplus).startswith(b"HTTP/1.1 503")
        idle.close()
        wait_until(lambda: len(server.http_server.server_state.connections) == 2)
        assert server.request("GET", "/health")[0] == 200
    # The limit leaves files for the engine.
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert 300 < ConnectionLimits.from_ulimit().n_connections < 1024 - connection._RESERVED_FILES


def test_flood_of_connections_and_shutdown(tmp_path):
    """Of a program with few files."""
    script = tmp_path / "script.py"
    limit = "import resource, runpy\nresource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))\n"
    script.write_text(limit + "runpy.run_module('offload_rt.serve', run_name='__main__')\n")
    with serving(str(script), tmp_path, "--drain", "1") as (program, port):

        def is_healthy() -> bool:
            asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            with suppress(OSError), connect(port, asked) as client:
                return client.recv(12) == b"HTTP/1.1 200"
            return False

        half = b"GET /health HTTP/1.1\r\nX: "
        for client in [connect(port, half) for _ in range(600)]:
            client.close()
        wait_until(is_healthy)
        # Half a head, half a body, and an answer that outlasts the drain.
        body = {"prompt": PROMPT, "max_tokens": 10**6, "ignore_eos": True, "temperature": 1, "n": 9}
        raw = json.dumps(body).encode()
        contents = (half, head_of(1000) + b"{", head_of(len(raw)) + raw)
        clients = [connect(port, content) for content in contents]
        wait_until(is_healthy)
        program.signal(signal.SIGTERM)
        _, refused, ended = [read_all(client) for client in clients]
        assert program.code() == 0
        assert refused.startswith(b"HTTP/1.1 503")
        assert ended.startswith(b"HTTP/1.1 503") and b"shutting down" in ended
        assert b'"type":"server_error"' in ended
        assert "Traceback" not in program.err and len(program.err) < 20_000


def test_cancelled_requests_are_answered_once():
    """uvicorn cancels open requests at the end of the drain."""

    async def cancelled(scope: Any, receive: Any, send: Any) -> None:
        for status in scope["sent"]:
            await send({"status": status})
        raise asyncio.CancelledError

    for sent, statuses in (((), [503, None]), ((200,), [200])):
        send = AsyncMock()
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "sent": sent}
        asyncio.run(Limits(cancelled, Access())(scope, Mock(), send))
        assert [call.args[0].get("status") for call in send.call_args_list] == statuses


def test_head_requests_are_answered_like_get(served):
    for path in ("/health", "/v1/models/demo", "/metrics", "/", "/page/app.js"):
        status, headers, body = served.request("HEAD", path)
        assert (status, body) == (200, b"")
        assert headers["Content-Type"] == served.request("GET", path)[1]["Content-Type"]


def test_hosts_keys_and_origins_are_checked(llm):
    hosts = frozenset({"127.0.0.1", "localhost", "[::1]"})
    with running(llm, access=Access("secret", hosts, ("https://a.example",))) as guarded:
        for host, status in (
            ("127.0.0.1", 200), ("127.0.0.1:8000", 200), ("LOCALHOST:80", 200), ("[::1]", 200),
            ("[::1]:8000", 200), ("127.0.0.1:evil.com", 403), ("localhost@evil.com", 403),
            ("", 403), ("evil.com", 403), ("[::1].evil.com", 403), ("127.0.0.1:8000:evil.com", 403),
        ):  # fmt: skip
            for path in ("/health", "/", "/page/app.js"):
                assert guarded.request("GET", path, headers={"Host": host})[0] == status, host
        for path in ("/v1/models", "/openapi.json", "/docs"):
            for name, key, status in (
                *(("Authorization", f"{scheme} secret", 200) for scheme in
                  ("Bearer", "bearer", "BEARER ")), ("X-Api-Key", "secret", 200),
                *(("Authorization", key, 401) for key in
                  ("Bearer wrong", "Basic secret", "secret", "Bearer")), ("X-Api-Key", "x", 401),
                ("Accept", "*/*", 401),
            ):  # fmt: skip
                asked = {"Origin": "https://a.example", name: key}
                code, headers, _ = guarded.request("GET", path, headers=asked)
                assert (code, headers["Access-Control-Allow-Origin"]) == (status, asked["Origin"])
        status, answer = guarded.post("/v1/completions", {"prompt": "x"})
        error = answer["error"]["type"], answer["error"]["code"]
        assert (status, error) == (401, ("authentication_error", "invalid_api_key"))
        asked = {"Authorization": "Bearer secret", "Host": "evil.example"}
        status, answer = guarded.post("/v1/completions", {"prompt": "x"}, asked)
        assert (status, answer["error"]["type"]) == (403, "permission_error")
        for origin, status in (("https://a.example", 200), ("https://b.example", 400)):
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST",
                       "Access-Control-Request-Headers": "authorization"}  # fmt: skip
            assert guarded.request("OPTIONS", "/v1/messages", headers=headers)[0] == status


def test_pages_of_other_origins_have_no_access(served):
    """They can send text/plain without asking."""
    for content_type, status in (("text/plain", 415), ("application/json; charset=utf-8", 200)):
        headers = {"Content-Type": content_type, "Origin": "https://a.example"}
        raw = b'{"prompt": "x", "max_tokens": 1}'
        code, headers, _ = served.request("POST", "/v1/completions", raw, headers)
        assert code == status and "Access-Control-Allow-Origin" not in headers
