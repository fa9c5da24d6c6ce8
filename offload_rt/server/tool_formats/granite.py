"""Granite 3: <|tool_call|> and a list of Hermes' JSON objects, described in prompts only."""

from dataclasses import replace

from offload_rt.server.tool_formats import hermes

MARKS = ("<|tool_call|>",)
FORMAT = replace(
    hermes.FORMAT,
    begin="<|tool_call|>[",
    opening="",
    closing="",
    between=", ",
    end="]",
    name="granite",
)
