"""Formats of tool calls: texts around and within calls, parsed answers, adapted messages."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

from offload_rt.server.bodies import Json

# Converts a text to a Lark expression of strings and special tokens.
Lark = Callable[[str], str]


class Mark:
    """Placeholders in the texts of a format; KEY is that of an argument, NAME the function's."""

    ID = "\0"
    INDEX = "\1"
    KEY = "\2"
    NAME = "\3"


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
        closing = self.closings[kind].replace(Mark.KEY, key)
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


class Parsed(NamedTuple):
    """New parts of an answer: reasoning, content, and complete tool calls as OpenAI objects."""

    reasoning: str = ""
    text: str = ""
    calls: Sequence[Json] = ()

    @classmethod
    def join(cls, parts: Iterable["Parsed"]) -> "Parsed":
        """Concatenate parts."""
        parts = list(parts)
        reasoning = "".join(part.reasoning for part in parts)
        text = "".join(part.text for part in parts)
        return cls(reasoning, text, [call for part in parts for call in part.calls])


class AnswerParser(ABC):
    """Incremental parser of an answer."""

    @abstractmethod
    def feed(self, text: str, is_last: bool = False) -> Parsed:
        """Append generated text. Returns the parts that are now certain; at last all parts."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return False


@dataclass(frozen=True)
class CallFormat:
    """Format of tool calls: begin (opening call closing) between (...) end.

    A call is head, name, middle, arguments, tail.
    begin         text before the first call and behind the last call (`end`)
    between       text between two calls; None if the template renders a single call
    fields        keys of a call that is a JSON object; None otherwise
    pairs         format of arguments other than JSON
    style         properties of the chat template
    has_channels  whether the parser separates the reasoning
    parser        builds the parser from JSON schemas of tools by name; None: `CallParser`
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
    parser: "Callable[[CallFormat, Mapping[str, Json]], AnswerParser] | None" = None

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
        parts = self.opening + self.head + Mark.NAME + self.middle, self.tail + self.closing
        texts = []
        for i, (name, arguments) in enumerate(calls):
            value = json.dumps(arguments, ensure_ascii=False)
            if self.pairs:
                items = arguments.items() if isinstance(arguments, dict) else ()
                value = self.pairs.separator.join(self.pairs.render(*item) for item in items)
            marks = str.maketrans({Mark.ID: f"call{i:05}", Mark.INDEX: str(i), Mark.NAME: name})
            texts.append(value.join(part.translate(marks) for part in parts))
        return self.begin + (self.between or "").join(texts) + self.end

    def answer_grammar(self, functions: Sequence[Json], lark: Lark, formats: Json) -> str | None:
        """Build the Lark grammar of an answer that may contain calls; None: no constraint."""
        return None

    def around(self, lark: Lark, has_calls: bool) -> str | None:
        """Build the grammar around an answer; None if the reasoning is between tags."""
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
        """Convert ids and arguments of a message, or its calls to text; collects ids in `ids`."""
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
