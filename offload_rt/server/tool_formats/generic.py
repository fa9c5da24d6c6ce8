"""Calls and answers in JSON, for models whose template shows no tools or no calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import regex  # type: ignore[import-untyped]  # matches a part of a pattern

from offload_rt.server.bodies import Json
from offload_rt.server.call_format import CallFormat, Fields, Lark, Parsed, Style, calls_of, joined
from offload_rt.server.call_grammar import call_grammar, json_rule
from offload_rt.server.call_parser import CallParser, decoded

_REPLY = regex.compile(r'\s*\{\s*"response"\s*:\s*(?P<quote>"?+)(?=.)', regex.DOTALL)
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

    def __init__(self, form: CallFormat, tools: Mapping[str, Json]) -> None:
        super().__init__(form, tools)
        self._state = "start"
        self._quote = ""  # before the response

    def _next(self) -> Parsed | None:
        if self._state == "start":
            match = _REPLY.match(self._buffer, partial=not self._is_last)
            if match and match.partial:
                return None
            if match:
                self._state, self._quote = "reply", match["quote"]
                self._buffer = self._buffer[match.end() :]
        if self._state == "behind_reply":
            return None
        return self._next_of_reply() if self._state == "reply" else super()._next()

    def _next_of_reply(self) -> Parsed | None:
        if not self._quote:
            text = self._buffer.removesuffix("}") if self._is_last else self._buffer[:-1]
            return self._text(len(text)) if text else None
        raw = _TEXT.match(self._buffer)[0]
        self._buffer = self._buffer[len(raw) :]
        if self._buffer.startswith('"'):
            self._state = "behind_reply"
        return Parsed(text=decoded(f'"{raw}"') or raw) if raw else None


class Generic(CallFormat):
    """Format whose tools, calls and results are texts of the messages."""

    instructions = _INSTRUCTIONS

    def answer_grammar(self, functions: Sequence[Json], lark: Lark, formats: Json) -> str | None:
        if formats.keys() - {"json", "json_object"}:
            return None  # the client has a format of its own
        calls = call_grammar(self, functions, lark, False).removeprefix("start:")
        schema = formats.get("json", {"type": "object" if formats else "string"})
        schema = json.loads(schema) if isinstance(schema, str) else schema
        reply = [r'reply: "{\"response\": " value "}"', json_rule("value", schema)]
        return "\n".join(["start: calls | reply", f"calls:{calls}", *reply])

    def adapt(self, turns: list[Json], tools: list[Json] | None) -> tuple[list[Json], Any]:
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
    parser=GenericParser,
    style=Style(shows_calls=False, shows_tools=False),
)
