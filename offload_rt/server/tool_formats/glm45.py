"""GLM 4.5 and later: a name and pairs of <arg_key> and <arg_value>, in <tool_call> tags."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from offload_rt.server.tool_parser import Json, Marker, TagParser, ToolFormat, Unterminated
from offload_rt.server.xml_arguments import properties_of, typed, xml_calls

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


@dataclass
class GlmParser(TagParser):
    """Parser of keys and values between tags."""

    opening: ClassVar[str] = "<tool_call>"
    closing: ClassVar[str] = "</tool_call>"

    def _decode_body(self, body: str) -> Json | None:
        head, *parts = body.split(_KEY)
        if parts and not body.endswith(_VALUE_END):
            raise Unterminated
        name = head.strip()
        properties = properties_of(self.tools.get(name, {}))
        arguments = {}
        for part in parts:
            key, _, rest = part.partition(_KEY_END)
            value = rest.strip()
            if not (value.startswith(_VALUE) and value.endswith(_VALUE_END)):
                return None
            text = value.removeprefix(_VALUE).removesuffix(_VALUE_END)
            arguments[key.strip()] = typed(text, properties.get(key.strip()))
        return self.call(name, arguments)


def grammar(functions: Sequence[Json], marker: Marker, is_single: bool) -> str:
    """Build the grammar of one call, or of several calls in lines; see `ToolFormat`.

    Line breaks are optional: later models write none.
    """
    opening, closing = marker("<tool_call>"), marker("</tool_call>")
    line = '"\\n"?'
    rules = xml_calls(
        functions,
        head=lambda name: f"{opening} {json.dumps(name)} {line}",
        tail=closing,
        opening=lambda name: (
            f"{marker(_KEY)} {json.dumps(name)} {marker(_KEY_END)} {line} {marker(_VALUE)}"
        ),
        closing=marker(_VALUE_END),
        between=line,
    )
    more = "" if is_single else ' ("\\n"? call)*'
    return "\n".join([f"start: call{more}", *rules])


FORMAT = ToolFormat(GlmParser, grammar, markers=("<tool_call>", _KEY), template_marks=(_KEY,))
