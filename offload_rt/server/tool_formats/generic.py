"""Calls and answers in JSON, for models whose template shows no tools or no calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import regex  # type: ignore[import-untyped]  # matches a part of a pattern

from offload_rt.server.call_format import (
    CallFormat,
    CallParser,
    Fields,
    Steps,
    Style,
    calls_of,
    joined,
)
from offload_rt.server.tool_parser import DECODER, AnswerParser, Json, Lark, Parsed, json_rule

_REPLY = regex.compile(r'\s*\{\s*"response"\s*:\s*(?="|\{|\[|\w|-)')
_TEXT = regex.compile(
    r'(?:[^"\\]++|\\[^u]|\\u[dD][89abAB]\w\w\\u\w{4}|\\u(?![dD][89abAB])\w{4})*+', regex.DOTALL
)
_INSTRUCTIONS = """Answer in JSON. To call tools:
{"tool_calls": [{"name": "the tool", "arguments": {...}}]}
To answer the user:
{"response": "the answer"}
Tools:"""


class GenericParser(CallParser):
    """Parser of calls, or of a response in JSON."""

    def _parse(self) -> Steps:
        match = yield from self._match(_REPLY, 0)
        if match and not match.partial:
            self._buffer = self._buffer[match.end() :]
            yield from self._text() if self._buffer[0] == '"' else self._value()
        yield from super()._parse()

    def _text(self) -> Steps:
        self._buffer = self._buffer[1:]
        while True:
            raw = _TEXT.match(self._buffer)[0]
            self._out.append(Parsed(text=DECODER.decode(f'"{raw}"')))
            self._buffer = self._buffer[len(raw) :]
            if self._buffer.startswith('"') or self._is_ended:
                self._buffer = ""
            yield

    def _value(self) -> Steps:
        _, end = yield from self._json(0)
        self._emit(len(self._buffer) if end is None else end)
        self._buffer = ""


class Generic(CallFormat):
    """Format whose tools, calls and results are texts of the messages."""

    instructions = _INSTRUCTIONS

    def parser(self, tools: Mapping[str, Json]) -> AnswerParser:
        """Build the parser of an answer."""
        return GenericParser(self, tools)

    def answer_grammar(self, functions: Sequence[Json], lark: Lark, formats: Json) -> str | None:
        """Build the Lark grammar of an answer with or without calls."""
        if formats.keys() - {"json", "json_object"}:
            return None  # the client has a format of its own
        calls = self.grammar(functions, lark, False).removeprefix("start:")
        schema = formats.get("json", {"type": "object" if formats else "string"})
        schema = json.loads(schema) if isinstance(schema, str) else schema
        reply = [r'reply: "{\"response\": " value "}"', json_rule("value", schema)]
        return "\n".join(["start: calls | reply", f"calls:{calls}", *reply])

    def adapt(self, turns: list[Json], tools: list[Json] | None) -> tuple[list[Json], Any]:
        """Describe tools, calls and results in texts."""
        if not tools and not any(turn["role"] == "tool" for turn in turns):
            return turns, tools
        plain: list[Json] = []
        names: Json = {}
        for turn in turns:
            calls = calls_of(turn)
            names |= {str(call.get("id")): call["function"].get("name") for call in calls}
            role, content = turn["role"], turn.get("content")
            entry: Json = turn
            if role == "tool":
                result = {"tool": names.get(str(turn.get("tool_call_id"))), "result": content}
                entry = {"role": "user", "content": json.dumps(result, ensure_ascii=False)}
            elif role == "assistant" and tools and not calls:
                reply = json.dumps({"response": content}, ensure_ascii=False)
                entry = {"role": role, "content": reply}
            plain.append(entry)
        return joined(super().adapt(plain, tools)[0]), None


MARKS = ()
FORMAT = Generic(
    begin='{"tool_calls": [',
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    between=", ",
    end="]}",
    fields=Fields("name", "arguments"),
    name="generic",
    style=Style(shows_calls=False, shows_tools=False),
)
