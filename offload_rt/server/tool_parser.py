"""Interface of formats of tool calls, and rules that their grammars share."""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from offload_rt.errors import SettingsError
from offload_rt.executor.grammar import COMPACT_JSON, closed

Json = dict[str, Any]
# Converts a text to a Lark expression of strings and special tokens.
Lark = Callable[[str], str]
TEXT = r"/(.|\n)*/"


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


class ToolFormat(ABC):
    """A format of tool calls."""

    has_channels = False  # whether the parser separates the reasoning
    name: str

    @property
    @abstractmethod
    def text(self) -> str:
        """All texts that the parser needs, even if they are special tokens."""

    @abstractmethod
    def parser(self, tools: Mapping[str, Json]) -> AnswerParser:
        """Build the parser of an answer from the JSON schemas of the offered tools, by name."""

    @abstractmethod
    def grammar(self, functions: Sequence[Json], lark: Lark, is_single: bool) -> str:
        """Build the Lark grammar of required calls.

        functions  of OpenAI's `tools`
        is_single  whether the answer is exactly one call
        """

    def answer_grammar(self, functions: Sequence[Json], lark: Lark, formats: Json) -> str | None:
        """Build the Lark grammar of an answer that may contain calls; None: no constraint.

        formats  fields of StructuredOutputs
        """
        return None

    def adapt(self, turns: list[Json], tools: list[Json] | None) -> tuple[list[Json], Any]:
        """Convert messages and tools for the chat template."""
        return turns, tools

    def around(self, lark: Lark, has_calls: bool) -> str | None:
        """Build the grammar around an answer; None if the reasoning is between tags.

        has_calls  whether the answer consists of calls
        """
        return None


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


def properties_of(schema: Json) -> Json:
    """Return the schemas of the arguments by name."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def text_until(name: str, closing: str) -> str:
    """Build the Lark rule of a text and its closing tag.

    closing  an expression in Lark; strings before a special token belong to the text
    """
    before, mark, token = closing.partition("<[")
    return f"{name}: {TEXT} {mark}{token}" if mark else f"{name}[suffix={before}]: {TEXT}"


def value_rules(name: str, schema: Json, value: object, closing: str) -> list[str]:
    """Build the rules of a value and its closing tag."""
    if not isinstance(value, dict):
        value = {}
    if type_names(value) != {"string"}:
        shared: Json = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return [f"{name}: {name}_json {closing}", json_rule(f"{name}_json", {**value, **shared})]
    texts = [value["const"]] if "const" in value else value.get("enum")
    if texts:
        choices = " | ".join(json.dumps(str(text), ensure_ascii=False) for text in texts)
        return [f"{name}: ({choices}) {closing}"]
    return [text_until(name, closing)]


def type_names(schema: object) -> set[str]:
    """Return the JSON types of a schema as far as they are evident."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type", [])
    names = {kinds} if isinstance(kinds, str) else {str(kind) for kind in kinds}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not names and values and all(isinstance(value, str) for value in values):
        names = {"string"}
    return names


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Models write line breaks inside strings, which strict JSON forbids.
DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
