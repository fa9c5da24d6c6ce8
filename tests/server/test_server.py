"""The server through OpenAI's client, and clients that misbehave."""

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import OpenAI
from support.serving import (
    LIMITS,
    MODELS,
    PROMPT,
    TEMPLATE,
    TURNS,
    alone,
    engine_held,
    running,
    serving,
)

from offload_rt import LLM, SamplingParams, StructuredOutputs
from offload_rt.cli.serve import main
from offload_rt.server.call_format import CallFormat
from offload_rt.server.call_texts import Style
from offload_rt.server.limits import Access


def rendered(llm: LLM, **more: Any) -> list[int]:
    """The conversation as transformers makes token ids of it."""
    assert llm.tokenizer is not None
    encoding = llm.tokenizer.apply_chat_template(
        TURNS, add_generation_prompt=True, return_dict=True, **more
    )
    return list(encoding["input_ids"])


def test_completion_equals_generate(served):
    completion = served.client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=12, temperature=0
    )
    assert completion.choices[0].text == alone(served.llm, PROMPT, max_tokens=12)
    assert (completion.object, completion.model, completion.choices[0].finish_reason) == (
        "text_completion",
        "demo",
        "length",
    )
    n_prompt = len(served.llm.encode(PROMPT))
    assert completion.usage is not None
    assert (
        completion.usage.prompt_tokens, completion.usage.completion_tokens,
        completion.usage.total_tokens,
    ) == (
        n_prompt, 12, n_prompt + 12,
    )  # fmt: skip


def test_stream_equals_the_whole_answer(served):
    asked = {"model": "demo", "prompt": [PROMPT, "class "], "max_tokens": 10, "temperature": 0}
    whole = served.client.completions.create(**asked)
    texts = ["", ""]
    ids = set()
    for chunk in served.client.completions.create(**asked, stream=True):
        ids.add(chunk.id)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert len(ids) == 1


def test_chat_stream_sends_role_first_and_usage_last(served):
    asked = {"model": "demo", "messages": TURNS, "max_completion_tokens": 9, "temperature": 0}
    whole = served.client.chat.completions.create(**asked)
    chunks = list(
        served.client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, last = chunks
    deltas = [part.choices[0].delta for part in parts]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [
        "length"
    ]
    assert all(part.usage is None for part in parts) and last.choices == []
    assert last.usage is not None and last.usage.completion_tokens == 9
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert whole.object == "chat.completion"


def test_chat_uses_the_template_of_the_model(served):
    parts = [{"type": "text", "text": "import "}, {"type": "text", "text": "os\n"}]
    completion = served.client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": parts}], max_tokens=8, temperature=0,
        extra_body={"chat_template_kwargs": {"mark": "x = "}},
    )  # fmt: skip
    assert completion.choices[0].message.content == alone(
        served.llm, rendered(served.llm, mark="x = "), max_tokens=8
    )


def test_n_answers_equal_their_seeds(served):
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0.7}
    several = served.client.completions.create(**asked, n=3, seed=5)
    for k, choice in enumerate(several.choices):
        assert choice.index == k
        assert choice.text == served.client.completions.create(**asked, seed=5 + k).choices[0].text


def test_stop_string_ends_an_answer_and_is_excluded(served):
    text = alone(served.llm, PROMPT, max_tokens=16)
    stop = text[5:8]
    completion = served.client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=16, temperature=0, stop=[stop]
    )
    assert completion.choices[0].text == text[: text.index(stop)]
    assert completion.choices[0].finish_reason == "stop"


def test_completion_logprobs_with_echo(served):
    completion = served.client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=3, temperature=0, logprobs=2, echo=True
    )
    choice = completion.choices[0]
    ids = served.llm.encode(PROMPT)
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs
    assert logprobs.top_logprobs
    assert (
        choice.text.startswith(PROMPT) and "".join(logprobs.tokens[1:]) == choice.text
    )  # it begins with a special token
    assert len(logprobs.tokens) == len(ids) + 3
    assert logprobs.token_logprobs[0] is None
    assert all(x is not None and x <= 0 for x in logprobs.token_logprobs[1:])
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])
    assert logprobs.text_offset is not None and logprobs.text_offset[:2] == [0, 0], "hidden token"
    for token, start in zip(logprobs.tokens[1:], logprobs.text_offset[1:], strict=True):
        assert choice.text[start:].startswith(token)
    whole = served.llm.generate(ids, SamplingParams(max_tokens=3, logprobs=2))[0]
    assert whole.logprobs is not None
    own = [row[id].logprob for id, row in zip(whole.token_ids, whole.logprobs, strict=True)]
    assert logprobs.token_logprobs[len(ids) :] == pytest.approx(own, abs=1e-4)


def test_max_tokens_0_reads_the_prompt_only(served):
    """lm-eval's local-completions scores continuations with one or no new token."""
    ids = served.llm.encode(PROMPT + "    return 1")
    asked = {
        "model": "demo", "prompt": [ids, ids[:5]], "temperature": 0, "logprobs": 1, "echo": True,
    }  # fmt: skip
    with_one = served.client.completions.create(**asked, max_tokens=1)
    alone = served.client.completions.create(**asked, max_tokens=0)
    streamed = list(served.client.completions.create(**asked, max_tokens=0, stream=True))
    assert alone.usage is not None and alone.usage.completion_tokens == 0
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for i, prompt in enumerate(asked["prompt"]):
        empty = alone.choices[i]
        more = with_one.choices[i]
        assert empty.logprobs is not None and more.logprobs is not None
        assert empty.logprobs.token_logprobs
        assert empty.logprobs.token_logprobs == more.logprobs.token_logprobs[:-1]
        expected = served.llm.generate(prompt, params)[0].prompt_logprobs
        assert expected is not None
        own = [row[id].logprob for id, row in zip(prompt[1:], expected[1:], strict=True) if row]
        assert empty.logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-4)
        assert more.text.startswith(empty.text) and empty.finish_reason == "length"
        chunks = [choice for chunk in streamed for choice in chunk.choices if choice.index == i]
        assert "".join(choice.text for choice in chunks) == empty.text
        assert chunks[-1].finish_reason == "length"
        greedy = [
            max(best, key=lambda text: best[text]) for best in empty.logprobs.top_logprobs[1:]
        ]
        assert any(
            text == token for text, token in zip(greedy, empty.logprobs.tokens[1:], strict=True)
        )


@pytest.mark.parametrize("k", [0, 5, 20])
def test_logprobs_have_the_requested_count(served, k):
    completion = served.client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=k
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None
    assert len(logprobs.top_logprobs) == 4
    for token, own, best in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        # two ids may have the same text
        assert max(k, 1) - 1 <= len(best) <= k + 1 and best[token] == own
    chat = served.client.chat.completions.create(
        model="demo", messages=TURNS, max_tokens=4, temperature=0, logprobs=True, top_logprobs=k
    )
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    assert [len(token.top_logprobs) for token in chat.choices[0].logprobs.content] == [k] * 4


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("is_continuous", [False, True])
def test_usage_is_sent_on_request(served, path, is_last, is_continuous):
    body = {"prompt": PROMPT, "messages": TURNS, "max_tokens": 6, "temperature": 0}
    options = {"include_usage": is_last, "continuous_usage_stats": is_continuous}
    text = served.asked(f"/v1/{path}", body | {"stream": True, "stream_options": options})[2]
    *events, done = text.strip().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert done == "data: [DONE]" and len({chunk["id"] for chunk in chunks}) == 1
    expected = served.post(f"/v1/{path}", body)[1]["usage"]
    if is_last:
        last = chunks.pop()
        assert last["choices"] == [] and last["usage"] == expected
    told = [chunk.get("usage") for chunk in chunks]
    if is_last and is_continuous:
        counts = [usage["completion_tokens"] for usage in told]
        assert counts == sorted(counts) and told[-1] == expected
        assert (counts[0] == 0) == path.startswith("chat")
    else:
        assert told == [None] * len(told)
    assert all(chunk["choices"] for chunk in chunks)


def test_chat_logprobs_are_equal_in_a_stream(served):
    asked = {
        "model": "demo", "messages": TURNS, "max_tokens": 5, "temperature": 0, "logprobs": True,
        "top_logprobs": 2,
    }  # fmt: skip
    whole = served.client.chat.completions.create(**asked).choices[0].logprobs
    assert whole is not None and whole.content is not None
    streamed: list[Any] = []
    for chunk in served.client.chat.completions.create(**asked, stream=True):
        logprobs = chunk.choices[0].logprobs
        streamed += logprobs.content or [] if logprobs else []
    assert [token.token for token in streamed] == [token.token for token in whole.content]
    assert len(streamed) == 5
    for token in whole.content:
        assert len(token.top_logprobs) == 2 and bytes(token.bytes or []).decode() == token.token
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def test_biases_and_penalties_reach_the_model(served):
    ids = served.llm.generate(PROMPT, SamplingParams(max_tokens=6))[0].token_ids
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    completion = served.client.completions.create(
        **asked, logit_bias={str(ids[0]): -100}, extra_body={"repetition_penalty": 1.3}
    )
    text = alone(
        served.llm, PROMPT, max_tokens=6, logit_bias={ids[0]: -100}, repetition_penalty=1.3
    )
    assert completion.choices[0].text == text != alone(served.llm, PROMPT, max_tokens=6)


def test_pass_numbers_are_sent_on_request(served):
    asked = {"messages": TURNS, "max_tokens": 12, "temperature": 0, "stream": True}
    body = asked | {"stream_options": {"include_passes": True}}
    events = served.asked("/v1/chat/completions", body)[2].split("\n\n")
    passes = [
        chunk["pass"]
        for event in events
        if event.startswith("data: {") and "pass" in (chunk := json.loads(event[6:]))
    ]
    assert sum(chunk["tokens"] for chunk in passes) == 12
    for chunk in passes:
        assert chunk["parents"][0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(chunk["parents"]) if node)
        assert [chunk["parents"][node] for node in chunk["path"]] == [0, *chunk["path"]][
            : len(chunk["path"])
        ]
        assert chunk["seconds"] > 0 and 0 <= chunk["link_busy"] <= 1.01


@pytest.mark.parametrize(("path", "body", "word"), [
    ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
    ("completions", {"prompt": "x", "n": 5}, "n is 5"),
    ("completions", {"prompt": "x", "temperature": -1}, "temperature"),
    ("completions", {"prompt": "x", "stream_options": {"include_usage": True}},
        "stream_options"),
    ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("completions", {"prompt": "x", "best_of": 3}, "best_of"),
    ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ("completions", {"prompt": "x", "logit_bias": {"99999999": 1}}, "logit_bias"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [10**9]}, "token id"),
    ("completions", {"prompt": "x " * 5000}, "too long"),
    ("completions", {"prompt": ["x"] * 40}, "40 answers"),
    ("completions", {}, "prompt"),
    *(("completions", prompt, "body") for prompt in ([1, 2], "text", 5, True, b"null")),
    ("completions", b"", "body"),
    ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", b"{", "JSON"),
    ("chat/completions", [TURNS], "body"),
    ("chat/completions", {"messages": TURNS, "stream_options": {}}, "stream_options"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": [*TURNS, {"content": "x"}]}, "role"),
    ("chat/completions", {"messages": [{"role": 1, "content": "x"}]}, "role"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "vision tower"),
    ("chat/completions", {"messages": TURNS, "response_format": {"type": "xml"}},
        "response_format 'xml'"),
    ("chat/completions", {"messages": TURNS, "tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"messages": TURNS, "top_logprobs": 2}, "logprobs"),
    ("chat/completions", {"messages": TURNS, "chat_template_kwargs": {"chat_template": "x"}},
        "chat_template"),
])  # fmt: skip
def test_invalid_values_are_refused(served, path, body, word):
    status, answer = served.post(f"/v1/{path}", body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert word in answer["error"]["message"]


def test_unknown_fields_are_ignored(served):
    more = {
        "user": "me", "store": False, "metadata": {}, "parallel_tool_calls": True,
        "reasoning_effort": "low",
    }  # fmt: skip
    status, answer = served.post(
        "/v1/chat/completions", {"messages": TURNS, "max_tokens": 2, **more}
    )
    assert status == 200 and answer["usage"]["completion_tokens"] == 2


def test_openai_client_raises_its_errors(served):
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        served.client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.completions.create(model="demo", prompt="x " * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert (
        [model.id for model in served.client.models.list()]
        == ["demo"]
        == [served.client.models.retrieve("demo").id]
    )


def test_tokenize_and_detokenize(served):
    ids = served.llm.encode(PROMPT)
    assert served.post("/tokenize", {"prompt": PROMPT})[1] == {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": 256,
    }
    assert served.post("/detokenize", {"tokens": ids[1:]})[1] == {"prompt": PROMPT}
    plain = served.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False})[1]["tokens"]
    assert served.llm.tokenizer is not None
    assert plain == served.llm.tokenizer.encode(PROMPT, add_special_tokens=False)
    ids = rendered(served.llm)
    assert served.post("/tokenize", {"messages": TURNS})[1]["tokens"] == ids
    assert served.post("/tokenize", {"content": PROMPT})[0] == 400


def test_tokenize_counts_the_prompt_of_a_chat_request(served):
    turns = [*TURNS, {"role": "assistant", "content": "x ="}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for fields in (
        {"tools": tools},
        {"chat_template_kwargs": {"mark": "several tokens"}},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        body = {"messages": turns, **fields}
        answer = served.post("/v1/chat/completions", {**body, "max_tokens": 1})[1]
        assert served.post("/tokenize", body)[1]["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("token", ["5", 5.0, True, None, [5]])
def test_detokenize_accepts_integers_only(served, token):
    assert served.post("/detokenize", {"tokens": [5, token]})[0] == 400


def test_oversized_bodies_are_refused(served):
    status, answer = served.post("/v1/completions", {"prompt": "x" * 300_000})
    assert status == 413 and "200000 bytes" in answer["error"]["message"]


def test_api_key_model_names_and_timeouts_are_respected(llm):
    limits = replace(LIMITS, n_waiting=2)
    access = Access("secret", frozenset({"127.0.0.1"}))
    with running(llm, access=access, limits=limits) as guarded:
        ask = {"prompt": "x", "max_tokens": 1}
        assert guarded.post("/v1/completions", ask)[0] == 401
        key = {"Authorization": "Bearer secret"}
        assert guarded.post("/v1/completions", ask, key)[0] == 200
        assert guarded.post("/v1/completions", ask, {**key, "Host": "evil.example"})[0] == 403
        guarded.service.limits = replace(limits, timeout_s=0.2)
        with engine_held(llm):
            status, answer = guarded.post("/v1/completions", ask, key)
        assert status == 504 and "took more than" in answer["error"]["message"]
        guarded.wait_until_idle()
        with ThreadPoolExecutor(24) as pool:
            many = [
                pool.submit(guarded.post, "/v1/completions", {**ask, "max_tokens": 20}, key)
                for _ in range(24)
            ]
            assert {future.result()[0] for future in many} <= {200, 429, 504}
        guarded.wait_until_idle()
        for path in ("/", "/page/app.js", "/health"):
            assert guarded.request("GET", path)[0] == 200


def test_metrics_count_requests_and_tokens(served):
    def read() -> dict[str, float]:
        lines = served.request("GET", "/metrics")[2].decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
        return {name: float(value) for name, value in pairs}

    before = read()
    served.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "temperature": 0})
    after = read()
    gained = {name: after[name] - before.get(name, 0.0) for name in after}
    assert gained["offload_rt_tokens_total"] == 5
    assert gained['offload_rt_requests_total{end="length"}'] == 1
    assert gained["offload_rt_prompt_tokens_total"] == len(served.llm.encode(PROMPT))
    assert 1 <= gained["offload_rt_passes_total"] <= 5 and after["offload_rt_running"] == 0


def test_tool_calls_return_to_the_template_as_objects(served, monkeypatch):
    """And none are offered where they are not wanted."""
    monkeypatch.setattr(served.service.prompts, "tool_format", CallFormat(style=Style()))
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": "import"}'},
    }
    other = {
        "id": "call_2",
        "type": "function",
        "function": {"name": "add", "arguments": "no JSON"},
    }
    turns = [*TURNS, {"role": "assistant", "content": None, "tool_calls": [call, other]}]
    turns += [{"role": "tool", "tool_call_id": "call_1", "content": "7"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    ids = served.post("/tokenize", {"messages": turns})[1]["tokens"]
    assert served.llm.tokenizer is not None
    assert served.llm.tokenizer.decode(ids).endswith("7\nimport")
    asked = {"messages": TURNS, "tools": tools, "max_tokens": 1}
    n_plain = served.post("/v1/chat/completions", {"messages": TURNS, "max_tokens": 1})[1]["usage"][
        "prompt_tokens"
    ]
    for choice, is_offered in (("none", False), ("auto", True), (None, True)):
        usage = served.post("/v1/chat/completions", asked | {"tool_choice": choice})[1]["usage"]
        assert (usage["prompt_tokens"] > n_plain) == is_offered


def test_response_format_reaches_the_template(served, monkeypatch):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    asked = {"messages": TURNS, "max_tokens": 4, "temperature": 0}
    plain = served.post("/v1/chat/completions", asked | {"response_format": {"type": "text"}})[1][
        "choices"
    ]
    knows = (
        TEMPLATE + "{% if response_format %}{{ response_format.json_schema.name }} = {% endif %}"
    )
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", knows)
    assert served.post("/v1/chat/completions", asked)[1]["choices"] == plain
    formatted = asked | {"response_format": schema}
    text = served.post("/v1/chat/completions", formatted)[1]["choices"][0]["message"]["content"]
    outputs = StructuredOutputs(json={"type": "object"})
    prompt = rendered(served.llm, response_format=schema)
    assert text == alone(served.llm, prompt, max_tokens=4, structured_outputs=outputs)


def test_sigterm_lets_answers_finish(tmp_path):
    with serving("offload_rt.serve", tmp_path, "--served-model-name", "demo") as (program, port):
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)
        chunks = iter(
            client.completions.create(
                model="demo", prompt=PROMPT, max_tokens=60, stream=True, temperature=0
            )
        )
        next(chunks)
        program.signal(signal.SIGTERM)
        rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length"
        assert program.code() == 0 and "Traceback" not in program.err


def test_port_in_use_is_reported_before_loading(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", str(MODELS / "demo-target"), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
