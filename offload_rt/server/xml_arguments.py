"""Arguments of tool calls as texts between tags: conversion by schema, and grammar."""

import json
from collections.abc import Callable, Sequence

from offload_rt.server.tool_parser import DECODER, Json, call_rules, json_rule

TEXT = r"/(.|\n)*/"


def typed(text: str, schema: object) -> object:
    """Convert the text of an argument to the type of its schema; texts are not JSON."""
    if _kinds(schema) == {"string"}:
        return text
    try:
        return DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return text


def properties_of(schema: Json) -> Json:
    """Return the schemas of the arguments by name."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def text_until(name: str, closing: str) -> str:
    """Build the Lark rule of a text and its closing tag.

    closing  a special token or a string in Lark
    """
    if closing.startswith('"'):
        return f"{name}[suffix={closing}]: {TEXT}"
    return f"{name}: {TEXT} {closing}"


def xml_calls(
    functions: Sequence[Json],
    head: Callable[[str], str],
    tail: str,
    opening: Callable[[str], str],
    closing: str,
    between: str = "",
) -> list[str]:
    """Build the Lark rules of calls with tagged arguments, in the order of the schema.

    head     expression before the arguments of a function
    tail     expression behind them
    opening  expression before the value of an argument
    closing  special token or string behind a value
    between  expression behind it
    """

    def call(i: int, function: Json, schema: Json) -> list[str]:
        required = schema.get("required") or ()
        uses = []
        rules = []
        for j, (name, value) in enumerate(properties_of(schema).items()):
            argument = f"argument{i}_{j}"
            uses.append(argument if name in required else f"{argument}?")
            rules.append(f"{argument}: {opening(name)} value{i}_{j} {between}")
            rules += _value_rules(f"value{i}_{j}", schema, value, closing)
        return [f"{head(function['name'])} {' '.join(uses)} {tail}", *rules]

    return call_rules(functions, call)


def _value_rules(name: str, schema: Json, value: object, closing: str) -> list[str]:
    """Build the rules of a value and its closing tag."""
    if not isinstance(value, dict):
        value = {}
    if _kinds(value) != {"string"}:
        shared: Json = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return [f"{name}: {name}_json {closing}", json_rule(f"{name}_json", {**value, **shared})]
    texts = [value["const"]] if "const" in value else value.get("enum")
    if texts:
        choices = " | ".join(json.dumps(str(text), ensure_ascii=False) for text in texts)
        return [f"{name}: ({choices}) {closing}"]
    return [text_until(name, closing)]


def _kinds(schema: object) -> set[str]:
    """Return the JSON types of a schema as far as they are evident."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type", [])
    names = {kinds} if isinstance(kinds, str) else {str(kind) for kind in kinds}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not names and values and all(isinstance(value, str) for value in values):
        names = {"string"}
    return names
