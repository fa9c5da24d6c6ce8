"""Parse tool calls in generated text: JSON between <tool_call> and </tool_call>."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offload_rt.errors import SettingsError
from offload_rt.executor.grammar import COMPACT_JSON

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"

Json = dict[str, Any]


class Parsed(NamedTuple):
    """Content, and complete tool calls in the format of OpenAI."""

    text: str
    calls: list[Json]


def call_grammar(functions: Sequence[Json], is_single: bool) -> str:
    """Build the Lark grammar of required calls.

    functions  name and parameters of each function, as in OpenAI's `tools`
    is_single  whether the answer is exactly one call
    Raises SettingsError for parameters other than a JSON schema.
    """
    rules = []
    for i, function in enumerate(functions):
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise SettingsError("tools", need="a JSON schema as the parameters of each function")
        schema = {**parameters, "type": "object", "x-guidance": COMPACT_JSON}
        head = f'{_OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": '
        rules.append(
            f"call{i}: {json.dumps(head)} arguments{i} {json.dumps('}' + chr(10) + _CLOSE)}"
        )
        rules.append(f"arguments{i}: %json {json.dumps(schema)}")
    calls = " | ".join(f"call{i}" for i in range(len(functions)))
    more = "" if is_single else ' ("\\n" call)*'
    return "\n".join([f"start: call{more}", f"call: {calls}", *rules])


@dataclass
class ToolParser:
    """Incremental parser of tool calls. Everything except calls of offered tools is content.

    names  names of the offered tools; without names, all text is content
    """

    names: frozenset[str]
    _buffer: str = field(default="", init=False)
    _n_scanned: int = field(default=0, init=False)  # start of the search for a closing tag
    _is_behind_call: bool = field(default=False, init=False)  # drops white space between calls

    def feed(self, text: str) -> Parsed:
        """Append generated text. Returns the content and the calls that are now complete."""
        if not self.names:
            return Parsed(text, [])
        self._buffer += text
        texts: list[str] = []
        calls: list[Json] = []
        while (parsed := self._next()) is not None:
            texts.append(parsed.text)
            calls += parsed.calls
        return Parsed("".join(texts), calls)

    def end(self) -> Parsed:
        """Return the rest. The last call needs no closing tag."""
        rest = self._buffer
        self._buffer = ""
        try:
            call = self._decode(rest.removeprefix(_OPEN)) if rest.startswith(_OPEN) else None
        except _UnterminatedString:
            call = None
        return Parsed(rest, []) if call is None else Parsed("", [call])

    def _next(self) -> Parsed | None:
        """Consume a stretch of content or one call; None if that requires more text."""
        if not self._buffer.startswith(_OPEN):
            return self._next_content()
        while (tag := self._buffer.find(_CLOSE, self._n_scanned)) >= 0:
            self._n_scanned = tag + len(_CLOSE)
            try:
                call = self._decode(self._buffer[len(_OPEN) : tag])
            except _UnterminatedString:  # this closing tag belongs to an argument
                continue
            content = self._buffer[: self._n_scanned] if call is None else ""
            self._buffer = self._buffer[self._n_scanned :]
            self._n_scanned = 0
            self._is_behind_call = call is not None
            return Parsed(content, [] if call is None else [call])
        self._n_scanned = max(self._n_scanned, len(self._buffer) - len(_CLOSE) + 1)
        return None

    def _next_content(self) -> Parsed | None:
        end = self._buffer.find(_OPEN)
        if end < 0:  # keep a possible start of the tag
            lengths = range(len(_OPEN) - 1, 0, -1)
            n_kept = next((n for n in lengths if self._buffer.endswith(_OPEN[:n])), 0)
            end = len(self._buffer) - n_kept
        if end == 0:
            return None
        content = self._buffer[:end]
        self._buffer = self._buffer[end:]
        if self._is_behind_call:
            content = content.lstrip()
            self._is_behind_call = not content
        return Parsed(content, [])

    def _decode(self, body: str) -> Json | None:
        """Convert the JSON of a call. Returns None for anything but a call of an offered tool.

        Raises _UnterminatedString if the JSON ends inside a string.
        """
        body = body.strip()
        try:
            value, end = _DECODER.raw_decode(body)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated string"):
                raise _UnterminatedString from error
            return None
        except (ValueError, RecursionError):
            return None
        if end < len(body) or not isinstance(value, dict):
            return None
        name = value.get("name")
        arguments = _arguments_of(value)
        if not isinstance(name, str) or name not in self.names or arguments is None:
            return None
        function = {"name": name, "arguments": arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _arguments_of(call: Json) -> str | None:
    """Return the arguments as JSON text; None unless they are an object."""
    arguments = call.get("arguments") or {}
    try:
        if isinstance(arguments, str):  # encoded twice
            arguments = _DECODER.decode(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict):
        return None
    # Lone surrogates are valid in JSON as escapes only.
    return json.dumps(arguments, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


class _UnterminatedString(Exception):
    """JSON that ends inside a string."""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Models write line breaks inside strings, which strict JSON forbids.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
