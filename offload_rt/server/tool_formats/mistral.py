"""Mistral: [TOOL_CALLS] and a JSON list of calls, or [TOOL_CALLS]name[ARGS]{...} per call."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from offload_rt.server.tool_parser import (
    Json,
    JsonParser,
    Marker,
    ToolFormat,
    decode_json,
    json_calls,
)

# [CALL_ID] and its value are optional.
_NAMED = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass
class MistralParser(JsonParser):
    """Parser of both forms."""

    opening: ClassVar[str] = "[TOOL_CALLS]"

    def _json_start(self) -> int | None:
        start = len(self.opening)
        rest = self._buffer[start:].lstrip()
        if rest.startswith("["):
            return len(self._buffer) - len(rest)
        match = _NAMED.match(self._buffer, start)
        return None if match is None else match.end()

    def _decode(self, block: str) -> list[Json] | None:
        match = _NAMED.match(block, len(self.opening))
        try:
            value = decode_json(block[match.end() if match else len(self.opening) :].strip())
        except ValueError:
            return None
        if match is not None:
            value = [{"name": match[1], "arguments": value}]
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            return None
        calls = [self.call(entry.get("name"), entry.get("arguments") or {}) for entry in value]
        complete = [call for call in calls if call is not None]
        return complete if complete and len(complete) == len(calls) else None


def grammar(functions: Sequence[Json], marker: Marker, is_single: bool) -> str:
    """Build the grammar of one call, or of several calls; see `ToolFormat`.

    Tokenizers with a token [ARGS] belong to models that use the second form.
    """
    opening = marker("[TOOL_CALLS]")
    arguments = marker("[ARGS]")
    if arguments != json.dumps("[ARGS]"):
        rules = json_calls(functions, lambda name: f"{opening} {json.dumps(name)} {arguments}")
        return "\n".join([f"start: call{'' if is_single else '+'}", *rules])

    def head(name: str) -> str:
        return json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')

    more = "" if is_single else ' (", " call)*'
    rules = json_calls(functions, head, '"}"')
    return "\n".join([f'start: {opening} " [" call{more} "]"', *rules])


FORMAT = ToolFormat(
    MistralParser, grammar, markers=("[TOOL_CALLS]",), template_marks=("[TOOL_CALLS]",)
)
