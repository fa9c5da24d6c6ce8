"""Fields of requests and responses: sampling, prompts, log-probabilities, formats and tools."""

import json
import re
from typing import Any

import pytest
from support.serving import MODELS, PROMPT, TURNS, Served, running, script
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from offload_rt import LLM, Piece, SamplingParams, StructuredOutputs
from offload_rt.cli.run import main
from offload_rt.errors import SettingsError
from offload_rt.server import service
from offload_rt.server.answer import Answer
from offload_rt.server.chat_format import ChatFormat
from offload_rt.server.protocol import ChatRequest, CompletionRequest
from offload_rt.text.detokenize import token_bytes

CONTROL = "<|endoftext|>"
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}


def complete(served: Served, **fields: Any) -> Any:
    status, answer = served.post("/v1/completions", GREEDY | fields)
    assert status == 200, answer
    return answer["choices"][0]


def greedy_under(llm: LLM, params: dict[str, Any], n: int) -> list[int]:
    """Brute force: one token per call, the best token that the rules permit."""
    allowed = params.get("allowed_token_ids")
    prompt = llm.encode(PROMPT)
    answer: list[int] = []
    for _ in range(n):
        one_token = SamplingParams(max_tokens=1, logprobs=-1, ignore_eos=True)
        ((logprobs,),) = (output.logprobs for output in llm.generate(prompt + answer, one_token))
        words = params.get("bad_words_ids", ())
        ends = [word for word in words if answer[len(answer) - len(word) + 1 :] == [*word[:-1]]]
        possible = {*(logprobs if allowed is None else allowed)} - {word[-1] for word in ends}
        answer.append(max(possible, key=lambda token: logprobs[token].logprob))
    return answer


def test_bad_words_and_allowed_tokens_hold_at_every_node_of_a_tree(llm):
    """Greedy decoding with trees equals brute force, token by token."""
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True))[0]
    first = plain.token_ids
    assert plain.stats.n_passes < 12, "trees were accepted"
    ids = range(llm.spec.target.checkpoint.spec.vocab_size)
    for params in (
        {"bad_words_ids": (tuple(first[:1]),)},
        {"bad_words_ids": (tuple(first[2:4]), tuple(first[5:8]))},
        {"allowed_token_ids": tuple(id for id in ids if id % 2)},
        {"allowed_token_ids": tuple(id for id in ids if id not in first[:2]),
         "bad_words_ids": (tuple(first[4:6]), (first[8],))},
    ):  # fmt: skip
        settings = SamplingParams(max_tokens=12, ignore_eos=True, **params)
        assert llm.generate(PROMPT, settings)[0].token_ids == greedy_under(llm, params, 12)


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
    prompts = [PROMPT, "import os\n"]
    body = GREEDY | {"prompt": prompts, "temperature": 0.7, "n": 2, "seed": 5}
    choices = served.post("/v1/completions", body)[1]["choices"]
    params = SamplingParams(8, temperature=0.7, n=2, seed=5)
    answers = [answer for output in llm.generate(prompts, params) for answer in output.outputs]
    expected = [(i, answer.text) for i, answer in enumerate(answers)]
    assert [(choice["index"], choice["text"]) for choice in choices] == expected


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
        expected = served.llm.generate(tokens, SamplingParams(max_tokens=8))[0].text
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        assert answer["choices"][0]["text"] == expected
    long = GREEDY | {"prompt": ids * 100, "max_tokens": 1, "truncate_prompt_tokens": -1}
    assert served.post("/v1/completions", long)[1]["usage"]["prompt_tokens"] == 255


@pytest.mark.parametrize("prompt", [PROMPT, "x = '🙂 語' # é\n"])
@pytest.mark.parametrize("special", [True, False])
def test_offsets_of_an_echo_point_into_its_text(served, prompt, special):
    """Text that could begin a stop string follows its tokens later."""
    fields = {"prompt": prompt, "add_special_tokens": special, "stop": ["never occurs in this"]}
    choice = complete(served, **fields, echo=True, logprobs=0)
    logprobs = choice["logprobs"]
    offsets = logprobs["text_offset"]
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
    tokens = served.llm.encode(prompt, add_special_tokens=False)
    expected = served.llm.generate(tokens, SamplingParams(max_tokens=8))[0].text
    assert answer["choices"][0]["message"]["content"] == expected
    answer = served.post("/v1/messages", body)[1]  # Anthropic's API has no field for this
    assert answer["content"][0]["text"] == expected
    assert served.post("/v1/chat/completions", body | {"continue_final_message": True})[0] == 400


def test_control_tokens_in_messages_are_text(served, monkeypatch):
    template = "{% for m in messages %}<|endoftext|>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(served.llm.tokenizer, "chat_template", template)
    (control,) = served.llm.encode(CONTROL, add_special_tokens=False)
    contents = [f"a {CONTROL} b", f"{CONTROL}{CONTROL}", "plain"]
    turns = [{"role": "user", "content": content} for content in contents]
    status, answer = served.post("/tokenize", {"messages": turns})
    assert status == 200 and answer["tokens"].count(control) == len(turns)
    text = served.llm.tokenizer.decode(answer["tokens"])
    assert text == "".join(CONTROL + content for content in contents)


def test_tools_without_a_template_for_tools(served, monkeypatch):
    """The prompt describes the tools and former calls; the answer is a call or a response."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}]
    body = {"messages": TURNS, "max_tokens": 1, "tools": tools}
    assert served.post("/v1/chat/completions", body)[0] == 200
    for wrong in ([{}], [{"function": {}}], [{"function": {"name": 5}}]):
        status, answer = served.post("/v1/chat/completions", body | {"tools": wrong})
        assert status == 400 and "tools" in answer["error"]["message"]
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
        body |= {"max_tokens": 60, "temperature": 0}
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


def function(name: str, parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    function("open_file", {"properties": {"mode": {"$ref": "#/$defs/mode"}}, "required": ["mode"],
                           "additionalProperties": False, "$defs": {"mode": {"enum": ["r", "w"]}}}),
    function("add", SCHEMA),
]  # fmt: skip


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "parallel", "names"), [
    ("required", False, {"open_file", "add"}),
    ({"type": "function", "function": {"name": "add"}}, None, {"add"}),
    ({"type": "function", "function": {"name": "open_file"}}, None, {"open_file"}),
])  # fmt: skip
def test_required_calls_satisfy_the_schema(served, choice, parallel, names, stream):
    body = {"messages": TURNS, "tools": TOOLS, "tool_choice": choice, "max_tokens": 100}
    body |= {"temperature": 1.0, "seed": 4, "parallel_tool_calls": parallel}
    if stream:
        choices = [chunk["choices"][0] for chunk in served.chunks("/v1/chat/completions", body)]
        parts = [choice["delta"] for choice in choices]
    else:
        choices = served.post("/v1/chat/completions", body)[1]["choices"]
        parts = [choice["message"] for choice in choices]
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert not any(part.get("content") for part in parts)
    (call,) = (call["function"] for part in parts for call in part.get("tool_calls", ()))
    arguments = json.loads(call["arguments"])
    assert call["name"] in names
    if call["name"] == "add":
        assert arguments["size"] in (1, 2) and arguments["kind"] in ("file", "folder")
    else:
        assert arguments["mode"] in ("r", "w")


def test_calls_after_the_first_are_dropped_without_parallel_calls(served):
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 3
    for parallel, n in ((False, 1), (True, 3), (None, 3)):
        request = ChatRequest(messages=TURNS, tools=TOOLS, parallel_tool_calls=parallel)
        answer = Answer(request, 1, served.llm.tokenizer)
        answer.start([[1]], ChatFormat.select(served.llm.tokenizer, "hermes", "none"))
        answer.add(0, Piece(text, [1], finish_reason="stop"))
        assert len(answer.choices[0].calls) == n


def test_a_schema_on_the_command_line(tmp_path, capsys):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    line = ["--model", str(MODELS / "demo-target"), "--device", "cpu", "--prompt", PROMPT]
    line += ["--quiet", "--max-model-len", "128"]
    assert main([*line, "--json-schema", str(tmp_path / "schema.json")]) == 0
    assert json.loads(capsys.readouterr().out)["size"] in (1, 2)
    assert main([*line, "--regex", "[a-z]{3}-[0-9]"]) == 0
    assert re.fullmatch("[a-z]{3}-[0-9]\n", capsys.readouterr().out)
    assert main([*line, "--json-schema", str(tmp_path / "missing.json")]) == 2
    assert "--json-schema" in capsys.readouterr().err
