"""Description of a format of tool calls."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from offload_rt.server.bodies import Json
from offload_rt.server.call_grammar import Lark
from offload_rt.server.call_parser import CallParser
from offload_rt.server.call_texts import CallTexts
from offload_rt.server.tool_parser import AnswerParser


@dataclass(frozen=True)
class CallFormat(CallTexts):
    """Format of the calls of a model: its texts, their parser and grammar."""

    def parser(self, tools: Mapping[str, Json]) -> AnswerParser:
        """Build the parser of an answer from the JSON schemas of the offered tools, by name."""
        return CallParser(self, tools)

    def answer_grammar(self, functions: Sequence[Json], lark: Lark, formats: Json) -> str | None:
        """Build the Lark grammar of an answer that may contain calls; None: no constraint.

        functions  of OpenAI's `tools`
        formats    fields of StructuredOutputs
        """
        return None

    def around(self, lark: Lark, has_calls: bool) -> str | None:
        """Build the grammar around an answer; None if the reasoning is between tags.

        has_calls  whether the answer consists of calls
        """
        return None

    def adapt(self, turns: list[Json], tools: list[Json] | None) -> tuple[list[Json], Any]:
        """Convert messages to what the chat template renders, and describe tools that it omits."""
        ids: dict[str, str] = {}
        adapted = [self._adapted(turn, ids) for turn in turns]
        if not tools or self.style.shows_tools:
            return adapted, tools
        lines = [self.instructions, *(json.dumps(tool.get("function")) for tool in tools)]
        role = "system" if self.style.has_system else "user"
        return joined([{"role": role, "content": "\n".join(lines)}, *adapted]), tools

    def _adapted(self, turn: Json, ids: dict[str, str]) -> Json:
        """Convert ids and arguments of a message, or its calls to text.

        ids  converted ids of the calls so far
        """
        style = self.style
        entry = {**turn}
        calls = [{**call, "function": {**call["function"]}} for call in calls_of(turn)]
        functions = [call["function"] for call in calls]
        if calls and not style.shows_calls:
            given = [(str(f.get("name")), f.get("arguments")) for f in functions]
            text = f"{turn.get('content') or ''}{self.render(given)}"
            return {"role": turn["role"], "content": text}
        for call in calls if style.ids == "named" else ():
            ids[str(call.get("id"))] = f"functions.{call['function'].get('name')}:{len(ids)}"
        for part, key in ((entry, "tool_call_id"), *((call, "id") for call in calls)):
            if style.ids and isinstance(part.get(key), str):
                convert = ids.get if style.ids == "named" else _nine
                part[key] = convert(part[key]) or part[key]
        for function in functions if style.as_text else ():
            function["arguments"] = json.dumps(function.get("arguments"))
        return entry | {"tool_calls": calls} if calls else entry


def calls_of(turn: Json) -> list[Json]:
    """Return the calls of a message; none if any is malformed, so that the template decides."""
    calls = turn.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    is_valid = all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)
    return calls if is_valid else []


def joined(turns: Sequence[Json]) -> list[Json]:
    """Join texts of the same role, because many templates require alternating roles."""
    result: list[Json] = []
    for turn in turns:
        last = result[-1] if result else {}
        texts = [last.get("content"), turn.get("content")]
        is_plain = last.keys() | turn.keys() == {"role", "content"}
        if is_plain and last.get("role") == turn["role"] and all(isinstance(t, str) for t in texts):
            last["content"] = "\n\n".join(map(str, texts))
        else:
            result.append({**turn})
    return result


def _nine(call_id: str) -> str:
    """Convert an id to nine letters and digits."""
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    return sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]
