"""Incremental parsers of answers, and calls in the format of OpenAI."""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from offload_rt.server.bodies import Json


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


def openai_call(tools: Mapping[str, Json], name: Any, arguments: Any) -> Json | None:
    """Build a call in the format of OpenAI.

    tools      offered tools by name
    arguments  an object, or its JSON text
    Returns None unless an offered tool is called with an object of arguments.
    """
    if isinstance(arguments, str):
        arguments = decoded(arguments)
    is_offered = isinstance(name, str) and name in tools
    if not is_offered or not isinstance(arguments, dict):
        return None
    # Lone surrogates are valid in JSON as escapes only. Mistral's templates require ids of nine
    # letters and digits.
    text = json.dumps(arguments, ensure_ascii=False).encode("utf-8", "backslashreplace")
    function = {"name": name, "arguments": text.decode()}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


def decoded(text: str) -> Any:
    """Convert JSON; None for anything else."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Models write line breaks inside strings, which strict JSON forbids.
DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
