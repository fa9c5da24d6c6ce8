"""Fields of requests and responses: sampling, prompts, log-probabilities, formats, images."""

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
from PIL import Image
from support.serving import MODELS, PROMPT, SETTINGS, TURNS, Served, alone, running, script
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from offload_rt import Piece, SamplingParams, StructuredOutputs
from offload_rt.cli.run import main
from offload_rt.errors import PromptError, SettingsError
from offload_rt.models.image_prompt import ImagePrompt
from offload_rt.server import app, service
from offload_rt.server.answer import Answer
from offload_rt.server.chat_format import ChatFormat
from offload_rt.server.prompts import _IMAGE_THREADS
from offload_rt.server.protocol import ChatRequest, CompletionRequest
from offload_rt.text.detokenize import token_bytes

CONTROL = "<|endoftext|>"
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}


def complete(served: Served, **fields: Any) -> Any:
    status, answer = served.post("/v1/completions", GREEDY | fields)
    assert status == 200, answer
    return answer["choices"][0]


def test_fields_change_an_answer_as_in_python(served):
    llm = served.llm
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=8))[0]
    first, second = plain.token_ids[:2]
    word = plain.text.split()[0]
    allowed = llm.encode("abc", add_special_tokens=False)
    for fields in (
        {"logit_bias": {first: -100}, "repetition_penalty": 1.3}, {"bad_words": [word]},
        {"allowed_token_ids": allowed}, {"stop": [plain.text[5:8]]}, {"stop_token_ids": [second]},
        {"temperature": 0.7, "seed": 5}, {"temperature": 0.7, "seed": 6},
    ):  # fmt: skip
        choice = complete(served, **fields)
        expected = llm.generate(PROMPT, SamplingParams(**{"max_tokens": 8, **fields}))[0]
        reasons = (expected.finish_reason, expected.stop_reason)
        assert choice["text"] == expected.text != plain.text, fields
        assert (choice["finish_reason"], choice["stop_reason"]) == reasons
        assert word not in choice["text"] or "bad_words" not in fields
        assert {*expected.token_ids} <= {*allowed} or "allowed_token_ids" not in fields
    several = {"temperature": 0.7, "n": 2, "seed": 5}
    prompts = [PROMPT, "import os\n"]
    choices = served.post("/v1/completions", GREEDY | several | {"prompt": prompts})[1]["choices"]
    outputs = llm.generate(prompts, SamplingParams(8, **several))
    expected = [answer.text for output in outputs for answer in output.outputs]
    assert [(choice["index"], choice["text"]) for choice in choices] == [*enumerate(expected)]


def test_empty_arguments_of_a_call_are_an_empty_object():
    texts = ["", "{}", {"a": 1}, '{"a": 1}', "{"]
    calls = [{"function": {"name": "f", "arguments": text}} for text in texts]
    (turn,) = ChatRequest(messages=[{"role": "assistant", "tool_calls": calls}]).turns()
    arguments = [call["function"]["arguments"] for call in turn["tool_calls"]]
    assert arguments == [{}, {}, {"a": 1}, {"a": 1}, "{"]


def test_rules_that_exclude_every_token_are_refused(llm):
    for params in (
        {"allowed_token_ids": [5], "bad_words_ids": [[5]]},
        {"allowed_token_ids": [5, 6], "bad_words_ids": [[7, 5], [6]]},
        {"allowed_token_ids": [5], "min_tokens": 2, "stop_token_ids": [5]},
    ):
        with pytest.raises(SettingsError, match="allowed_token_ids: needs a token"):
            llm.generate(PROMPT, SamplingParams(**params))


def test_prompts_are_truncated_and_have_optional_special_tokens(served):
    ids = served.llm.encode(PROMPT)
    assert served.llm.encode(PROMPT, add_special_tokens=False) == ids[1:]
    for fields, tokens in (
        ({"truncate_prompt_tokens": 4}, ids[-4:]),
        ({"add_special_tokens": True}, ids), ({"add_special_tokens": False}, ids[1:]),
    ):  # fmt: skip
        answer = served.post("/v1/completions", GREEDY | fields)[1]
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        assert answer["choices"][0]["text"] == alone(served.llm, tokens, max_tokens=8)
    long = {
        "prompt": ids * 100,
        "max_tokens": 10**30,
        "top_k": 10**30,
        "truncate_prompt_tokens": -1,
    }
    answer = served.post("/v1/completions", GREEDY | long)[1]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (255, 256)
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", [PROMPT, "x = '🙂 語' # é\n"])
@pytest.mark.parametrize("special", [True, False])
def test_offsets_of_an_echo_point_into_its_text(served, prompt, special):
    """Text that could begin a stop string follows its tokens later."""
    fields = {"prompt": prompt, "add_special_tokens": special, "stop": ["never occurs in this"]}
    choice = complete(served, **fields, echo=True, logprobs=0)
    logprobs = choice["logprobs"]
    offsets = logprobs["text_offset"]
    streamed = served.chunks("/v1/completions", GREEDY | fields | {"echo": True, "logprobs": 0})
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [offset for part in parts if part for offset in part["text_offset"]] == offsets
    assert len(offsets) == len(logprobs["tokens"]) and offsets == sorted(offsets)
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if token != CONTROL and "\ufffd" not in token:
            assert choice["text"][offset:].startswith(token)
    assert offsets[:2] == [0, 0] if special else offsets[0] == 0


def test_offsets_of_an_answer_count_the_space_of_its_first_word():
    """Decoders of SentencePiece drop this space unless a prompt precedes it."""
    tokenizer = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}))
    tokenizer.decoder = decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    answer = Answer(CompletionRequest(prompt="one", logprobs=0), 1, fast)
    answer.start([[0]], ChatFormat.select(fast, "hermes", "none"))
    assert answer.choices[0].locate([1, 2]) == [0, len(" two")]


def test_bytes_of_partial_characters_are_raw(served):
    """Forced to write a smile, the model's tokens hold its bytes in parts."""
    parts = served.llm.encode("🙂", add_special_tokens=False)
    raw = [token_bytes(served.llm.tokenizer, token) for token in parts]
    assert len(parts) > 1 and b"".join(raw) == "🙂".encode()
    body = {"messages": TURNS, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    answer = served.post("/v1/chat/completions", body | {"allowed_token_ids": parts})[1]
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert bytes(entry["bytes"]) in raw and len(entry["top_logprobs"]) == 2


def test_final_message_is_continued(served, monkeypatch):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", template)
    turns = [*TURNS, {"role": "assistant", "content": "import sys\nimport"}]
    body = {"messages": turns, "max_tokens": 8, "temperature": 0}
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    answer = served.post("/v1/chat/completions", body | fields)[1]
    prompt = "[user]import os\n[end][assistant]import sys\nimport"
    expected = alone(served.llm, served.llm.encode(prompt, add_special_tokens=False), max_tokens=8)
    assert answer["choices"][0]["message"]["content"] == expected
    answer = served.post("/v1/messages", body)[1]  # Anthropic's API has no field for this
    assert answer["content"][0]["text"] == expected
    assert served.post("/v1/chat/completions", body | {"continue_final_message": True})[0] == 400


def test_tools_without_a_template_for_tools(served, monkeypatch):
    """The prompt describes the tools and former calls; the answer is a call or a response."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}]
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", template)
    chat_format = ChatFormat.select(served.llm.tokenizer, "auto", "auto")
    called = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    result = {"role": "tool", "tool_call_id": "x", "content": "2"}
    turns = [*TURNS, {"role": "assistant", "tool_calls": [called]}, result]
    with running(served.llm, chat_format=chat_format) as server:
        _, headers, raw = server.request("GET", "/v1/models")
        assert headers["X-Tool-Call-Format"] == "generic"
        assert json.loads(raw)["data"][0]["tool_call_format"] == "generic"
        ids = server.post("/tokenize", {"messages": turns, "tools": tools})[1]["tokens"]
        text = server.post("/detokenize", {"tokens": ids})[1]["prompt"]
        assert text.startswith("[system]Answer in JSON") and '{"name": "add"' in text
        assert '[assistant]{"tool_calls": [{"name": "add", "arguments": {"a": 1}}]}' in text
        assert text.endswith('[user]{"tool": "add", "result": "2"}')
        body = {"messages": TURNS, "tools": tools, "max_tokens": 60, "temperature": 0}
        (choice,) = server.post("/v1/chat/completions", body)[1]["choices"]
        assert choice["message"]["content"] or choice["message"]["tool_calls"]
        assert not (choice["message"]["content"] or "").startswith("{")
        answer = server.post("/v1/chat/completions", body | {"tool_choice": "required"})[1]
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": "{}"}


@pytest.mark.parametrize(("template", "word"), [
    ("{% for t in tools %}{{ t }}{% endfor %}", "tools in the request"),
    ("{{ documents | length }}", "documents in chat_template_kwargs"),
    ("{{ functions.x }}", "functions in chat_template_kwargs"),
    ("{{ messages.x.y }}", "chat template failed"),
    (None, "send the whole text to /v1/completions"),
])  # fmt: skip
def test_failing_templates_name_the_field_of_the_request(served, monkeypatch, template, word):
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", template)
    status, answer = served.post("/v1/chat/completions", {"messages": TURNS})
    message = answer["error"]["message"]
    assert status == 400 and word in message
    assert "chat_template " not in message and "--" not in message


def test_functions_of_firefunction_are_in_the_prompt(served, monkeypatch):
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", "{{ functions }} {{ datetime }}")
    tools = [{"type": "function", "function": {"name": "add"}}]
    status, answer = served.post("/tokenize", {"messages": TURNS, "tools": tools})
    prompt = served.post("/detokenize", {"tokens": answer["tokens"]})[1]["prompt"]
    assert status == 200 and '"name": "add"' in prompt and ":" in prompt.rpartition("]")[2]


def test_grammars_of_open_requests_are_bounded_together(served, monkeypatch):
    body = GREEDY | {"guided_choice": ["yes", "n" * 1000]}
    monkeypatch.setattr(service, "_MAX_GRAMMAR_CHARACTERS", 1500)
    monkeypatch.setattr(served.service, "n_grammar_characters", 1000)
    status, headers, _ = served.asked("/v1/completions", body)
    assert status == 429 and int(headers["Retry-After"]) > 0
    assert served.post("/v1/completions", GREEDY)[0] == 200
    monkeypatch.setattr(served.service, "n_grammar_characters", 0)
    assert served.post("/v1/completions", body)[0] == 200
    assert served.service.n_grammar_characters == 0
    status, answer = served.post("/v1/completions", body | {"guided_choice": ["n" * 2000]})
    assert status == 400 and "at most 1500" in answer["error"]["message"]


SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}, "kind": {"enum": ["file", "folder"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize(("fields", "outputs"), [
    ({"guided_json": json.dumps(SCHEMA)}, {"json": json.dumps(SCHEMA)}),
    *((fields, {"json": SCHEMA}) for fields in (
        {"response_format": JSON_SCHEMA}, {"guided_json": SCHEMA}, {"json_schema": SCHEMA},
        {"structured_outputs": {"json": SCHEMA, "regex": None}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}})),
    ({"guided_regex": "[a-z]{3}[0-9]{2}"}, {"regex": "[a-z]{3}[0-9]{2}"}),
    ({"structured_outputs": {"regex": "[a-z]{3}"}}, {"regex": "[a-z]{3}"}),
    ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
    ({"guided_grammar": 'start: "a" "b"'}, {"grammar": 'start: "a" "b"'}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"grammar": 'root ::= "a" [0-9]{3}'}, {"grammar": 'root ::= "a" [0-9]{3}'}),
])  # fmt: skip
def test_formats_of_a_request_equal_formats_in_python(served, monkeypatch, fields, outputs):
    requests = script(served.llm, monkeypatch, "x")
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": TURNS})):
        assert served.post(f"/v1/{path}", body | fields)[0] == 200
        assert requests.pop()[1].structured_outputs == StructuredOutputs(**outputs)


def test_calls_after_the_first_are_dropped_without_parallel_calls(served):
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 3
    tools = [{"type": "function", "function": {"name": "add"}}]
    for parallel, n in ((False, 1), (True, 3), (None, 3)):
        request = ChatRequest(messages=TURNS, tools=tools, parallel_tool_calls=parallel)
        answer = Answer(request, 1, served.llm.tokenizer)
        answer.start([[1]], ChatFormat.select(served.llm.tokenizer, "hermes", "none"))
        answer.add(0, Piece(text, [1], finish_reason="stop"))
        assert len(answer.choices[0].calls) == n


def test_a_schema_on_the_command_line(tmp_path, capsys):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    line = [str(MODELS / "demo-target"), PROMPT, "--device", "cpu", "--max-model-len", "128"]
    assert main([*line, "--quiet", "--json-schema", str(tmp_path / "schema.json")]) == 0
    assert json.loads(capsys.readouterr().out)["size"] in (1, 2)
    assert main([*line, "--quiet", "--regex", "[a-z]{3}-[0-9]"]) == 0
    assert re.fullmatch("[a-z]{3}-[0-9]\n", capsys.readouterr().out)
    assert main([*line, "--json-schema", str(tmp_path / "missing.json")]) == 2
    assert "--json-schema" in capsys.readouterr().err


# Images


def data_of(*size: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", size, "teal").save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


DATA = data_of(5, 3)
URL = f"data:image/png;base64,{DATA}"
OPENAI = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": DATA}
ANTHROPIC = {"type": "image", "source": SOURCE}
N_TOKENS = 5 + 2  # columns, and the tokens of "x"


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


INPUT = [
    {"type": "input_text", "text": "a"},
    {"type": "input_image", "image_url": URL, "detail": "auto"},
    {"type": "input_text", "text": "b"},
]


@pytest.mark.parametrize(("path", "body"), [
    ("chat/completions", {"messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [text("a"), OPENAI, text("b")]}]}),
    ("responses", {"input": [{"role": "user", "content": INPUT}], "instructions": "S"}),
    ("messages", chat_of(text("a"), ANTHROPIC, text("b")) | {"system": "S"}),
])  # fmt: skip
def test_images_of_all_apis_reach_the_processor_alike(served, processor, monkeypatch, path, body):
    requests = script(served.llm, monkeypatch, "seen")
    status, answer = served.post(f"/v1/{path}", body)
    assert status == 200 and '"seen"' in json.dumps(answer)
    usage = answer["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == N_TOKENS
    if path == "messages":
        assert served.post("/v1/messages/count_tokens", body)[1] == {"input_tokens": N_TOKENS}
    messages, images, options = processor.encode_chat.call_args.args
    parts = [text("a"), {"type": "image"}, text("b")]
    turns = [(turn["role"], turn["content"]) for turn in messages]
    assert turns == [("system", "S"), ("user", parts)]
    assert [(image.size, image.getpixel((0, 0))) for image in images] == [((5, 3), (0, 128, 128))]
    assert options["add_generation_prompt"] is True
    (prompt,) = requests[0][0]
    assert isinstance(prompt, ImagePrompt) and len(prompt) == N_TOKENS


def test_tool_results_contain_images(served, processor, monkeypatch):
    script(served.llm, monkeypatch, "seen")
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("a"), ANTHROPIC]}
    assert served.post("/v1/messages", chat_of(result))[0] == 200
    call = {"type": "function_call_output", "call_id": "1", "output": INPUT[:2]}
    assert served.post("/v1/responses", {"input": [call]})[0] == 200
    for messages, images, _ in (call.args for call in processor.encode_chat.call_args_list):
        assert messages[0]["role"] == "tool" and len(images) == 1
        assert messages[0]["content"] == [text("a"), {"type": "image"}]


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
