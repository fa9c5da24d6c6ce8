"""Lark grammars of required tool calls."""

import json
import re
from collections.abc import Iterator, Sequence

from offload_rt.executor.grammar import COMPACT_JSON
from offload_rt.executor.json_schema import adapted
from offload_rt.server.bodies import Json
from offload_rt.server.call_format import CallFormat, Lark, Mark, Pairs

TEXT = r"/(.|\n)*/"
_IDS = {Mark.ID: "/[A-Za-z0-9_-]{1,40}/", Mark.INDEX: "/[0-9]{1,3}/"}


def call_grammar(form: CallFormat, functions: Sequence[Json], lark: Lark, is_single: bool) -> str:
    """Build the grammar of an answer that consists of calls, or of exactly one call."""

    def spell(text: str, name: str = "") -> str:
        parts = re.split("([\0\1])", text.replace(Mark.NAME, name))
        return " ".join(_IDS.get(part) or lark(part) for part in parts if part)

    more = "" if is_single or form.between is None else f" ({spell(form.between)} call)*"
    rules = [f"start: {spell(form.begin)} call{more} {spell(form.end)}"]
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        schema = {**(function.get("parameters") or {}), "type": "object"}
        head = spell(form.opening + form.head + Mark.NAME + form.middle, function["name"])
        tail = spell(form.tail + form.closing, function["name"])
        rules.append(f"call{i}: {head} arguments{i} {tail}")
        rule = [json_rule(f"arguments{i}", schema)]
        rules += _pair_rules(form.pairs, i, schema, lark) if form.pairs else rule
    return "\n".join(rules)


def _pair_rules(pairs: Pairs, i: int, schema: Json, lark: Lark) -> Iterator[str]:
    """Build the rules of arguments in the order of the schema."""
    properties = properties_of(schema)
    separator = lark(pairs.separator) if pairs.separator else ""
    yield f"arguments{i}: first{i}_0"
    for j, (name, value) in enumerate(properties.items()):
        is_optional = name not in (schema.get("required") or ())
        for prefix, start in (("first", ""), ("rest", separator)):
            skip = f" | {prefix}{i}_{j + 1}" if is_optional else ""
            yield f"{prefix}{i}_{j}: {start} pair{i}_{j} rest{i}_{j + 1}{skip}"
        types = type_names(value)
        kind = next((kind for kind in pairs.middles if {kind} == types), "object")
        middle = pairs.middles.get(kind, pairs.middles["integer"])
        closing = pairs.closings.get(kind, pairs.closings["integer"]).replace(Mark.KEY, name)
        yield f"pair{i}_{j}: {lark(pairs.opening + name + middle)} value{i}_{j}"
        yield from _value_rules(f"value{i}_{j}", schema, value, lark(closing) if closing else "")
    yield from (f'{prefix}{i}_{len(properties)}: ""' for prefix in ("first", "rest"))


def _value_rules(name: str, schema: Json, value: object, closing: str) -> list[str]:
    if not isinstance(value, dict):
        value = {}
    if type_names(value) != {"string"}:
        shared: Json = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return [f"{name}: {name}_json {closing}", json_rule(f"{name}_json", {**value, **shared})]
    texts = [value["const"]] if "const" in value else value.get("enum")
    if texts:
        choices = " | ".join(json.dumps(str(text), ensure_ascii=False) for text in texts)
        return [f"{name}: ({choices}) {closing}"]
    return [text_until(name, closing)]


def json_rule(name: str, schema: Json) -> str:
    """Build the Lark rule of a JSON value."""
    return f"{name}: %json {json.dumps({**adapted(schema), 'x-guidance': COMPACT_JSON})}"


def text_until(name: str, closing: str) -> str:
    """Build the Lark rule of a text and its closing tag.

    closing  an expression in Lark; strings before a special token belong to the text
    """
    before, mark, token = closing.partition("<[")
    return f"{name}: {TEXT} {mark}{token}" if mark else f"{name}[suffix={before}]: {TEXT}"


def properties_of(schema: Json) -> Json:
    """Return the schemas of the arguments by name."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def type_names(schema: object) -> set[str]:
    """Return the JSON types of a schema as far as they are evident."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type", [])
    names = {kinds} if isinstance(kinds, str) else {str(kind) for kind in kinds}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not names and values and all(isinstance(value, str) for value in values):
        names = {"string"}
    return names
