"""The server under overload: many clients, disconnecting clients and hostile requests."""

import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.programs import wait_until
from support.serving import PROMPT, SETTINGS, Served, alone, engine_held, head_of, running

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
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "temperature": 0, **body}
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(head_of("/v1/completions", len(raw)) + raw)
        yield connection


def test_two_hundred_concurrent_requests_are_answered_or_rejected(served):
    prompts = [f"def f{k % 8}(x):\n    return " for k in range(200)]
    expected = {prompt: alone(served.llm, prompt, max_tokens=4) for prompt in set(prompts)}
    bodies = [{"prompt": prompt, "max_tokens": 4, "temperature": 0} for prompt in prompts]
    n_rejected = len(prompts) - SETTINGS.max_waiting
    with ThreadPoolExecutor(200) as pool:
        with engine_held(served.llm):  # nobody is answered until all have come
            asked = [pool.submit(served.asked, "/v1/completions", body) for body in bodies]
            wait_until(lambda: sum(future.done() for future in asked) == n_rejected)
        answers = [future.result() for future in asked]
    assert Counter(status for status, _, _ in answers) == {
        200: SETTINGS.max_waiting,
        429: n_rejected,
    }
    for prompt, (status, headers, text) in zip(prompts, answers, strict=True):
        answer = json.loads(text)
        if status == 200:
            assert answer["choices"][0]["text"] == expected[prompt]
        else:
            assert int(headers["Retry-After"]) > 0 and "x-should-retry" not in headers
            assert answer["error"]["type"] == "rate_limit_error"


def test_clients_with_grammars_and_tools_get_the_answers_of_lone_requests(served):
    """A share of 40 % of the clients disconnects."""
    counts = load(f"http://127.0.0.1:{served.port}", [PROMPT], disconnecting=0.4)
    assert counts.disconnected > 0 and counts.equal + counts.disconnected == 16


@pytest.mark.parametrize("stream", [False, True])
def test_waiting_clients_that_disconnect_free_their_place(served, stream):
    with engine_held(served.llm):
        for _ in range(2):
            with sent(served, stream=stream, prompt=["x"] * SETTINGS.max_waiting):
                wait_until(lambda: served.service.n_open == SETTINGS.max_waiting)
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
        answers = [future.result() for future in asked]
    right, *wrong = [
        [json.loads(event) for event in re.split("\n\n|data: ", text) if event.startswith("{")]
        for _, _, text in answers
    ]
    choices = [choice for part in right for choice in part["choices"]]
    assert "".join(choice["text"] for choice in choices) == expected
    assert [status for status, _, _ in answers] == [200] + [200 if stream else 500] * 2
    for events, message in zip(wrong, ("contain NaN or Inf", "internal server error"), strict=True):
        error = events[-1]["error"]
        assert message in error["message"] and error["type"] == "server_error"
        assert "secret" not in str(events)


def test_unknown_routes_and_methods_are_reported(served):
    """Without redirects, which would use the Host header."""
    for method, path, status in (
        ("BREW", "/v1/models", 405), ("HEAD", "/v1/completions", 405), ("GET", "/v1/audio", 404),
        *(("GET", path, 404) for path in (
            "/v1/models/other", "/page/../app.py", "/page/%2e%2e/app.py", "/" + "x" * 9000, "/page",
            "/health/", "/tokenize/")),
    ):  # fmt: skip
        code, headers, text = served.request(method, path, headers={"Host": "evil.example"})
        assert code == status and "Location" not in headers
        assert method == "HEAD" or json.loads(text)["error"]["type"] == "invalid_request_error"


def test_server_shutdown_leaves_no_thread(llm):
    llm.generate("x", SamplingParams(max_tokens=1))
    known = {*threading.enumerate()}
    with running(llm, settings=replace(SETTINGS, max_waiting=2)) as short:
        body = {"prompt": "x", "max_tokens": 4}
        with ThreadPoolExecutor(8) as pool:
            statuses = pool.map(lambda _: short.post("/v1/completions", body)[0], range(8))
            assert {*statuses} <= {200, 429}
        with sent(short, stream=True):
            pass
    left = [each for each in threading.enumerate() if not each.name.startswith("engine")]
    wait_until(lambda: not any(each.is_alive() for each in {*left} - known))
