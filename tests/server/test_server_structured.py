"""Structured outputs and required tool calls over HTTP."""

import json
import re
from typing import Any

import pytest
from support.serving import MODELS, PROMPT, TURNS

from offload_rt import Piece, SamplingParams, StructuredOutputs
from offload_rt.cli.run import main
from offload_rt.server.answer import Answer
from offload_rt.server.chat_format import ChatFormat
from offload_rt.server.protocol import ChatRequest

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
    *((fields, {"json": SCHEMA}) for fields in (
        {"response_format": JSON_SCHEMA}, {"guided_json": SCHEMA}, {"json_schema": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA, "regex": None}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}})),
    ({"guided_regex": "[a-z]{3}[0-9]{2}"}, {"regex": "[a-z]{3}[0-9]{2}"}),
    ({"structured_outputs": {"regex": "[a-z]{3}"}}, {"regex": "[a-z]{3}"}),
    ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
    ({"guided_grammar": 'start: "a" "b"'}, {"grammar": 'start: "a" "b"'}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"grammar": 'root ::= "a" [0-9]{3}'}, {"grammar": 'root ::= "a" [0-9]{3}'}),
])  # fmt: skip
def test_formats_of_a_request_equal_formats_in_python(served, fields, outputs):
    asked = {"max_tokens": 30, "temperature": 0}
    params = SamplingParams(**asked, structured_outputs=StructuredOutputs(**outputs))
    (expected,) = served.llm.generate(PROMPT, params)
    choice = served.post("/v1/completions", {"prompt": PROMPT, **asked, **fields})[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    chunks = served.chunks("/v1/chat/completions", {"messages": TURNS, **asked, **fields})
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    (rendered,) = served.llm.chat([TURNS], params)
    assert text == rendered.text


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
