"""Description of a format of tool calls."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from offload_rt.server.bodies import Json
from offload_rt.server.call_grammar import ID, INDEX, KEY, NAME, Lark
from offload_rt.server.call_parser import CallParser
from offload_rt.server.tool_parser import AnswerParser

_ARGUMENTS = "\4"


class Fields(NamedTuple):
    """Keys of a call in JSON; both empty if the function's name is the key of the arguments."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Pairs:
    """Arguments as keys and values between texts.

    opening    text before a key
    middles    text between key and value, by JSON type
    closings   text behind a value, by JSON type
    separator  text between two arguments
    item       key of an element of a list, if nested values are pairs too; empty: JSON
    """

    opening: str
    middles: Mapping[str, str]
    closings: Mapping[str, str]
    separator: str
    item: str = ""

    def render(self, key: str, value: Any) -> str:
        """Render an argument."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        kind = "string" if isinstance(value, str) else "integer"
        closing = self.closings[kind].replace(KEY, key)
        return f"{self.opening}{key}{self.middles[kind]}{text}{closing}"

    @property
    def kinds(self) -> dict[str, str]:
        """A type of each text between key and value, longest text first."""
        kinds = {middle: kind for kind, middle in reversed([*self.middles.items()])}
        return dict(sorted(kinds.items(), key=lambda item: -len(item[0])))


class Style(NamedTuple):
    """Properties of a chat template.

    as_text      expects arguments as JSON text
    ids          "nine": requires ids of nine letters and digits; "named": ids contain the function
    shows_calls  renders calls
    shows_tools  renders the offered tools
    has_system   renders system messages
    """

    as_text: bool = False
    ids: str = ""
    shows_calls: bool = True
    shows_tools: bool = True
    has_system: bool = True


@dataclass(frozen=True)
class CallFormat:
    """Texts of an answer with tool calls: begin (opening call closing) between (...) end.

    A call is head, name, middle, arguments, tail.
    begin         text before the first call and behind the last call (`end`)
    between       text between two calls; None if the template renders a single call
    fields        keys of a call that is a JSON object; None otherwise
    pairs         format of arguments other than JSON
    style         properties of the chat template
    has_channels  whether the parser separates the reasoning
    """

    begin: str = ""
    opening: str = ""
    head: str = ""
    middle: str = ""
    tail: str = ""
    closing: str = ""
    between: str | None = None
    end: str = ""
    fields: Fields | None = None
    pairs: Pairs | None = None
    style: Style = field(default_factory=lambda: Style(shows_calls=False))
    name: str = "derived"
    has_channels: bool = False

    @property
    def text(self) -> str:
        """All texts, which may contain special tokens."""
        pairs = self.pairs
        inner = [pairs.opening, *pairs.middles.values(), *pairs.closings.values()] if pairs else []
        outer = [self.begin, self.opening, self.middle, self.closing, self.between or "", self.end]
        return "".join([*outer, *inner])

    @property
    def instructions(self) -> str:
        """Description of calls for the model."""
        example = self.render([("name", {"key": "value"})])
        return f"To call a tool, answer like this:\n{example}\nTools:"

    def render(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Render calls of functions by name, with arguments."""
        call = self.opening + self.head + NAME + self.middle + _ARGUMENTS + self.tail + self.closing
        texts = []
        for i, (name, arguments) in enumerate(calls):
            value = json.dumps(arguments, ensure_ascii=False)
            if self.pairs:
                items = arguments.items() if isinstance(arguments, dict) else ()
                value = self.pairs.separator.join(self.pairs.render(*item) for item in items)
            marks = {ID: f"call{i:05}", INDEX: str(i), NAME: name, _ARGUMENTS: value}
            texts.append("".join(marks.get(part, part) for part in re.split("([\0-\4])", call)))
        return self.begin + (self.between or "").join(texts) + self.end

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
