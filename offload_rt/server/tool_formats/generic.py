"""Calls in JSON, for models whose template has no format of its own."""

from offload_rt.server.call_format import CallFormat, Fields

MARKS = ()
FORMAT = CallFormat(
    begin='{"tool_calls": [',
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    between=", ",
    end="]}",
    fields=Fields("name", "arguments"),
)
