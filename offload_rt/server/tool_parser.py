"""Incremental parsers of tool calls in generated text, and parts of their grammars."""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from offload_rt.errors import SettingsError
from offload_rt.executor.grammar import COMPACT_JSON, closed
from offload_rt.text.reasoning import n_overlap

Json = dict[str, Any]
# Converts the text of a marker to a Lark expression: a special token, or a string.
Marker = Callable[[str], str]


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
    def feed(self, text: str) -> Parsed:
        """Append generated text. Returns the parts that are now certain."""

    @abstractmethod
    def end(self) -> Parsed:
        """Return the rest."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return False


def openai_call(tools: Mapping[str, Json], name: Any, arguments: Any) -> Json | None:
    """Build a call in the format of OpenAI.

    tools  offered tools by name
    Returns None unless an offered tool is called with an object of arguments.
    """
    try:
        if isinstance(arguments, str):  # encoded twice
            arguments = DECODER.decode(arguments)
    except (ValueError, RecursionError):
        return None
    is_offered = isinstance(name, str) and name in tools
    if not is_offered or not isinstance(arguments, dict):
        return None
    # Lone surrogates are valid in JSON as escapes only. Mistral's templates require ids of nine
    # letters and digits.
    text = json.dumps(arguments, ensure_ascii=False).encode("utf-8", "backslashreplace")
    function = {"name": name, "arguments": text.decode()}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


class Unterminated(Exception):
    """A block of text that continues behind this closing tag."""


@dataclass
class ToolParser(AnswerParser):
    """Parser of calls in blocks. Everything except calls of offered tools is content.

    tools    JSON schemas of the parameters, by name of the offered tools; without tools, all text
             is content
    opening  start of a block
    """

    tools: Mapping[str, Json]
    opening: ClassVar[str]
    _buffer: str = field(default="", init=False)
    _is_behind_call: bool = field(default=False, init=False)  # drops white space between calls

    @abstractmethod
    def _find_end(self) -> int | None:
        """Return the length of the block at the start of the buffer; None if it is incomplete."""

    @abstractmethod
    def _decode(self, block: str) -> list[Json] | None:
        """Convert a block, with its tags, to calls; None for anything but calls of offered tools.

        Raises Unterminated if the text of an argument contains the closing tag.
        """

    def feed(self, text: str) -> Parsed:
        """Append generated text. Returns the content and the calls that are now complete."""
        if not self.tools:
            return Parsed(text=text)
        self._buffer += text
        return Parsed.join(iter(self._next, None))

    def end(self) -> Parsed:
        """Return the rest. The last call needs no closing tag."""
        rest = self._buffer
        self._buffer = ""
        try:
            calls = self._decode(rest) if rest.startswith(self.opening) else None
        except Unterminated:
            calls = None
        return Parsed(text=rest) if calls is None else Parsed(calls=calls)

    def _next(self) -> Parsed | None:
        """Consume a stretch of content or one block; None if that requires more text."""
        if not self._buffer.startswith(self.opening):
            return self._next_content()
        end = self._find_end()
        if end is None:
            return None
        block = self._buffer[:end]
        try:
            calls = self._decode(block)
        except Unterminated:
            return Parsed()  # `_find_end` continues behind this end
        self._buffer = self._buffer[end:]
        self._restart()
        self._is_behind_call = calls is not None
        return Parsed(text=block) if calls is None else Parsed(calls=calls)

    def _restart(self) -> None:
        """Prepare `_find_end` for the next block."""

    def _next_content(self) -> Parsed | None:
        end = self._buffer.find(self.opening)
        if end < 0:  # keep a possible start of the tag
            end = len(self._buffer) - n_overlap(self._buffer, self.opening)
        if end == 0:
            return None
        content = self._buffer[:end]
        self._buffer = self._buffer[end:]
        if self._is_behind_call:
            content = content.lstrip()
            self._is_behind_call = not content
        return Parsed(text=content)

    def call(self, name: Any, arguments: Any) -> Json | None:
        """Build a call of an offered tool; see `openai_call`."""
        return openai_call(self.tools, name, arguments)


@dataclass
class TagParser(ToolParser):
    """Parser of calls between two tags."""

    closing: ClassVar[str]
    _n_scanned: int = field(default=0, init=False)  # start of the search for a closing tag

    def _find_end(self) -> int | None:
        tag = self._buffer.find(self.closing, self._n_scanned)
        if tag < 0:
            self._n_scanned = max(self._n_scanned, len(self._buffer) - len(self.closing) + 1)
            return None
        self._n_scanned = tag + len(self.closing)
        return self._n_scanned

    def _restart(self) -> None:
        self._n_scanned = 0

    def _decode(self, block: str) -> list[Json] | None:
        body = block.removeprefix(self.opening).removesuffix(self.closing)
        call = self._decode_body(body.strip())
        return None if call is None else [call]

    @abstractmethod
    def _decode_body(self, body: str) -> Json | None:
        """Convert the text between the tags to a call; see `_decode`."""


@dataclass
class JsonParser(ToolParser):
    """Parser of calls that end with a JSON value."""

    _at: int = field(default=0, init=False)  # end of the scanned text
    _depth: int = field(default=0, init=False)  # open brackets
    _is_string: bool = field(default=False, init=False)

    def _json_start(self) -> int | None:
        """Return the position of the JSON value in the buffer; None if it has not begun."""
        return 0

    def _find_end(self) -> int | None:
        if self._depth == 0:
            start = self._json_start()
            if start is None:
                return None
            self._at = start
        while self._at < len(self._buffer):
            pattern = _STRING if self._is_string else _NO_BRACKET
            if match := pattern.match(self._buffer, self._at):
                self._at = match.end()
            bracket = self._buffer[self._at : self._at + 1]
            if bracket in ("", "\\"):  # the rest of an escape follows
                break
            self._at += 1
            if bracket == '"':
                self._is_string = not self._is_string
            else:
                self._depth += 1 if bracket in "[{" else -1
            if self._depth <= 0:
                return self._at
        return None

    def _restart(self) -> None:
        self._depth = 0


_STRING = re.compile(r'(?:[^"\\]++|\\.)++', re.DOTALL)
_NO_BRACKET = re.compile(r'[^"\[{\]}]++')


def decode_json(text: str) -> Any:
    """Parse JSON. Raises Unterminated inside a string, ValueError for other invalid JSON."""
    try:
        value, end = DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise Unterminated from error
        raise
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if end < len(text):
        raise ValueError("text behind the JSON value")
    return value


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    parser          builds the parser of an answer from the offered tools
    grammar         builds the Lark grammar of required calls from the functions of OpenAI's
                    `tools`, a converter of markers, and whether the answer is exactly one call
    markers         texts that the parser needs, even if they are special tokens
    template_marks  texts of chat templates that use the format; none for the default format
    around          builds the grammar around an answer from a converter of markers and whether the
                    answer consists of calls; the parser then separates the reasoning. None: the
                    reasoning is between tags.
    """

    parser: Callable[[Mapping[str, Json]], AnswerParser]
    grammar: Callable[[Sequence[Json], Marker, bool], str]
    markers: tuple[str, ...] = ()
    template_marks: tuple[str, ...] = ()
    around: Callable[[Marker, bool], str] | None = None


def call_rules(
    functions: Sequence[Json], calls: Callable[[int, Json, Json], Sequence[str]]
) -> list[str]:
    """Build the Lark rules `call`, `call0`, `call1` and so on.

    functions  name and parameters of each function, as in OpenAI's `tools`
    calls      builds the rules of the i-th function and its JSON schema; the first has no name
    Raises SettingsError for parameters other than a JSON schema.
    """
    rules = ["call: " + " | ".join(f"call{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise SettingsError("tools", need="a JSON schema as the parameters of each function")
        schema = {**parameters, "type": "object"}
        first, *others = calls(i, function, schema)
        rules += [f"call{i}: {first}", *others]
    return rules


def json_rule(name: str, schema: Json) -> str:
    """Build the Lark rule of a JSON value."""
    return f"{name}: %json {json.dumps({**closed(schema), 'x-guidance': COMPACT_JSON})}"


def json_calls(functions: Sequence[Json], head: Callable[[str], str], tail: str = "") -> list[str]:
    """Build the Lark rules of calls with arguments in JSON.

    head  expression before the arguments of a function
    tail  expression behind them
    """

    def call(i: int, function: Json, schema: Json) -> list[str]:
        return [
            f"{head(function['name'])} arguments{i} {tail}",
            json_rule(f"arguments{i}", schema),
        ]

    return call_rules(functions, call)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Models write line breaks inside strings, which strict JSON forbids.
DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
