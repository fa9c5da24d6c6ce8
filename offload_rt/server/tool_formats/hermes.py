"""Hermes, Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from offload_rt.server.tool_parser import (
    Json,
    Marker,
    TagParser,
    ToolFormat,
    decode_json,
    json_calls,
)


@dataclass
class HermesParser(TagParser):
    """Parser of JSON between <tool_call> and </tool_call>."""

    opening: ClassVar[str] = "<tool_call>"
    closing: ClassVar[str] = "</tool_call>"

    def _decode_body(self, body: str) -> Json | None:
        try:
            value = decode_json(body)
        except ValueError:
            return None
        if not isinstance(value, dict):
            return None
        return self.call(value.get("name"), value.get("arguments") or {})


def grammar(functions: Sequence[Json], marker: Marker, is_single: bool) -> str:
    """Build the grammar of one call, or of several calls in lines; see `ToolFormat`."""
    opening, closing = marker("<tool_call>"), marker("</tool_call>")

    def head(name: str) -> str:
        start = f'\n{{"name": {json.dumps(name)}, "arguments": '
        return f"{opening} {json.dumps(start)}"

    more = "" if is_single else ' ("\\n" call)*'
    rules = json_calls(functions, head, f'"}}\\n" {closing}')
    return "\n".join([f"start: call{more}", *rules])


FORMAT = ToolFormat(HermesParser, grammar, markers=("<tool_call>",))
