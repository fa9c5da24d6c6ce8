"""The APIs of agents, through their official clients: reasoning, tool calls and images."""

import base64
import io
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from fastapi.routing import APIRoute
from PIL import Image
from support.serving import SETTINGS, TURNS, Served, running, script

from offload_rt.errors import PromptError
from offload_rt.llm import Piece
from offload_rt.models.image_prompt import ImagePrompt
from offload_rt.server import app
from offload_rt.server.call_format import CallFormat, Style
from offload_rt.server.chat_format import ChatFormat
from offload_rt.server.prompts import _IMAGE_THREADS

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", **FUNCTION, "strict": True}
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
# The tags and the call are divided among pieces.
PIECES = ("<thi", "nk>\nOne", " two</think>", "\n\nSo: <tool", '_call>{"name": "add", "argu',
          'ments": {"a": 1}}</tool_call>')  # fmt: skip
ANSWER = ("One two", "So: ", [("add", {"a": 1})])


@pytest.fixture
def reasons(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    chat_format = ChatFormat.select(served.llm.tokenizer, "hermes", "think")
    monkeypatch.setattr(served.service, "chat_format", chat_format)


def chat(served: Served, stream: bool) -> tuple[Any, str | None, Any]:
    """Ask by chat completions. Returns the answer, its finish reason, and the usage."""
    asking = served.client.chat.completions
    fields: Any = {"model": "demo", "messages": TURNS, "tools": [CHAT_TOOL]}
    if not stream:
        answer = asking.create(**fields)
    else:
        with asking.stream(**fields, stream_options={"include_usage": True}) as events:
            answer = events.get_final_completion()
    (choice,) = answer.choices
    message = choice.message
    functions = [call.function for call in message.tool_calls]
    named = [(each.name, json.loads(each.arguments)) for each in functions]
    parts = (message.reasoning_content, message.content, named)
    return parts, choice.finish_reason, answer.usage


def responses(served: Served, stream: bool) -> tuple[Any, str | None, Any]:
    fields: Any = {"model": "demo", "input": "import os\n", "tools": [RESPONSES_TOOL]}
    if not stream:
        answer = served.client.responses.create(**fields)
    else:
        with served.client.responses.stream(**fields) as events:
            received = [*events]
            answer = events.get_final_response()
        assert [entry.sequence_number for entry in received] == [*range(len(received))]
        deltas = [entry.delta for entry in received if entry.type.endswith("text.delta")]
        assert "".join(deltas) == "".join(ANSWER[:2])
    thinking, said, call = answer.output
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output_text == said.content[0].text and call.call_id
    named = [(call.name, json.loads(call.arguments))]
    return (thinking.content[0].text, answer.output_text, named), answer.status, answer.usage


def messages(served: Served, stream: bool) -> tuple[Any, str | None, Any]:
    asking = served.anthropic.messages
    fields: Any = {"model": "demo", "max_tokens": 50, "messages": TURNS, "tools": [ANTHROPIC_TOOL]}
    if not stream:
        answer = asking.create(**fields)
    else:
        with asking.stream(**fields) as events:
            assert "".join(events.text_stream) == ANSWER[1]
            answer = events.get_final_message()
    thinking, said, call = answer.content
    assert [part.type for part in answer.content] == ["thinking", "text", "tool_use"]
    parts = (thinking.thinking, said.text, [(call.name, call.input)])
    return parts, answer.stop_reason, answer.usage


@pytest.mark.usefixtures("reasons")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_clients_receive_reasoning_content_and_calls(served, monkeypatch, ask, stream):
    requests = script(served.llm, monkeypatch, *PIECES)
    answer, reason, usage = ask(served, stream)
    ends = {chat: "tool_calls", responses: "completed", messages: "tool_use"}
    assert (answer, reason) == (ANSWER, ends[ask])
    names = ("prompt", "completion") if ask is chat else ("input", "output")
    counts = [getattr(usage, f"{name}_tokens") for name in names]
    assert counts == [len(requests[0][0][0]), len(PIECES)]
    if ask is messages:
        assert (usage.cache_creation_input_tokens, usage.cache_read_input_tokens) == (0, 0)
    else:  # the pieces that begin inside the reasoning
        assert getattr(usage, f"{names[1]}_tokens_details").reasoning_tokens == 1


def test_reasoning_of_the_prompt_continues(served, monkeypatch):
    """A template may open the reasoning; a grammar then begins behind it."""
    template = "{{ messages[0].content }}<think>\n{# </think> #}"
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", template)
    chat_format = ChatFormat.select(served.llm.tokenizer, "auto", "auto")
    monkeypatch.setattr(served.service, "chat_format", chat_format)
    body = {"messages": TURNS, "guided_choice": ["yes"]}
    requests = script(served.llm, monkeypatch, "hm</think>", "yes")
    message = served.post("/v1/chat/completions", body)[1]["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    assert "</think>" in requests[0][1].structured_outputs.around


def data_of(*size: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, "teal").save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


DATA = data_of(5, 3)
URL = f"data:image/png;base64,{DATA}"
OPENAI = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
ANTHROPIC = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
N_TOKENS = 2 * 5 + 2  # columns of two images, and the tokens of "x"


@pytest.fixture
def processor(served: Served, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Let the model of text accept images, with a token per column. Its answers need `script`."""

    def encode_chat(messages: Any, images: Any, options: Any) -> ImagePrompt:
        return ImagePrompt([7] * sum(image.width for image in images) + served.llm.encode("x"), ())

    processor = Mock(scaled=lambda image: image, encode_chat=Mock(wraps=encode_chat))
    monkeypatch.setattr(served.llm.requests, "images", processor)
    return processor


def chat_of(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 3}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
HISTORY = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [text("a"), OPENAI, text("b")]},
    {"role": "assistant", "content": "A", "reasoning_content": "R", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": [text("7"), OPENAI]},
    {"role": "user", "content": "Q2"},
]
INPUT_IMAGE = {"type": "input_image", "image_url": URL, "detail": "auto"}
INPUT = [
    {"role": "user", "content": [text("a"), INPUT_IMAGE, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
    {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "1", "output": [text("7"), INPUT_IMAGE]},
    {"role": "user", "content": "Q2"},
]
BLOCKS = [
    {"role": "user", "content": [text("a"), ANTHROPIC, text("b")]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "R", "signature": ""},
        {"type": "redacted_thinking", "data": "x"}, text("A"),
        {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "content": [text("7"), ANTHROPIC]},
        text("Q"), text("2")]},
]  # fmt: skip
EXPECTED_TURNS = [
    ["system", "S", None, None, None],
    ["user", [text("a"), {"type": "image"}, text("b")], None, None, None],
    ["assistant", "A", "R", None, [CALL]],
    ["tool", [text("7"), {"type": "image"}], None, "1", None],
    ["user", "Q2", None, None, None],
]
WANTED = {"type": "json_schema", "name": "x", "schema": SCHEMA}


@pytest.mark.parametrize(("path", "body", "more"), [
    ("chat/completions", {"messages": HISTORY, "tools": [CHAT_TOOL], "max_tokens": 1},
     {"reasoning_effort": "none", "tool_choice": "none",
      "response_format": {"type": "json_schema", "json_schema": WANTED}}),
    ("responses", {"input": INPUT, "instructions": "S", "tools": [RESPONSES_TOOL]},
     {"reasoning": {"effort": "none"}, "tool_choice": "none", "text": {"format": WANTED}}),
    ("messages", {"messages": BLOCKS, "system": "S", "tools": [ANTHROPIC_TOOL], "max_tokens": 1},
     {"thinking": {"type": "disabled"}, "tool_choice": {"type": "none"},
      "output_config": {"format": WANTED}}),
])  # fmt: skip
def test_all_apis_convert_conversations_alike(served, processor, monkeypatch, path, body, more):
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", "{{ response_format }}")
    monkeypatch.setattr(served.service.prompts, "tool_format", CallFormat(style=Style()))
    requests = script(served.llm, monkeypatch, "seen")
    status, answer = served.post(f"/v1/{path}", body)
    assert status == 200 and '"seen"' in json.dumps(answer)
    usage = answer["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == N_TOKENS
    if path == "messages":
        assert served.post("/v1/messages/count_tokens", body)[1] == {"input_tokens": N_TOKENS}
    turns, images, options = processor.encode_chat.call_args.args
    names = ("role", "content", "reasoning_content", "tool_call_id", "tool_calls")
    assert [[turn.get(name) for name in names] for turn in turns] == EXPECTED_TURNS
    assert {(image.size, image.getpixel((0, 0))) for image in images} == {((5, 3), (0, 128, 128))}
    assert options["add_generation_prompt"] is True and "response_format" not in options
    (tool,) = options["tools"]
    assert (tool["function"]["name"], tool["function"]["parameters"]) == ("add", SCHEMA)
    (prompt,) = requests[0][0]
    assert isinstance(prompt, ImagePrompt) and len(prompt) == N_TOKENS
    assert served.post(f"/v1/{path}", body | more)[0] == 200
    options = processor.encode_chat.call_args.args[2]
    assert options["enable_thinking"] is False and options["tools"] is None
    assert options["response_format"]["json_schema"]["name"] == "x"
    assert requests[1][1].structured_outputs.json == SCHEMA


@pytest.mark.usefixtures("processor")
def test_wrong_images_are_refused_and_models_describe_their_input(served, monkeypatch):
    models = served.client.models
    assert [model.id for model in models.list()] == ["demo"]
    card = models.retrieve("demo").model_dump()
    assert (card["input_modalities"], card["max_body"]) == (["text", "image"], 200_000)
    wide = f"data:image/png;base64,{data_of(served.llm.max_model_len, 1)}"
    for part, message in (
        ({"type": "image_url", "image_url": wide}, "maximum context length"),
        (OPENAI, "truncate_prompt_tokens"), ({"type": "video_url"}, "[0] of type 'video_url'"),
        ({"type": "image", "image": "/etc/passwd"}, "image 1: no URL"),
        ({"type": "image_url", "image_url": "https://a.example/x"}, "allow_image_urls"),
        ({"type": "image_url", "image_url": URL[:-40]}, "image 1: the image is damaged"),
    ):  # fmt: skip
        body = chat_of(part) | ({"truncate_prompt_tokens": 4} if part == OPENAI else {})
        status, answer = served.post("/v1/chat/completions", body)
        assert status == 400 and message in answer["error"]["message"]
    monkeypatch.setattr(served.llm.requests, "images", None)
    assert models.retrieve("demo").model_dump()["input_modalities"] == ["text"]


def test_urls_are_read_with_permission(served, processor, monkeypatch):
    script(served.llm, monkeypatch, "seen")
    failure = PromptError("a.example answered with status 404")
    fetch = Mock(side_effect=[base64.b64decode(DATA), failure])
    monkeypatch.setattr(app, "ImageFetcher", lambda _: fetch)
    body = chat_of({"type": "image", "source": {"type": "url", "url": "https://a.example/x"}})
    with running(served.llm, settings=replace(SETTINGS, allow_image_urls=True)) as open_server:
        assert open_server.post("/v1/messages", body)[0] == 200
        assert processor.encode_chat.call_args.args[1][0].size == (5, 3)
        status, answer = open_server.post("/v1/messages", body)
    assert status == 400 and "image 1: a.example answered" in answer["error"]["message"]


def test_images_delay_no_request_of_text(served, processor, monkeypatch):
    """Requests of text and /health are answered while more images wait than threads exist."""
    script(served.llm, monkeypatch, "seen")
    are_waiting = threading.Semaphore(0)
    may_go_on = threading.Event()

    def slow(image: Any) -> Any:
        are_waiting.release()
        assert may_go_on.wait(60)
        return image

    monkeypatch.setattr(processor, "scaled", slow)
    path = "/v1/chat/completions"
    with ThreadPoolExecutor(9) as pool:
        asked = [pool.submit(served.post, path, chat_of(OPENAI)) for _ in range(9)]
        for _ in range(_IMAGE_THREADS):
            assert are_waiting.acquire(timeout=60)
        assert served.request("GET", "/health")[0] == 200
        assert served.post(path, {"messages": TURNS, "max_tokens": 3})[0] == 200
        assert not are_waiting.acquire(blocking=False)
        may_go_on.set()
    assert [future.result()[0] for future in asked] == [200] * 9


@pytest.mark.parametrize(("path", "fields", "check"), [
    ("responses", {"max_output_tokens": 5}, lambda params: params.max_tokens == 5),
    ("responses", {"ignore_eos": True}, lambda params: params.ignore_eos),
    ("responses", {"tools": [RESPONSES_TOOL], "text": {"format": WANTED},
                   "tool_choice": {"type": "function", "name": "add"}},
     lambda params: "add" in params.structured_outputs.grammar),
    ("messages", {"stop_sequences": ["b"], "top_k": 3},
     lambda params: (params.stop, params.top_k) == (("b",), 3)),
    ("messages", {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}},
     lambda params: "add" in params.structured_outputs.grammar),
    ("messages", {"tools": [ANTHROPIC_TOOL, ANTHROPIC_TOOL | {"name": "sub"}],
                  "tool_choice": {"type": "tool", "name": "add"}},
     lambda params: not re.search("call call|sub", params.structured_outputs.grammar)),
])  # fmt: skip
def test_fields_of_agents_apis_reach_the_model(served, monkeypatch, path, fields, check):
    requests = script(served.llm, monkeypatch, "x")
    body = {"input": "Q"} if path == "responses" else {"messages": TURNS, "max_tokens": 9}
    status, answer = served.post(f"/v1/{path}", body | fields)
    assert status == 200, answer
    assert check(requests[0][1])


def test_ends_of_answers_have_the_names_of_each_api(served, monkeypatch):
    for ending, status, reason, stop in (
        ({"finish_reason": "length"}, "incomplete", "max_tokens", None),
        ({"stop_reason": "END"}, "completed", "stop_sequence", "END"),
        ({"stop_reason": 3}, "completed", "end_turn", None),
    ):
        script(served.llm, monkeypatch, "x", **ending)
        response = served.client.responses.create(model="demo", input="Q")
        assert (response.status, response.output_text) == (status, "x")
        message = served.anthropic.messages.create(model="demo", max_tokens=9, messages=TURNS)
        assert (message.stop_reason, message.stop_sequence) == (reason, stop)


@pytest.mark.usefixtures("reasons")
@pytest.mark.parametrize(("pieces", "items"), [
    (PIECES[:2], [("reasoning", "incomplete")]),
    ((*PIECES[:3], "\n\nSo"), [("reasoning", "completed"), ("message", "incomplete")]),
    (PIECES, [(kind, "completed") for kind in ("reasoning", "message", "function_call")]),
])  # fmt: skip
def test_the_item_that_max_output_tokens_cuts_is_incomplete(served, monkeypatch, pieces, items):
    script(served.llm, monkeypatch, *pieces, finish_reason="length")
    fields: Any = {"model": "demo", "input": "Q", "tools": [RESPONSES_TOOL]}
    whole = served.client.responses.create(**fields)
    events: Any = [*served.client.responses.create(**fields, stream=True)]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert events[-1].type == "response.incomplete"
    assert {whole.status, events[-1].response.status} == {"incomplete"}
    for parts in (whole.output, events[-1].response.output, done):
        assert [(item.type, item.status) for item in parts] == items


def test_errors_in_the_middle_of_a_stream_reach_the_clients(served, monkeypatch):
    from anthropic import APIStatusError  # imports for seconds

    async def failing(*_: Any) -> Any:
        yield 0, Piece("x", [1])
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(served.llm, "astream_all", failing)
    *_, last = served.client.responses.create(model="demo", input="Q", stream=True)
    assert last.type == "response.failed" and "internal" in last.response.error.message
    assert last.response.output[0].status == "incomplete"
    asked = {"model": "demo", "max_tokens": 9, "messages": TURNS, "stream": True}
    with pytest.raises(APIStatusError, match="internal server error"):
        list(served.anthropic.messages.create(**asked))


def test_routes_are_described(served):
    description = json.loads(served.request("GET", "/openapi.json")[2])
    page = served.request("GET", "/docs")[2].decode()
    routes = [route for route in served.app.routes if isinstance(route, APIRoute)]
    paths = {route.path.replace(":path", "") for route in routes if route.include_in_schema}
    assert paths == description["paths"].keys()
    for path, methods in description["paths"].items():
        for operation in methods.values():
            assert operation["description"] in page and path in page
    schemas = description["components"]["schemas"]
    names = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(description))
    assert names and set(names) <= schemas.keys()
    # Neither scripts nor other hosts.
    assert "<script" not in page and "//" not in re.sub(r"https?://[\w.]*example", "", page)
    body = description["paths"]["/v1/messages"]["post"]["requestBody"]["content"]
    assert body["application/json"]["schema"]["required"] == ["messages", "max_tokens"]
    responses = description["paths"]["/v1/completions"]["post"]["responses"]
    assert responses["200"]["content"].keys() == {"application/json", "text/event-stream"}
    assert "4XX" in responses
    assert "4XX" in description["paths"]["/v1/models/{name}"]["get"]["responses"]
    status, headers, _ = served.request("PUT", "/v1/models")
    assert (status, headers["Allow"]) == (405, "GET")
    for path in ("/metrics", "/health"):
        content = description["paths"][path]["get"]["responses"]["200"].get("content", {})
        sent = served.request("GET", path)[1].get("Content-Type")
        assert [sent.split(";")[0]] == [*content] if sent else not content
