"""Request bodies: size checks and parsing.

Unknown fields are ignored. Known fields without an implementation are refused.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, Field, ValidationError

from offload_rt.errors import SettingsError

Json = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)
_Item = TypeVar("_Item")
# Without fail_fast, a million wrong items produce a million errors.
FailFastList = Annotated[list[_Item], Field(fail_fast=True)]

_MAX_ITEMS = 4096
_MAX_ENTRIES = {
    "messages": _MAX_ITEMS,
    "tools": 1024,
    "logit_bias": 1024,
    "stop": 64,
    "stop_token_ids": 1024,
    "bad_words": 1024,
    "allowed_token_ids": 1 << 14,
}
# Texts of a list together.
_MAX_CHARACTERS = {"stop": 1 << 16, "bad_words": 1 << 15}
# Fields of OpenAI, vLLM and llama.cpp that would change the output.
_NOT_IMPLEMENTED = (
    "guided_decoding_backend", "guided_whitespace_pattern",
    "use_beam_search", "length_penalty", "prompt_logprobs", "return_token_ids",
    "return_tokens_as_token_ids", "logprob_token_ids", "thinking_token_budget",
    "functions", "function_call", "chat_template", "documents", "prompt_embeds",
    "logits_processors", "include_stop_str_in_output", "audio",
    "typical_p", "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "n_probs",
    "previous_response_id", "conversation", "background", "mcp_servers", "container",
)  # fmt: skip
# Values without effect, which clients send as defaults.
_NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "none")
_NEUTRAL_FACTORS = {"length_penalty": 1, "typical_p": 1}


_AS_ZERO = bytes.maketrans(b"123456789", b"000000000")


class BodyCounts(NamedTuple):
    """Contents of a JSON text, counted without parsing.

    strings              including keys
    containers           lists and objects
    values               separators between values
    fractions            at least the numbers with a fraction or an exponent
    blocks_of_21_digits  in numbers
    escapes              backslashes in strings
    """

    strings: int
    containers: int
    values: int
    fractions: int
    blocks_of_21_digits: int
    escapes: int

    @classmethod
    def of_json(cls, raw: bytes) -> "BodyCounts":
        """Count the contents of a valid JSON text in UTF-8."""
        n_escapes = raw.count(b"\\")
        if n_escapes > _MAX_COUNTS.escapes:
            return cls(0, 0, 0, 0, 0, n_escapes)
        unescaped = raw.replace(rb"\\", b"").replace(rb"\"", b"") if n_escapes else raw
        n_strings = unescaped.count(b'"') // 2
        if n_strings > _MAX_COUNTS.strings:  # splitting would create as many objects
            return cls(n_strings, 0, 0, 0, 0, n_escapes)
        structure = b"".join(unescaped.split(b'"')[::2])
        n_containers = structure.count(b"[") + structure.count(b"{")
        n_fractions = sum(map(structure.count, (b".", b"e", b"E")))
        n_blocks = structure.translate(_AS_ZERO).count(b"0" * 21)
        n_values = structure.count(b",")
        return cls(n_strings, n_containers, n_values, n_fractions, n_blocks, n_escapes)


# The JSON parser holds the interpreter lock, for 0.1 ms per number of 4,300 digits and 50 ns per
# escape. These limits bound it to a few dozen milliseconds.
_MAX_COUNTS = BodyCounts(
    strings=1 << 15,
    containers=1 << 15,
    values=1 << 17,
    fractions=1 << 15,
    blocks_of_21_digits=1 << 12,
    escapes=1 << 19,
)


def read_body(kind: type[Body], raw: bytes, max_prompts: int, max_prompt_tokens: int) -> Body:
    """Parse and validate a request body. Counts are checked before any object is built.

    Raises SettingsError for the first wrong value.
    """
    check_counts("the body", [raw], max_prompt_tokens)
    try:
        body = json.loads(str(raw, "utf-8"))  # bytes may also be UTF-16, with other counts
    except (ValueError, RecursionError) as error:
        raise SettingsError("the body is not valid JSON", have=str(error)[:200]) from error
    if not isinstance(body, dict):
        raise SettingsError("the body", need="a JSON object", have=type(body).__name__)
    _check_entries(body, max_prompts)
    return validate(kind, body)


def check_counts(name: str, texts: Iterable[bytes], max_values: int = 0) -> None:
    """Raise SettingsError if JSON texts contain too much together, before any object is built.

    name        of the texts
    max_values  raises the limit of values
    """
    nothing = BodyCounts(0, 0, 0, 0, 0, 0)
    counts = map(sum, zip(nothing, *map(BodyCounts.of_json, texts), strict=True))
    limits = _MAX_COUNTS._replace(values=max(_MAX_COUNTS.values, max_values))
    for kind, count, limit in zip(BodyCounts._fields, counts, limits, strict=True):
        if count > limit:
            what = kind.replace("_", " ")
            raise SettingsError(f"{count} {what} in {name}", need=f"at most {limit}")


def validate(kind: type[Body], body: Json) -> Body:
    """Build a request from its fields. Raises SettingsError for the first wrong value."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))[:100]
        raise SettingsError(f"{field}: {first['msg'][:200]}") from error


def _check_entries(body: Json, max_prompts: int) -> None:
    """Raises SettingsError for too many entries, and for fields without an implementation."""
    limits = dict(_MAX_ENTRIES)
    for name, limit in (("prompt", max_prompts), ("input", _MAX_ITEMS)):
        value = body.get(name)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            limits[name] = limit
    for name, limit in limits.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise SettingsError(f"{len(value)} entries in {name}", need=f"at most {limit}")
    for name, limit in _MAX_CHARACTERS.items():
        value = body.get(name)
        texts = value if isinstance(value, list | str) else ()
        n = sum(len(text) for text in texts if isinstance(text, str))
        if n > limit:
            raise SettingsError(f"{n} characters in {name}", need=f"at most {limit}")
    for name in _NOT_IMPLEMENTED:
        value = body.get(name)
        if value not in _NEUTRAL and value != _NEUTRAL_FACTORS.get(name):
            raise SettingsError(f"{name} is not implemented", change="leave it out")
