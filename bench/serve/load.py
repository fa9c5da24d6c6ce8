"""Clients that mix plain answers, grammars, tool calls and disconnects; answers must repeat."""

import http.client
import json
import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]
_SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}, "kind": {"enum": ["file", "folder"]}},
    "required": ["size", "kind"],
    "additionalProperties": False,
}
_PATTERN = "[a-z]{3}-[0-9]{2}"
_TOOL = {"name": "add", "description": "Adds.", "parameters": _SCHEMA}


@dataclass(frozen=True)
class Kind:
    """A request, and the format of its answer: schema, pattern, call, or empty."""

    path: str
    body: Json
    format: str = ""


def _kinds(prompt: str) -> list[Kind]:
    """Return a request of each kind."""
    chat = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 60}
    text = {"prompt": prompt, "temperature": 0, "max_tokens": 12}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}
    tool = {"type": "function", "function": _TOOL}
    response_tool = {"type": "function", **_TOOL}
    message_tool = {"name": "add", "input_schema": _SCHEMA}
    response = {"input": prompt, "temperature": 0, "max_output_tokens": 60}
    return [
        Kind("completions", text),
        Kind("completions", text | {"guided_regex": _PATTERN}, "pattern"),
        Kind("chat/completions", chat | {"response_format": named}, "schema"),
        Kind("chat/completions", chat | {"tools": [tool], "tool_choice": "required",
                                         "parallel_tool_calls": False}, "call"),
        Kind("responses", response | {"tools": [response_tool], "tool_choice":
                                      {"type": "function", "name": "add"}}, "call"),
        Kind("messages", chat | {"tools": [message_tool], "tool_choice":
                                 {"type": "tool", "name": "add"}}, "call"),
    ]  # fmt: skip


@dataclass
class Counts:
    """Results of a load: equal and different answers, refusals of a full queue, disconnects."""

    equal: int = 0
    different: int = 0
    refused: int = 0
    disconnected: int = 0
    failed: int = 0


def load(
    url: str,
    prompts: Sequence[str],
    n_clients: int = 16,
    seconds: float = 0.0,
    disconnecting: float = 0.3,
) -> Counts:
    """Send each request alone, then by concurrent clients, and compare the answers.

    seconds        duration; each client sends at least one request
    disconnecting  share of streams that end after their first event
    Raises AssertionError for an answer outside its format.
    """
    kinds = [kind for prompt in prompts for kind in _kinds(prompt)]
    expected = [_answer(url, kind)[1] for kind in kinds]
    for kind, answer in zip(kinds, expected, strict=True):
        assert _is_valid(kind.format, answer), f"{kind.path}: {answer!r}"
    deadline = time.monotonic() + seconds
    counts = Counts()

    def client(number: int) -> None:
        draw = random.Random(number)
        i = number
        while True:
            kind = kinds[i % len(kinds)]
            if draw.random() < disconnecting:
                _disconnect(url, kind)
                counts.disconnected += 1
            else:
                status, answer = _answer(url, kind)
                counts.refused += status == 429
                counts.failed += status not in (200, 429)
                if status == 200:
                    counts.equal += answer == expected[i % len(kinds)]
                    counts.different += answer != expected[i % len(kinds)]
            i += n_clients + 1
            if time.monotonic() >= deadline:
                return

    with ThreadPoolExecutor(n_clients) as pool:
        list(pool.map(client, range(n_clients)))
    return counts


def _connection(url: str, kind: Kind, **more: Any) -> http.client.HTTPConnection:
    """Send a request; the caller reads the response and closes the connection."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    body = json.dumps(kind.body | more)
    connection.request("POST", f"/v1/{kind.path}", body, {"Content-Type": "application/json"})
    return connection


def _answer(url: str, kind: Kind) -> tuple[int, str]:
    """Return status, and text and calls of the answer."""
    connection = _connection(url, kind)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, "".join(_texts(answer))


def _disconnect(url: str, kind: Kind) -> None:
    connection = _connection(url, kind, stream=True)
    connection.getresponse().readline()
    connection.close()


def _texts(answer: Json) -> list[str]:
    """Return texts and arguments of an answer of any API."""
    texts = []
    for choice in answer.get("choices", ()):
        message = choice.get("message", {"content": choice.get("text")})
        calls = message.get("tool_calls") or ()
        texts += [message["content"] or "", *(call["function"]["arguments"] for call in calls)]
    for item in answer.get("output", ()):
        parts = item.get("content", ())
        texts += [item.get("arguments", ""), *(part["text"] for part in parts)]
    for block in answer.get("content", ()):
        texts.append(block.get("text") or json.dumps(block.get("input", "")))
    return texts


def _is_valid(format: str, answer: str) -> bool:
    if format == "pattern":
        return re.fullmatch(_PATTERN, answer) is not None
    if format in ("schema", "call"):
        fields = json.loads(answer)
        return fields["size"] in (1, 2) and fields["kind"] in ("file", "folder")
    return bool(answer)
