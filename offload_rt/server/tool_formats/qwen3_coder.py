"""Qwen3-Coder: <function=name> with a <parameter=name> block per argument, in <tool_call> tags."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from offload_rt.server.tool_parser import Json, Marker, TagParser, ToolFormat, Unterminated
from offload_rt.server.xml_arguments import properties_of, typed, xml_calls

_FUNCTION_END = "</function>"
_PARAMETER_END = "</parameter>"


@dataclass
class QwenCoderParser(TagParser):
    """Parser of parameters between tags."""

    opening: ClassVar[str] = "<tool_call>"
    closing: ClassVar[str] = "</tool_call>"

    def _decode_body(self, body: str) -> Json | None:
        if not body.startswith("<function="):
            return None
        if not body.endswith(_FUNCTION_END):
            raise Unterminated
        head, *parts = body.removesuffix(_FUNCTION_END).split("<parameter=")
        name = head.removeprefix("<function=").partition(">")[0]
        properties = properties_of(self.tools.get(name, {}))
        arguments = {}
        for part in parts:
            key, _, value = part.rstrip().partition(">")
            if not value.endswith(_PARAMETER_END):
                return None
            text = value.removesuffix(_PARAMETER_END).removeprefix("\n").removesuffix("\n")
            arguments[key] = typed(text, properties.get(key))
        return self.call(name, arguments)


def grammar(functions: Sequence[Json], marker: Marker, is_single: bool) -> str:
    """Build the grammar of one call, or of several calls in lines; see `ToolFormat`."""
    opening, closing = marker("<tool_call>"), marker("</tool_call>")
    rules = xml_calls(
        functions,
        head=lambda name: f"{opening} {json.dumps(f'{chr(10)}<function={name}>{chr(10)}')}",
        tail=f"{json.dumps(_FUNCTION_END + chr(10))} {closing}",
        opening=lambda name: json.dumps(f"<parameter={name}>\n"),
        closing=json.dumps(f"\n{_PARAMETER_END}\n"),
    )
    more = "" if is_single else ' ("\\n" call)*'
    return "\n".join([f"start: call{more}", *rules])


FORMAT = ToolFormat(
    QwenCoderParser, grammar, markers=("<tool_call>",), template_marks=("<function=",)
)
