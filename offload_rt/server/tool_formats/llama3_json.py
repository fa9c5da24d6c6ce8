"""Llama 3: the answer is {"name": ..., "parameters": {...}}; semicolons separate several calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from offload_rt.server.tool_parser import (
    Json,
    JsonParser,
    Marker,
    Parsed,
    ToolFormat,
    decode_json,
    json_calls,
)


@dataclass
class LlamaParser(JsonParser):
    """Parser of answers that begin with a JSON object. Text behind other text has no calls."""

    opening: ClassVar[str] = "{"
    _is_text: bool = field(default=False, init=False)

    def _next(self) -> Parsed | None:
        return self._next_content() if self._is_text else super()._next()

    def _next_content(self) -> Parsed | None:
        start = self._buffer.lstrip(" \n;" if self._is_behind_call else " \n")
        if self._is_behind_call:
            self._buffer = start
        if not self._is_text and start.startswith(self.opening):
            self._buffer = start
            return Parsed()
        if not (start or (self._is_text and self._buffer)):
            return None
        self._is_text = True
        self._is_behind_call = False
        content = self._buffer
        self._buffer = ""
        return Parsed(text=content)

    def _decode(self, block: str) -> list[Json] | None:
        try:
            value = decode_json(block)
        except ValueError:
            value = None
        call = None
        if isinstance(value, dict):
            arguments = value.get("parameters") or value.get("arguments") or {}
            call = self.call(value.get("name"), arguments)
        self._is_text = call is None
        return None if call is None else [call]


def grammar(functions: Sequence[Json], _: Marker, is_single: bool) -> str:
    """Build the grammar of one call, or of several calls; see `ToolFormat`."""

    def head(name: str) -> str:
        return json.dumps(f'{{"name": {json.dumps(name)}, "parameters": ')

    more = "" if is_single else ' ("; " call)*'
    return "\n".join([f"start: call{more}", *json_calls(functions, head, '"}"')])


FORMAT = ToolFormat(
    LlamaParser,
    grammar,
    template_marks=("<|python_tag|>", "dictionary of argument name and its value"),
)
