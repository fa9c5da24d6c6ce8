"""The server through OpenAI's client, and under overload: many, disconnecting, hostile clients."""

import gc
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from support.programs import wait_until
from support.serving import MODELS, PROMPT, SETTINGS, TURNS, Served, engine_held, head_of, running

from bench.serve.load import load
from offload_rt import SamplingParams
from offload_rt.cli.serve import main
from offload_rt.engine import engine as engine_module
from offload_rt.server import connection
from offload_rt.server.settings import ServeSettings


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


def test_max_tokens_0_reads_the_prompt_only(served):
    """lm-eval's local-completions scores continuations with one or no new token."""
    ids = served.llm.encode(PROMPT + "    return 1")
    prompts = [ids, ids[:5]]
    asked = {"prompt": prompts, "temperature": 0, "logprobs": 1, "echo": True, "max_tokens": 0}
    with_one = served.post("/v1/completions", asked | {"max_tokens": 1})[1]
    without = served.post("/v1/completions", asked)[1]
    streamed = served.chunks("/v1/completions", asked)
    assert without["usage"]["completion_tokens"] == 0
    for i, prompt in enumerate(prompts):
        empty, more = without["choices"][i], with_one["choices"][i]
        first, *own = more["logprobs"]["token_logprobs"]
        assert empty["logprobs"]["token_logprobs"] == [first, *own[:-1]] and first is None
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0)
        (output,) = served.llm.generate(prompt, params)
        tokens = [*prompt[1:], *output.token_ids]
        rows = [*output.prompt_logprobs[1:], *output.logprobs]
        expected = [row[id].logprob for id, row in zip(tokens, rows, strict=True)]
        assert own == pytest.approx(expected, abs=1e-4)
        assert more["text"].startswith(empty["text"]) and empty["finish_reason"] == "length"
        chunks = [choice for part in streamed for choice in part["choices"] if choice["index"] == i]
        assert "".join(choice["text"] for choice in chunks) == empty["text"]
        assert chunks[-1]["finish_reason"] == "length"
        best = [max(top, key=top.get) for top in empty["logprobs"]["top_logprobs"][1:]]
        assert any(map(str.__eq__, best, empty["logprobs"]["tokens"][1:]))


@pytest.mark.parametrize("k", [0, 5, 20])
def test_logprobs_have_the_requested_count(served, k):
    asked = {"model": "demo", "max_tokens": 4, "temperature": 0}
    completion = served.client.completions.create(**asked, prompt=PROMPT, logprobs=k)
    logprobs = completion.choices[0].logprobs
    columns = logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs
    assert len(logprobs.top_logprobs) == 4
    for token, own, best in zip(*columns, strict=True):
        # two ids may have the same text
        assert max(k, 1) - 1 <= len(best) <= k + 1 and best[token] == own
    asked |= {"messages": TURNS, "logprobs": True, "top_logprobs": k}
    whole = served.client.chat.completions.create(**asked).choices[0].logprobs.content
    parts = [part.choices[0].logprobs for part in served.client.chat.completions.create(
        **asked, stream=True)]  # fmt: skip
    streamed = [token.token for part in parts if part for token in part.content]
    assert streamed == [token.token for token in whole] and len(whole) == 4
    for token in whole:
        best = [top.logprob for top in token.top_logprobs]
        assert len(best) == k and best == sorted(best, reverse=True)
        assert bytes(token.bytes).decode() == token.token


# Unknown fields, and neutral values of missing features.
NEUTRAL = {
    "skip_special_tokens": True, "user": "me", "store": False, "metadata": {}, "functions": [],
    "parallel_tool_calls": True, "reasoning_effort": "low", "guided_json": None, "typical_p": 1,
    "use_beam_search": False, "function_call": "none", "length_penalty": 1.0, "mirostat": 0,
    "xtc_probability": 0.0, "grammar": "",
}  # fmt: skip


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("is_continuous", [False, True])
def test_stream_equals_the_whole_answer_with_usage_on_request(served, path, is_last, is_continuous):
    body = {"prompt": PROMPT, "messages": TURNS, "max_tokens": 6, "temperature": 0, **NEUTRAL}
    options = {"include_usage": is_last, "continuous_usage_stats": is_continuous}
    options["include_passes"] = is_last
    text = served.asked(f"/v1/{path}", body | {"stream": True, "stream_options": options})[2]
    *events, done = text.strip().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert done == "data: [DONE]" and len({chunk["id"] for chunk in chunks}) == 1
    whole = served.post(f"/v1/{path}", body)[1]
    expected = whole["usage"]
    (choice,) = whole["choices"]
    if is_last:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"] == expected
    passes = [chunk["pass"] for chunk in chunks if "pass" in chunk]
    assert sum(verified["tokens"] for verified in passes) == 6 * is_last
    for verified in passes:
        parents, nodes = verified["parents"], verified["path"]
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
        assert [parents[node] for node in nodes] == [0, *nodes][: len(nodes)]
        assert verified["seconds"] > 0 and 0 <= verified["link_busy"] <= 1.01
    told = [chunk.get("usage") for chunk in chunks]
    if is_last and is_continuous:
        counts = [usage["completion_tokens"] for usage in told]
        assert counts == sorted(counts) and told[-1] == expected
        assert (counts[0] == 0) == path.startswith("chat")
    else:
        assert told == [None] * len(told)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    if path == "completions":
        objects = ("text_completion", "text_completion")
        assert "".join(part["text"] for part in parts) == choice["text"]
    else:
        objects = ("chat.completion", "chat.completion.chunk")
        first, *deltas = (part["delta"] for part in parts)
        assert first == {"role": "assistant", "content": ""}
        assert "".join(delta["content"] for delta in deltas) == choice["message"]["content"]
    assert {(whole["object"], chunk["object"]) for chunk in chunks} == {objects}
    assert {entry["model"] for entry in (whole, *chunks)} == {"demo"}


def test_tokenize_and_detokenize(served):
    ids = served.llm.encode(PROMPT)
    expected = {"tokens": ids, "count": len(ids), "max_model_len": 256}
    assert served.post("/tokenize", {"prompt": PROMPT})[1] == expected
    assert served.post("/detokenize", {"tokens": ids[1:]})[1] == {"prompt": PROMPT}
    assert served.post("/detokenize", {"tokens": [2**31]}) == (200, {"prompt": ""})
    plain = served.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False})[1]["tokens"]
    assert plain == served.llm.tokenizer.encode(PROMPT, add_special_tokens=False)
    for variables in ({}, {"mark": "x = "}):
        body = {"messages": TURNS, "chat_template_kwargs": variables}
        expected = served.llm.tokenizer.apply_chat_template(
            TURNS, add_generation_prompt=True, return_dict=False, **variables
        )
        assert served.post("/tokenize", body)[1]["tokens"] == expected
    turns = [*TURNS, {"role": "assistant", "content": "x ="}]
    body = {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}
    answer = served.post("/v1/chat/completions", {**body, "max_tokens": 1})[1]
    assert served.post("/tokenize", body)[1]["count"] == answer["usage"]["prompt_tokens"]


def test_timeouts_and_any_model_name(llm):
    settings = replace(SETTINGS, any_model_name=True)
    with running(llm, settings=settings) as server:
        body = {"prompt": "x", "max_tokens": 1, "model": "gpt-4o"}
        assert server.post("/v1/completions", body)[0] == 200
        server.service.settings = replace(settings, timeout=1)
        with engine_held(llm):
            late, answer = server.post("/v1/completions", body)
        assert late == 504 and "took more than" in answer["error"]["message"]
        server.wait_until_idle()


def test_metrics_count_requests_and_tokens(served):
    def read() -> dict[str, float]:
        text = served.request("GET", "/metrics")[2].decode()
        pairs = re.findall("^([^# ]+) (.+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in pairs}

    before = read()
    served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "temperature": 0})
    after = read()
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    assert gained["offload_rt_tokens_total"] == 5
    assert gained['offload_rt_requests_total{end="length"}'] == 1
    assert gained["offload_rt_prompt_tokens_total"] == len(served.llm.encode(PROMPT))
    assert 1 <= gained["offload_rt_passes_total"] <= 5 and after["offload_rt_running"] == 0


def test_serve_warns_and_needs_a_free_port(monkeypatch, capsys, tmp_path):
    def run(sockets: list[socket.socket]) -> None:
        assert gc.get_freeze_count() > 0, "collections traverse the objects of libraries"
        gc.unfreeze()

    make_server = Mock(return_value=Mock(run=run))
    monkeypatch.setattr(connection, "make_server", make_server)
    model = [str(MODELS / "demo-target"), "--device-memory", "1GB", "--drafter", "none", "--port"]
    template = tmp_path / "template"
    template.write_text("{{ tools }}")
    for flags, warning in (
        (["--host", "0.0.0.0"], "set --api-key"),
        (["--host", "0.0.0.0", "--api-key", "secret"], ""),
        (["--host", "localhost"], ""),
        (["--chat-template", str(template)], "format generic is used"),
        (["--chat-template", str(template), "--tool-call-parser", "generic"], ""),
    ):
        assert main([*model, "0", *flags]) == 0
        printed = capsys.readouterr().err
        assert ("warning" in printed) == bool(warning) and warning in printed
    assert make_server.call_args.args[1] == ServeSettings.drain
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*model, str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_clients_with_grammars_and_tools_get_the_answers_of_lone_requests(served):
    """A share of 40 % of the clients disconnects."""
    counts = load(f"http://127.0.0.1:{served.port}", [PROMPT], disconnecting=0.4)
    assert counts.disconnected > 0 and counts.equal + counts.disconnected == 16


@pytest.mark.parametrize("stream", [False, True])
def test_waiting_clients_that_disconnect_free_their_place(served, stream):
    prompts = ["x"] * SETTINGS.max_waiting
    raw = json.dumps({"prompt": prompts, "max_tokens": 40, "stream": stream}).encode()
    with engine_held(served.llm):
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", served.port)) as client:
                client.sendall(head_of(len(raw)) + raw)
                wait_until(lambda: served.service.n_open == SETTINGS.max_waiting)
                status, headers, text = served.asked("/v1/completions", {"prompt": "x"})
                assert (status, json.loads(text)["error"]["type"]) == (429, "rate_limit_error")
                assert int(headers["Retry-After"]) > 0 and "x-should-retry" not in headers
            wait_until(lambda: served.service.n_open == 0)
    assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_failing_request_fails_alone(served, stream, monkeypatch):
    """NaN logits are reported to the client; internal errors are reported without details."""
    node_probs = engine_module.NodeProbs
    expected = served.llm.generate(PROMPT, SamplingParams(max_tokens=40))[0].text

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
