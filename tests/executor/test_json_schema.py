"""JSON schemas in the keywords of llguidance: random answers satisfy the original schema."""

import json
import random
from contextlib import nullcontext
from enum import Enum
from itertools import combinations
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field, StringConstraints, TypeAdapter

from offload_rt.errors import SettingsError
from offload_rt.executor.grammar import COMPACT_JSON
from offload_rt.executor.json_schema import _Comparison, adapted

BYTES = LLTokenizer("byte")


class Color(Enum):
    RED = "r"
    GREEN = "g"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog", "wolf"]
    tags: list[Color] = Field(max_length=2)


class Cage(BaseModel):
    kind: Literal["cage"]
    inner: "Pet"


Pet = Annotated[Cat | Dog | Cage, Field(discriminator="kind")]
SHORT = Annotated[str, StringConstraints(max_length=3)]
KEY = Annotated[str, StringConstraints(pattern="^a{1,2}$")]
MODELS = (
    Pet, list[Pet] | None, dict[Color, bool], dict[Literal["p", "q"], Literal[1, None]],
    dict[KEY, bool], tuple[bool, SHORT], Annotated[Pet, Field(description="one")],
)  # fmt: skip


def matcher_of(schema: Any) -> LLMatcher:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), COMPACT_JSON)
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def random_answer(schema: Any, rng: random.Random) -> str:
    """Draw each byte among those that the grammar allows; closing characters are likely."""
    matcher = matcher_of(adapted(schema))
    text = bytearray()
    while not matcher.is_stopped():
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
        likely = allowed & {*b'"}]', BYTES.eos_token}
        token = rng.choice(sorted(likely if likely and rng.random() < 0.7 else allowed))
        matcher.consume_token(token)
        if token < 256:
            text.append(token)
        assert len(text) < 5000
    return text.decode()


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_random_answers_validate(model: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    rng = random.Random(0)
    answers = {random_answer(adapter.json_schema(), rng) for _ in range(12)}
    for answer in answers:
        adapter.validate_json(answer)
    assert len(answers) > 1


def accepts(schema: Any, text: str) -> bool:
    return matcher_of(schema).validate_tokens([*text.encode()]) == len(text.encode())


VALUES = [json.dumps(value) for value in (
    None, True, 1, 2, 1.5, "x", "y", [], [1], {}, {"k": 1}, {"k": "x"}, {"j": 1}, {"k": 1, "j": 1},
)]  # fmt: skip
SCHEMAS: tuple[Any, ...] = (
    {"type": "number"}, {"type": "integer"}, {"type": ["string", "null"]}, {"const": 1},
    {"enum": [1.0, "x"]}, {"enum": [2, "y"]}, {"type": "boolean"}, {"type": "array"},
    {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]},
    {"type": "object", "properties": {"k": {"type": "string"}}},
    {"type": "object", "properties": {"j": {}}, "additionalProperties": False},
    {"$ref": "#/$defs/text"}, {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/text"}]},
    {"allOf": [{"type": "string"}, {"minLength": 1}]},
)  # fmt: skip
DEFS = {"$defs": {"text": {"type": "string"}}}
N_EXCLUDING = 68


def test_schemas_exclude_each_other_only_without_common_values() -> None:
    accepted = [
        {value for value in VALUES if accepts({**schema, **DEFS}, value)} for schema in SCHEMAS
    ]
    n_excluding = 0
    for i, j in combinations(range(len(SCHEMAS)), 2):
        comparison = _Comparison(DEFS)
        is_excluded = comparison.excludes(SCHEMAS[i], SCHEMAS[j])
        assert is_excluded == comparison.excludes(SCHEMAS[j], SCHEMAS[i])
        assert not (is_excluded and accepted[i] & accepted[j]), (SCHEMAS[i], SCHEMAS[j])
        n_excluding += is_excluded
    assert n_excluding == N_EXCLUDING


OBJECT = {"type": "object", "oneOf": [
    {"properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}}},
]}  # fmt: skip
NEEDS_A = {"type": "object", "properties": {"a": {}}, "required": ["a"]}


@pytest.mark.parametrize(("schema", "is_refused"), [
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, True),
    ({"oneOf": [{"minLength": 2}, {"maxLength": 4}]}, True),
    (OBJECT, True),
    (OBJECT | {"required": ["k"]}, False),
    ({"oneOf": [NEEDS_A, NEEDS_A | {"required": []}]}, True),
    ({"oneOf": [NEEDS_A, {"type": "object", "properties": {"b": {}}}]}, True),
    ({"oneOf": [NEEDS_A, {"type": "object", "additionalProperties": False}]}, False),
    ({"oneOf": [{"type": "null"}] * 400}, True),
    ({"oneOf": [{"$ref": "#"}, {"$ref": "#/$defs/loop"}], "$defs": {"loop": {"$ref": "#"}}}, True),
    ({"oneOf": [{"type": "null"}], "anyOf": [{"type": ["null", "string"]}]}, False),
])  # fmt: skip
def test_one_of_needs_alternatives_that_exclude_each_other(schema: Any, is_refused: bool) -> None:
    refusal = pytest.raises(SettingsError, match="oneOf: needs alternatives")
    with refusal if is_refused else nullcontext():
        matcher_of(adapted(schema))


@pytest.mark.parametrize(("schema", "expected"), [
    ({"type": "array", "uniqueItems": False}, {"type": "array"}),
    ({"type": "string", "format": "path"}, {"type": "string"}),
    ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
    ({"anyOf": [{"not": {}}, {"type": "null"}]}, {"anyOf": [{"enum": []}, {"type": "null"}]}),
    ({"allOf": [{"type": "string", "format": "path"}], "title": "A"}, {"type": "string"}),
    ({"allOf": [True], "title": "A"}, {"allOf": [True]}),
    ({"propertyNames": {"type": "string"}}, {}),
    ({"propertyNames": {"minLength": 3}}, {"propertyNames": {"minLength": 3}}),
    ({"propertyNames": {"const": "a"}, "properties": {"a": {"type": "null"}, "b": {}}},
     {"properties": {"a": {"type": "null"}}, "additionalProperties": False}),
    (False, {"enum": []}),
    ({"oneOf": 5, "allOf": "x", "required": 7, "properties": [], "type": 3, "propertyNames": 1},
     {"oneOf": 5, "allOf": "x", "required": 7, "properties": [], "type": 3, "propertyNames": 1}),
])  # fmt: skip
def test_keywords_are_rewritten(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert adapted(schema) == expected
    assert json.dumps(schema) == before
