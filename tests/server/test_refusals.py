"""Requests that are refused: of all APIs, with a status, a type and a short message."""

import pytest
from support.serving import TURNS

DEEP = b"[" * 90_000 + b"]" * 90_000
LONG = "t" * 50_000
TOO_LONG = "maximum context length is 256 tokens"
TOOLS = [{"type": "function", "function": {"name": "add"}}]
COMPLETIONS = [
    *(([1, 2], "body"), ("text", "body"), (5, "body"), (True, "body"), (b"null", "body")),
    *((b"", "body"), (b"{", "JSON"), ({}, "prompt"), (b"\xff\xfe{}", "")),
    (b'{"prompt": "x", "metadata": ' + DEEP[:9_000] + b"}", ""),
    (b'{"prompt": ' + DEEP + b"}", ""),
    *((f'{{"prompt": "x", "{name}": {value}}}'.encode(), name) for name, value in (
        ("temperature", "NaN"), ("top_p", "Infinity"), ("presence_penalty", "-Infinity"),
        ("logit_bias", '{"5": NaN}'), ("seed", "Infinity"), ("n", "1e300"))),
    *(({"prompt": prompt}, word) for word, prompts in (
        ("needs a text", (5, [1, "x"], [1.5], [[1], "x"], [[1], [True]], {"text": "x"}, [], None,
                          [1.5] * 30_000)),
        ("prompt is empty", ([[]], [[1], []])), ("token id", ([10**9], [-1], [2**70])),
        (TOO_LONG, ("x " * 5000, [1] * 5000)), ("65536 characters", ("x" * 150_000,)),
        ("40 answers", (["x"] * 40,)), ("30000 answers", (["x"] * 30_000,))) for prompt in prompts),
]  # fmt: skip
FIELDS = [
    *(({name: value}, name) for name, value in (
        ("logprobs", 21), ("temperature", -1), ("suffix", "y"), ("best_of", 3), ("max_tokens", 0),
        ("max_tokens", -1), ("max_tokens", "many"), ("stop", ""), ("stop", [""]),
        ("stream", "perhaps"), ("stream_options", {"include_usage": True}),
        ("logit_bias", {f"k{i}": 1 for i in range(1000)}))),
    *(({name: [item] * (limit + 1)}, f"{name}: List should have at most {limit}")
      for name, item, limit in (("stop", "x", 64), ("stop_token_ids", 1, 1024),
                                ("allowed_token_ids", 1, 16384), ("bad_words", "x", 1024))),
    ({"stop": "x" * 1025}, "at most 1024 characters"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "at most 1024 items"),
    ({"n": 5}, "n is 5"), ({"n": 10**30}, "n is"), ({"n": -1}, "n is -1"),
    ({"model": "m" * 500}, "no model"), ({"guided_json": "{"}, "is not JSON"),
    ({"guided_json": {"type": "foo"}}, "Invalid type"), ({"guided_regex": "(a"}, "unclosed"),
    ({"guided_json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "exactly one"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
    ({"response_format": {"type": "json_schema"}}, "schema"),
]  # fmt: skip
BOTH = [
    *(({name: value}, name) for name, value in (
        *(("logit_bias", {token: bias}) for token, bias in
          (("99999999", 1), ("k" * 50_000, 1), ("5", 1e39), ("5", -1e39))),
        ("allowed_token_ids", [10**6]), ("allowed_token_ids", [-1]), ("bad_words", [""]),
        ("bad_words", [" "]), ("repetition_penalty", 1e-300), ("repetition_penalty", 1e300),
        ("guided_decoding_backend", "outlines"), ("use_beam_search", True),
        ("functions", [{"name": "f"}]), ("include_stop_str_in_output", True),
        ("truncate_prompt_tokens", -2), ("truncation_side", "right"), ("prompt_logprobs", 1),
        ("return_token_ids", True), ("length_penalty", 1.5), ("xtc_probability", 0.5))),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
    ({"response_format": {"type": "json_object", "schema": 1}}, "a schema"),
]  # fmt: skip
CHATS = [
    ([TURNS], "body"), ({"messages": [{}] * 4097}, "messages: List should have at most 4096"),
    *(({"messages": messages}, word) for messages, word in (
        ("hello", "messages"), ([1], "messages"), ([], "messages"), ([*TURNS, {}], "role"),
        ([{"role": 1, "content": "x"}], "role"))),
    *(({"messages": [{"role": "user", "content": content}]}, word) for content, word in (
        ([{"type": "image_url"}], "images: needs a model with a vision tower, has type llama"),
        ({"type": "text"}, ""), ({"type": LONG}, ""), ("x" * 150_000, "65536 characters"))),
    *(({"messages": TURNS, **fields}, word) for fields, word in (
        ({"stream_options": {}}, "stream_options"), ({"tools": "all"}, "tools"),
        ({"tools": [{}] * 1025}, "tools: List should have at most 1024"),
        ({"response_format": {"type": "xml"}}, "response_format 'xml'"),
        ({"response_format": {"type": LONG}}, "response_format"), ({"logprobs": 5}, "logprobs"),
        ({"response_format": "json"}, "response_format"), ({"top_logprobs": 2}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_tokens"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": 1}}, "tokenize"),
        *(({"tools": [wrong]}, "tools") for wrong in
          ({}, {"function": {}}, {"function": {"name": 5}})),
        ({"tool_choice": 5}, "tool_choice"), ({"tool_choice": {"type": LONG}}, "tool"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "the name of a tool"),
        ({"tool_choice": {"function": {"name": "sub"}}, "tools": TOOLS}, "the name of a tool"),
        ({"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"}, "exactly one"),
        ({"tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": 5}}]}, "JSON schema"))),
]  # fmt: skip
RESPONSES = [
    ({"previous_response_id": "x"}, "previous_response_id"), ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "web_search"), ({"seed": 2**70}, "seed"),
    ({"metadata": {"key": "x" * 513}}, "metadata"), ({"text": {"format": {"type": "xml"}}}, "xml"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "image"),
    ({"input": []}, "messages"), ({"input": [{}] * 4097}, "input: List should have at most 4096"),
    ({"tool_choice": {"type": "allowed_tools"}}, "allowed_tools"),
]  # fmt: skip
MESSAGES = [
    ({"tools": [{"type": "bash_20250124"}]}, "bash"), ({"tool_choice": {"type": "some"}}, "some"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "blocks"),
    ({"max_tokens": None}, "max_tokens"), ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences: List should have at most 64"),
]  # fmt: skip
CASES = [
    *(("v1/completions", body, word) for body, word in COMPLETIONS),
    *(("v1/completions", {"prompt": "x", **fields}, word) for fields, word in [*FIELDS, *BOTH]),
    *(("v1/chat/completions", body, word) for body, word in CHATS),
    *(("v1/chat/completions", {"messages": TURNS, **fields}, word) for fields, word in BOTH),
    *(("v1/responses", {"input": "Q", **fields}, word) for fields, word in RESPONSES),
    *(("v1/messages", {"messages": TURNS, "max_tokens": 9, **fields}, word)
      for fields, word in MESSAGES),
    *(("detokenize", {"tokens": [5, token]}, "tokens")
      for token in ("5", 5.0, True, None, [5], -1, 2**70)),
    ("tokenize", {"prompt": "x" * 150_000}, "characters"),
    ("tokenize", {"content": "x"}, ""),
    ("v1/completions", {"prompt": "x" * 300_000}, "200000 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "word"), CASES, ids=lambda value: str(value)[:40])
def test_invalid_requests_are_refused(served, path, body, word):
    """In a message that is short, names no flags, and reports the first of many mistakes."""
    n_passes = served.llm.engine.n_passes
    status, answer = served.post(f"/{path}", body)
    error = answer["error"]
    assert status == (413 if "bytes" in word else 404 if word == "no model" else 400), error
    assert answer["type"] == "error" and error["type"] == "invalid_request_error"
    assert word in error["message"] and "--" not in error["message"]
    assert len(error["message"]) < 400
    assert (error["code"] == "context_length_exceeded") == (TOO_LONG in error["message"])
    assert served.llm.engine.n_passes == n_passes
