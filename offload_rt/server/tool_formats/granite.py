"""Granite 3: <|tool_call|> and a JSON list, which the template describes but does not render."""

from offload_rt.server.call_format import CallFormat
from offload_rt.server.call_texts import Fields

MARKS = ("<|tool_call|>",)
FORMAT = CallFormat(
    begin="<|tool_call|>[",
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    between=", ",
    end="]",
    fields=Fields("name", "arguments"),
    name="granite",
)
