"""JSON schemas in the keywords of llguidance, without properties that the schema does not name."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, starmap
from typing import Any
from urllib.parse import unquote

from offload_rt.errors import SettingsError

Json = dict[str, Any]
# Keywords with schemas by name, with schemas, and with parts of the whole object.
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_PARTS = {"items", "prefixItems", "additionalProperties", "propertyNames"}
_CHOICES = {"anyOf", "oneOf", "allOf"}
# Keywords that combine schemas of one object: closing each part would exclude every object.
_COMBINING = {"allOf", "if", "not", "dependentSchemas", "unevaluatedProperties"}
# llguidance refuses recursive references beside other keywords, even without effect.
_ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "$comment", "discriminator",
}  # fmt: skip
# Formats that llguidance enforces. Others are annotations, as the standard permits.
_FORMATS = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
}  # fmt: skip
_TYPES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string",
    list: "array", dict: "object",
}  # fmt: skip
_MAX_DEPTH = 8  # of compared properties and references
_MAX_COMPARISONS = 20_000  # take 0.1 s


def adapted(schema: Any) -> Any:
    """Rewrite a JSON schema for llguidance.

    Properties without a schema are excluded, as in vLLM and llama.cpp, unless
    `additionalProperties` is set. Otherwise a model could add properties forever.
    Raises SettingsError for `oneOf` with alternatives that may overlap.
    """
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    root = json.loads(json.dumps(schema))
    for node, _ in reversed([*_nodes(root)]):
        _simplify(node, root)
    comparison = _Comparison(root)
    for node, _ in [*_nodes(root)]:
        if choices := [_within(node, part) for part in _list(node.get("oneOf"))]:
            if not all(starmap(comparison.excludes, combinations(choices, 2))):
                need = "alternatives with different types, or different constants of a property"
                raise SettingsError("oneOf", need=need, change="use anyOf")
            choice = {"anyOf": node.pop("oneOf")}
            more = {"allOf": [*_list(node.get("allOf")), choice]}
            node.update(more if "anyOf" in node else choice)
    if not any(node.keys() & _COMBINING for node, _ in _nodes(root)):
        for node, is_whole in _nodes(root):
            is_named = node.keys() & {"properties", "patternProperties"}
            if is_named and is_whole and not node.keys() & {"$ref", *_CHOICES}:
                node.setdefault("additionalProperties", False)
    return root


def _nodes(schema: Any, is_whole: bool = True) -> Iterator[tuple[Json, bool]]:
    """Yield all schemas in a schema, and whether each describes whole values."""
    for node in schema if isinstance(schema, list) else [schema]:
        if not isinstance(node, dict):
            continue
        yield node, is_whole
        for word, value in node.items():
            if word in _MAPS and isinstance(value, dict):
                yield from _nodes([*value.values()], is_whole)
            elif word in _PARTS:
                yield from _nodes(value, is_whole)
            elif word in _CHOICES:
                yield from _nodes(value, is_whole and "properties" not in node)


def _simplify(node: Json, root: Json) -> None:
    """Replace keywords that llguidance lacks, in place."""
    for word in node.keys() & _ANNOTATIONS:
        del node[word]
    if node.get("not") in ({}, True):  # zod's `never`
        node.clear()
        node["enum"] = []
    if node.get("uniqueItems") is False:
        del node["uniqueItems"]
    if isinstance(node.get("format"), str) and node["format"] not in _FORMATS:
        del node["format"]
    parts = _list(node.get("allOf"))
    if len(parts) == 1 and node.keys() == {"allOf"}:
        (part,) = node.pop("allOf")
        node |= part if isinstance(part, dict) else {"allOf": parts}
    names = node.get("propertyNames")
    if isinstance(names, dict) and names.keys() == {"$ref"}:
        names = _target(root, names["$ref"])
    if isinstance(names, dict) and "patternProperties" not in node:
        _name_properties(node, names)


def _name_properties(node: Json, names: Json) -> None:
    """Replace `propertyNames` by `properties` or `patternProperties`, in place."""
    rest = node.get("additionalProperties", True)
    known = _object(node.get("properties"))
    words = names.keys() - _ANNOTATIONS - {"type"}
    texts = [names["const"]] if "const" in names else _list(names.get("enum"))
    if words in ({"enum"}, {"const"}):
        allowed = {name: known.get(name, rest) for name in texts if isinstance(name, str)}
        node |= {"properties": allowed, "additionalProperties": False}
    elif words == {"pattern"} and not known:
        node |= {"patternProperties": {str(names["pattern"]): rest}, "additionalProperties": False}
    elif words or names.get("type", "string") != "string":
        return
    del node["propertyNames"]


def _within(node: Json, part: Any) -> Any:
    """Return an alternative with type and required properties of the whole schema."""
    if not isinstance(part, dict):
        return part
    kept = {"type": node["type"]} if "type" in node else {}
    return {**kept, **part, "required": _list(node.get("required")) + _list(part.get("required"))}


def _target(root: Json, reference: Any) -> Any:
    """Resolve a reference inside a schema; True, the schema of every value, for others."""
    path = str(reference)
    if path != "#" and not path.startswith("#/"):
        return True
    target: Any = root
    for part in unquote(path).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        target = target.get(name, True) if isinstance(target, dict) else True
    return target


@dataclass
class _Comparison:
    _root: Json
    _n_left: int = _MAX_COMPARISONS

    def excludes(self, a: Any, b: Any, depth: int = 0) -> bool:
        """Whether certainly no value satisfies both schemas."""
        self._n_left -= 1
        if depth > _MAX_DEPTH or self._n_left < 0:
            return False
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return a is False or b is False
        return (
            self._excludes_parts(a, b, depth + 1)
            or self._excludes_parts(b, a, depth + 1)
            or self._excludes_values(a, b, depth + 1)
        )

    def _excludes_parts(self, whole: Json, other: Json, depth: int) -> bool:
        """Whether a part that each value satisfies, or every alternative, excludes a schema."""
        parts = _list(whole.get("allOf"))
        parts += [_target(self._root, whole["$ref"])] if "$ref" in whole else []
        choices = [_list(whole.get(word)) for word in ("anyOf", "oneOf")]
        groups = [[part] for part in parts] + [group for group in choices if group]
        return any(all(self.excludes(part, other, depth) for part in group) for group in groups)

    def _excludes_values(self, a: Json, b: Json, depth: int) -> bool:
        values_a, values_b = _values(a), _values(b)
        common = values_a.keys() & values_b.keys()
        for kind in common - {"object"}:
            constants = values_a[kind], values_b[kind]
            if None in constants or constants[0] & constants[1]:
                return False
        return (
            "object" not in common
            or self._excludes_objects(a, b, depth)
            or self._excludes_objects(b, a, depth)
        )

    def _excludes_objects(self, whole: Json, other: Json, depth: int) -> bool:
        """Whether a required property of the first schema excludes objects of the second."""
        rest = True if "patternProperties" in other else other.get("additionalProperties", True)
        given, known = (_object(schema.get("properties")) for schema in (whole, other))
        names = filter(lambda name: isinstance(name, str), _list(whole.get("required")))
        return any(
            self.excludes(given.get(name, True), known.get(name, rest), depth) for name in names
        )


def _list(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list) else []


def _object(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _values(schema: Json) -> dict[str, Any]:
    """Return the JSON types of a schema, each with its constants as text; None for any value."""
    names = schema.get("type", [*_TYPES.values()])
    kinds = {name for name in [names, *_list(names)] if isinstance(name, str)}
    kinds |= {"integer"} if "number" in kinds else set()
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(constants, list):
        return dict.fromkeys(kinds)
    values: dict[str, Any] = {}
    for constant in constants:
        is_whole = isinstance(constant, float) and constant.is_integer()
        kind = _TYPES[int if is_whole else type(constant)]
        if kind in ("array", "object"):
            values[kind] = None
        elif kind in kinds:
            values.setdefault(kind, set()).add(json.dumps(int(constant) if is_whole else constant))
    return values
