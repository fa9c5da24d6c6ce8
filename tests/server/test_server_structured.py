"""Structured outputs and required tool calls over HTTP."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.serving import PROMPT, TURNS

from offload_rt import SamplingParams, StructuredOutputs
from offload_rt.executor.grammar import GrammarCompiler
from offload_rt.server.call_grammar import call_grammar
from offload_rt.server.tool_formats.hermes import FORMAT
from offload_rt.text.detokenize import token_bytes

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
    ({"response_format": JSON_SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json": SCHEMA}),
    ({"guided_regex": "[a-z]{3}[0-9]{2}"}, {"regex": "[a-z]{3}[0-9]{2}"}),
    ({"structured_outputs": {"regex": "[a-z]{3}"}}, {"regex": "[a-z]{3}"}),
    ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
    ({"guided_grammar": 'start: "a" "b"'}, {"grammar": 'start: "a" "b"'}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"json_schema": SCHEMA}, {"json": SCHEMA}),
    ({"grammar": 'root ::= "a" [0-9]{3}'}, {"grammar": 'root ::= "a" [0-9]{3}'}),
])  # fmt: skip
def test_formats_of_a_request_equal_formats_in_python(served, fields, outputs):
    params = SamplingParams(
        max_tokens=30, temperature=0, structured_outputs=StructuredOutputs(**outputs)
    )
    (expected,) = served.llm.generate(PROMPT, params)
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, **fields}
    choice = served.post("/v1/completions", body)[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    chat = {"messages": TURNS, "max_tokens": 30, "temperature": 0, "stream": True, **fields}
    events = served.asked("/v1/chat/completions", chat)[2].split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    (rendered,) = served.llm.chat([TURNS], params)
    assert text == rendered.text


@pytest.mark.parametrize(("fields", "word"), [
    ({"guided_json": {"type": "foo"}}, "Invalid type"),
    ({"guided_json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable"),
    ({"guided_json": "{"}, "json_schema is not JSON"),
    ({"guided_regex": "(a"}, "unclosed"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "exactly one"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
    ({"response_format": {"type": "json_schema"}}, "schema"),
])  # fmt: skip
def test_an_impossible_format_fails_alone(served, fields, word):
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(served.post, "/v1/completions", {**body, "guided_json": SCHEMA})
        status, answer = served.post("/v1/completions", body | fields)
    assert status == 400 and word in answer["error"]["message"]
    assert json.loads(good.result()[1]["choices"][0]["text"])["size"] in (1, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "parallel", "names"), [
    ("required", False, {"open_file", "add"}),
    ({"type": "function", "function": {"name": "add"}}, None, {"add"}),
    ({"type": "function", "function": {"name": "open_file"}}, None, {"open_file"}),
])  # fmt: skip
def test_required_calls_satisfy_the_schema(served, choice, parallel, names, stream):
    body = {"messages": TURNS, "tools": TOOLS, "tool_choice": choice, "max_tokens": 100}
    body |= {"temperature": 1.0, "seed": 4, "parallel_tool_calls": parallel, "stream": stream}
    if stream:
        events = served.asked("/v1/chat/completions", body)[2].split("\n\n")
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert not any(delta.get("content") for delta in deltas)
    else:
        (answer,) = served.post("/v1/chat/completions", body)[1]["choices"]
        assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
        calls = answer["message"]["tool_calls"]
    ((name, arguments),) = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
    ]
    assert name in names
    if name == "add":
        assert arguments["size"] in (1, 2) and arguments["kind"] in ("file", "folder")
    else:
        assert arguments["mode"] in ("r", "w")


def test_several_required_calls_are_parsed(served):
    """The grammar accepts the text, and the parser reads it as the calls of the text."""
    text = "\n".join(
        f'<tool_call>\n{{"name": "open_file", "arguments": {{"mode": "{mode}"}}}}\n</tool_call>'
        for mode in "rw"
    )
    parts = [token_bytes(served.llm.tokenizer, token) or b"\0" for token in range(4096)]
    compiler = GrammarCompiler(served.llm.tokenizer, 4096, {0})
    for is_single in (False, True):
        functions = [tool["function"] for tool in TOOLS]
        lark = call_grammar(FORMAT, functions, json.dumps, is_single)
        position = compiler.compile(StructuredOutputs(grammar=lark))
        rest = text.encode()
        while rest:
            masks = position.masks_after([()]).numpy().view("uint8")
            allowed = np.flatnonzero(np.unpackbits(masks, bitorder="little")).tolist()
            matching = [token for token in allowed if rest.startswith(parts[token])]
            if not matching:
                break
            longest = max(matching, key=lambda token: len(parts[token]))
            position.advance(longest)
            rest = rest[len(parts[longest]) :]
        assert rest == (text[text.index("\n<tool_call>", 1) :].encode() if is_single else b"")
    compiler.close()
    calls = FORMAT.parser({"open_file": {}}).feed(text).calls
    assert [json.loads(call["function"]["arguments"])["mode"] for call in calls] == ["r", "w"]


@pytest.mark.parametrize(("fields", "word"), [
    ({"tool_choice": "required"}, "needs tools"),
    ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "the name of a tool"),
    ({"tool_choice": {"function": {"name": "sub"}}, "tools": TOOLS}, "the name of a tool"),
    ({"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"}, "exactly one"),
    ({"tool_choice": "required", "tools": [function("f", 5)]}, "JSON schema"),
])  # fmt: skip
def test_an_impossible_tool_choice_is_refused(served, fields, word):
    status, answer = served.post("/v1/chat/completions", {"messages": TURNS, **fields})
    assert status == 400 and word in answer["error"]["message"]


def test_calls_after_the_first_are_dropped_without_parallel_calls(served):
    from offload_rt.llm import Piece
    from offload_rt.server.answer import Answer
    from offload_rt.server.chat_format import ChatFormat
    from offload_rt.server.protocol import ChatRequest

    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 3
    for parallel, n in ((False, 1), (True, 3), (None, 3)):
        request = ChatRequest(messages=TURNS, tools=TOOLS, parallel_tool_calls=parallel)
        answer = Answer(request, 1, served.llm.tokenizer)
        answer.start([[1]], ChatFormat.select(served.llm.tokenizer, "hermes", "none"))
        answer.add(0, Piece(text, [1], finish_reason="stop"))
        assert len(answer.choices[0].calls) == n


def test_a_schema_on_the_command_line(tmp_path, capsys):
    from support.serving import MODELS

    from offload_rt.cli.run import main

    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    line = ["--model", str(MODELS / "demo-target"), "--device", "cpu", "--prompt", PROMPT]
    line += ["--quiet", "--max-model-len", "128"]
    assert main([*line, "--json-schema", str(tmp_path / "schema.json")]) == 0
    assert json.loads(capsys.readouterr().out)["size"] in (1, 2)
    assert main([*line, "--regex", "[a-z]{3}-[0-9]"]) == 0
    assert re.fullmatch("[a-z]{3}-[0-9]\n", capsys.readouterr().out)
    assert main([*line, "--json-schema", str(tmp_path / "missing.json")]) == 2
    assert "--json-schema" in capsys.readouterr().err
