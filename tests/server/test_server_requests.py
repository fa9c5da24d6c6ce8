"""Fields of requests and responses: sampling, prompts, log-probabilities, formats and tools."""

import json
import re

import pytest
from support.serving import MODELS, PROMPT, TURNS, alone, running, script
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from offload_rt import Piece, SamplingParams, StructuredOutputs
from offload_rt.cli.run import main
from offload_rt.errors import SettingsError
from offload_rt.server import service
from offload_rt.server.answer import Answer
from offload_rt.server.chat_format import ChatFormat
from offload_rt.server.protocol import ChatRequest, CompletionRequest
from offload_rt.text.detokenize import token_bytes

GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}


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
        (choice,) = served.post("/v1/completions", GREEDY | fields)[1]["choices"]
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
    long = GREEDY | {"prompt": ids * 100, "truncate_prompt_tokens": -1}
    answer = served.post("/v1/completions", long | {"max_tokens": 10**30, "top_k": 10**30})[1]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (255, 256)
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", [PROMPT, "x = '🙂 語' # é\n"])
@pytest.mark.parametrize("special", [True, False])
def test_offsets_of_an_echo_point_into_its_text(served, prompt, special):
    """Text that could begin a stop string follows its tokens later."""
    fields = {"prompt": prompt, "add_special_tokens": special, "echo": True, "logprobs": 0}
    body = GREEDY | fields | {"stop": ["never occurs in this"]}
    (choice,) = served.post("/v1/completions", body)[1]["choices"]
    logprobs = choice["logprobs"]
    offsets = logprobs["text_offset"]
    parts = [part["choices"][0]["logprobs"] for part in served.chunks("/v1/completions", body)]
    assert [offset for part in parts if part for offset in part["text_offset"]] == offsets
    assert len(offsets) == len(logprobs["tokens"]) and offsets == sorted(offsets)
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if token != "<|endoftext|>" and "\ufffd" not in token:
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
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}[assistant]"
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


SCHEMA = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}


@pytest.mark.parametrize(("fields", "outputs"), [
    ({"guided_json": json.dumps(SCHEMA)}, {"json": json.dumps(SCHEMA)}),
    *((fields, {"json": SCHEMA}) for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"guided_json": SCHEMA}, {"json_schema": SCHEMA},
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


def test_arguments_of_calls_and_parallel_calls(served):
    """Empty arguments are an empty object. Without parallel calls the first call remains."""
    texts = ["", "{}", {"a": 1}, '{"a": 1}', "{"]
    calls = [{"function": {"name": "f", "arguments": text}} for text in texts]
    (turn,) = ChatRequest(messages=[{"role": "assistant", "tool_calls": calls}]).turns()
    arguments = [call["function"]["arguments"] for call in turn["tool_calls"]]
    assert arguments == [{}, {}, {"a": 1}, {"a": 1}, "{"]
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 3
    tools = [{"type": "function", "function": {"name": "add"}}]
    for parallel, n in ((False, 1), (True, 3), (None, 3)):
        request = ChatRequest(messages=TURNS, tools=tools, parallel_tool_calls=parallel)
        answer = Answer(request, 1, served.llm.tokenizer)
        answer.start([[1]], ChatFormat.select(served.llm.tokenizer, "hermes", "none"))
        answer.add(0, Piece(text, [1], finish_reason="stop"))
        assert len(answer.choices[0].calls) == n


def test_a_schema_on_the_command_line(tmp_path, capsys):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA | {"additionalProperties": False}))
    line = [str(MODELS / "demo-target"), PROMPT, "--device", "cpu", "--max-model-len", "128"]
    assert main([*line, "--quiet", "--json-schema", str(tmp_path / "schema.json")]) == 0
    assert json.loads(capsys.readouterr().out)["size"] in (1, 2)
    assert main([*line, "--quiet", "--regex", "[a-z]{3}-[0-9]"]) == 0
    assert re.fullmatch("[a-z]{3}-[0-9]\n", capsys.readouterr().out)
    assert main([*line, "--json-schema", str(tmp_path / "missing.json")]) == 2
    assert "--json-schema" in capsys.readouterr().err
