"""Texts around and within tool calls."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Placeholders in the texts of a format: ids, indices, the key of an argument, the function's name,
# its arguments.
ID, INDEX, KEY, NAME = "\0", "\1", "\2", "\3"
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
class CallTexts:
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


def prefix_of(a: str, b: str) -> str:
    """Return the longest common prefix of two texts."""
    n_equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
    return a[:n_equal]
