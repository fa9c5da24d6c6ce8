"""The server under overload: many clients, disconnecting clients and hostile requests."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.serving import LIMITS, PROMPT, TURNS, Served, alone, engine_held, running, wait_until

from bench.serve.load import load
from offload_rt import SamplingParams
from offload_rt.engine import engine as engine_module


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    """Assert after each test that the server is idle, answers, and keeps no cache."""
    yield
    served.wait_until_idle()
    assert served.service.n_open == 0
    with engine_held(served.llm):
        engine = served.llm.engine
        engine.reset_prefix_cache()
        assert not engine.runner._caches and not (engine.draft and engine.draft._caches)
    assert served.request("GET", "/health")[0] == 200


@contextmanager
def sent(served: Served, **body: Any) -> Iterator[socket.socket]:
    """Send a request without reading its response; disconnect at the end."""
    raw = json.dumps(
        {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 0, **body}
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type:"
        f" application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(head.encode() + raw)
        yield connection


def test_two_hundred_concurrent_requests_are_answered_or_rejected(served):
    prompts = [f"def f{k % 8}(x):\n    return " for k in range(200)]
    expected = {prompt: alone(served.llm, prompt, max_tokens=4) for prompt in set(prompts)}
    with ThreadPoolExecutor(200) as pool:
        with engine_held(served.llm):  # nobody is answered until all have come
            asked = [
                pool.submit(
                    served.asked,
                    "/v1/completions",
                    {"prompt": prompt, "max_tokens": 4, "temperature": 0},
                )
                for prompt in prompts
            ]
            wait_until(
                lambda: sum(future.done() for future in asked) == len(prompts) - LIMITS.n_waiting
            )
        answers = [future.result() for future in asked]
    assert sorted({status for status, _, _ in answers}) == [200, 429]
    for prompt, (status, headers, text) in zip(prompts, answers, strict=True):
        answer = json.loads(text)
        if status == 200:
            assert answer["choices"][0]["text"] == expected[prompt]
        else:
            assert int(headers["Retry-After"]) > 0 and "x-should-retry" not in headers
            assert answer["error"]["type"] == "rate_limit_error"
    assert sum(status == 200 for status, _, _ in answers) == LIMITS.n_waiting


def test_clients_with_grammars_and_tools_get_the_answers_of_lone_requests(served):
    """A share of 40 % of the clients disconnects."""
    counts = load(f"http://127.0.0.1:{served.port}", [PROMPT], disconnecting=0.4)
    assert counts.disconnected > 0 and counts.equal + counts.disconnected == 16


@pytest.mark.parametrize("stream", [False, True])
def test_waiting_clients_that_disconnect_free_their_place(served, stream):
    with engine_held(served.llm):
        for _ in range(2):
            with sent(served, stream=stream, prompt=["x"] * LIMITS.n_waiting):
                wait_until(lambda: served.service.n_open == LIMITS.n_waiting)
                assert served.post("/v1/completions", {"prompt": "x"})[0] == 429
            wait_until(lambda: served.service.n_open == 0)
    assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_clients_disconnect_during_prefill(served, stream, monkeypatch):
    forward = served.llm.engine.runner.forward
    may_go_on = threading.Event()
    widths = []

    def held(steps: Any) -> Any:
        widths.append(len(steps))
        assert may_go_on.wait(60)
        return forward(steps)

    monkeypatch.setattr(served.llm.engine.runner, "forward", held)
    with sent(served, stream=stream, prompt=["x", "y"]):
        wait_until(lambda: widths)
    wait_until(lambda: served.service.n_open == 0)
    may_go_on.set()
    served.wait_until_idle()
    assert len(widths) <= 2, "the pass under way, and one with those that had come since"


def test_clients_disconnect_during_decoding(served):
    for _ in range(3):
        with sent(served, stream=True, prompt=[PROMPT, "class "], max_tokens=200) as connection:
            assert connection.recv(100)
    answer = served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 24, "temperature": 0})[
        1
    ]
    assert answer["choices"][0]["text"] == alone(served.llm, PROMPT, max_tokens=24)


@pytest.mark.parametrize("stream", [False, True])
def test_failing_request_fails_alone(served, stream, monkeypatch):
    """NaN logits are reported to the client; internal errors are reported without details."""
    node_probs = engine_module.NodeProbs
    expected = alone(served.llm, PROMPT, max_tokens=40)

    def broken(logits: Any, sampling: SamplingParams, context: Any, *others: Any) -> Any:
        if sampling.logit_bias and len(context.tokens) > context.n_prompt + 2:
            if sampling.logit_bias == {1: 1.0}:
                raise ZeroDivisionError("a secret")
            logits = logits * float("nan")
        return node_probs(logits, sampling, context, *others)

    monkeypatch.setattr(engine_module, "NodeProbs", broken)
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": stream}
    with ThreadPoolExecutor(3) as pool:
        with engine_held(served.llm):
            several = [{}, {"logit_bias": {"0": 1.0}}, {"logit_bias": {"1": 1.0}}]
            asked = [pool.submit(served.asked, "/v1/completions", body | more) for more in several]
            wait_until(lambda: served.service.n_open == 3)
        right, *wrong = [future.result() for future in asked]
    assert right[0] == 200
    if stream:
        chunks = [
            json.loads(event[6:]) for event in right[2].split("\n\n") if event.startswith("data: {")
        ]
        assert (
            "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == expected
        )
    else:
        assert json.loads(right[2])["choices"][0]["text"] == expected
    for (status, _, text), message in zip(
        wrong, ("contain NaN or Inf", "internal server error"), strict=True
    ):
        assert status == (200 if stream else 500) and "secret" not in text
        *_, last = (
            (event[6:] for event in text.split("\n\n") if '"error"' in event) if stream else [text]
        )
        error = json.loads(last)["error"]
        assert message in error["message"] and error["type"] == "server_error"


DEEP = b"[" * 90_000 + b"]" * 90_000


@pytest.mark.parametrize(("body", "word"), [
    (b'{"prompt": "x", "metadata": ' + DEEP[:9_000] + b"}", ""),
    (b'{"prompt": ' + DEEP + b"}", ""),
    (b"\xff\xfe{}", ""),
    (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (b'{"prompt": "x", "top_p": Infinity}', "top_p"),
    (b'{"prompt": "x", "presence_penalty": -Infinity}', "presence_penalty"),
    (b'{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias"),
    (b'{"prompt": "x", "logit_bias": {"five": 1}}', "logit_bias"),
    (b'{"prompt": "x", "seed": Infinity}', "seed"),
    (b'{"prompt": "x", "n": 1e300}', "n"),
    ({"prompt": "x", "n": 10**30}, "n is"),
    ({"prompt": "x", "n": -1}, "n is -1"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
    ({"prompt": "x", "stop": ["a"] * 65}, "stop: List should have at most 64"),
    ({"prompt": "x", "stop": [""]}, "stop"),
    ({"prompt": "x", "stream": "perhaps"}, "stream"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [1, "x"]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [1.5] * 30_000}, "prompt"),
    ({"prompt": [-1]}, "token id"),
    ({"prompt": [2**70]}, "token id"),
    ({"prompt": "x" * 150_000}, "65536 characters"),
    ({"prompt": [1] * 60_000}, "too long"),
    ({"prompt": ["x"] * 30_000}, "30000 answers"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_hostile_bodies_are_refused(served, body, word):
    n_passes = served.llm.engine.n_passes
    status, answer = served.post("/v1/completions", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert word in answer["error"]["message"]
    assert answer["error"]["message"].count("; ") < 9, "of a million wrong items the first is told"
    assert served.llm.engine.n_passes == n_passes


@pytest.mark.parametrize("body", [
    {"messages": "hello"},
    {"messages": [1]},
    {"messages": [{"role": "user", "content": {"type": "text"}}]},
    {"messages": [{"role": "user", "content": "x" * 150_000}]},
    {"messages": TURNS, "tools": "all"},
    {"messages": TURNS, "tool_choice": 5},
    {"messages": TURNS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"messages": TURNS, "response_format": "json"},
    {"messages": TURNS, "logprobs": 5},
    {"messages": TURNS, "max_completion_tokens": 0},
])  # fmt: skip
def test_hostile_chats_are_refused(served, body):
    status, answer = served.post("/v1/chat/completions", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"


def test_hostile_tokenize_requests_are_refused(served):
    assert (
        served.post("/detokenize", {"tokens": [-1]})[0]
        == served.post("/detokenize", {"tokens": [2**70]})[0]
        == 400
    )
    assert served.post("/tokenize", {"prompt": "x" * 150_000})[0] == 400
    assert served.post("/detokenize", {"tokens": [2**31]}) == (200, {"prompt": ""})


def test_answers_beyond_the_context_end_with_length(served):
    n = len(served.llm.encode(PROMPT))
    body = {
        "prompt": PROMPT, "max_tokens": 10**30, "ignore_eos": True, "temperature": 0,
        "top_k": 10**30,
    }  # fmt: skip
    status, answer = served.post("/v1/completions", body)
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == served.llm.max_model_len
    assert answer["usage"]["prompt_tokens"] == n


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/v1/completions", 405), ("PUT", "/v1/models", 405), ("GET", "/v1/audio", 404),
    ("GET", "/v1/models/other", 404), ("GET", "/page/../app.py", 404),
    ("GET", "/page/%2e%2e/app.py", 404),
    ("BREW", "/v1/models", 405), ("GET", "/" + "x" * 9000, 404),
])  # fmt: skip
def test_unknown_routes_and_methods_are_reported(served, method, path, status):
    code, _, text = served.request(method, path)
    assert code == status and json.loads(text)["error"]["type"] == "invalid_request_error"


def test_invalid_http_is_refused(served):
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    several = [
        b"\x00\xff "
        b"garbage\r\n\r\n", b"", b"GET / HTTP/9.9\r\n\r\n", post + b"Content-Length: 100\r\n\r\n{",
        post + b"Content-Length: "
               b"-5\r\n\r\n", post + b"Content-Length: 99999999999999999999\r\n\r\nx",
        post + b"Transfer-Encoding: "
               b"chunked\r\n\r\nzz\r\n", post + b"X: " + b"y" * 200_000 + b"\r\n\r\n", post[:30],
    ]  # fmt: skip
    for raw in several:
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            try:
                connection.sendall(raw)
            except OSError:  # it has been sent away already
                continue
    reply = served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "temperature": 0})[1]
    assert reply["choices"][0]["text"] == alone(served.llm, PROMPT, max_tokens=4)


def test_server_shutdown_leaves_no_thread(llm):
    llm.generate("x", SamplingParams(max_tokens=1))
    before = {thread for thread in threading.enumerate() if not thread.name.startswith("engine")}
    with running(llm, limits=replace(LIMITS, n_waiting=2)) as short:
        with ThreadPoolExecutor(8) as pool:
            asked = [
                pool.submit(short.post, "/v1/completions", {"prompt": "x", "max_tokens": 4})
                for _ in range(8)
            ]
            assert {future.result()[0] for future in asked} <= {200, 429}
        with sent(short, stream=True):
            pass
    left = {
        thread for thread in threading.enumerate() if not thread.name.startswith("engine")
    } - before
    wait_until(lambda: not any(thread.is_alive() for thread in left))
