"""Hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, described in prompts only."""

from offload_rt.server.call_format import CallFormat, Fields

MARKS = ("<tool_call>",)
FORMAT = CallFormat(
    opening="<tool_call>\n",
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    closing="\n</tool_call>",
    between="\n",
    fields=Fields("name", "arguments"),
    name="hermes",
)
