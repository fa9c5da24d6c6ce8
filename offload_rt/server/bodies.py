"""Request bodies: size checks and parsing.

Unknown fields are ignored. Known fields without an implementation are refused.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from offload_rt.errors import SettingsError

Json = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)
_Item = TypeVar("_Item")
# Without fail_fast, a million wrong items produce a million errors.
ShortList = Annotated[list[_Item], Field(fail_fast=True, max_length=1024)]
LongList = Annotated[list[_Item], Field(fail_fast=True, max_length=1 << 14)]
Messages = Annotated[list[Json], Field(fail_fast=True, max_length=4096)]

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
# The JSON parser holds the interpreter lock, for 0.1 ms per number of 4,300 digits and 50 ns per
# escape. These limits bound it to a few dozen milliseconds.
_MAX_COUNTS = {
    "escapes": 1 << 19,
    "strings": 1 << 15,
    "containers": 1 << 15,
    "values": 1 << 17,
    "fractions": 1 << 15,
    "blocks of 21 digits": 1 << 12,
}
_AS_ZERO = bytes.maketrans(b"123456789", b"000000000")


def counts_of(raw: bytes) -> Counter[str]:
    """Count the contents of a valid JSON text in UTF-8 without parsing, up to a limit.

    Keys count as strings, separators as values, an exponent as a fraction.
    """
    counts = Counter(escapes=raw.count(b"\\"))
    if counts["escapes"] > _MAX_COUNTS["escapes"]:
        return counts
    unescaped = raw.replace(rb"\\", b"").replace(rb"\"", b"") if counts["escapes"] else raw
    counts["strings"] = unescaped.count(b'"') // 2
    if counts["strings"] > _MAX_COUNTS["strings"]:  # splitting would create as many objects
        return counts
    structure = b"".join(unescaped.split(b'"')[::2])
    counts["containers"] = structure.count(b"[") + structure.count(b"{")
    counts["values"] = structure.count(b",")
    counts["fractions"] = sum(map(structure.count, (b".", b"e", b"E")))
    counts["blocks of 21 digits"] = structure.translate(_AS_ZERO).count(b"0" * 21)
    return counts


def read_body(kind: type[Body], raw: bytes, max_prompt_tokens: int) -> Body:
    """Parse and validate a request body. Counts are checked before any object is built.

    Raises SettingsError for the first wrong value, and for fields without an implementation.
    """
    check_counts("the body", [raw], max_prompt_tokens)
    try:
        body = json.loads(str(raw, "utf-8"))  # bytes may also be UTF-16, with other counts
    except (ValueError, RecursionError) as error:
        raise SettingsError("the body is not valid JSON", have=str(error)[:200]) from error
    if not isinstance(body, dict):
        raise SettingsError("the body", need="a JSON object", have=type(body).__name__)
    for name in _NOT_IMPLEMENTED:
        value = body.get(name)
        if value not in _NEUTRAL and value != _NEUTRAL_FACTORS.get(name):
            raise SettingsError(f"{name} is not implemented", change="leave it out")
    return validate(kind, body)


def check_counts(name: str, texts: Iterable[bytes], max_values: int = 0) -> None:
    """Raise SettingsError if JSON texts contain too much together, before parsing."""
    counts = sum(map(counts_of, texts), Counter[str]())
    for kind, limit in (_MAX_COUNTS | {"values": max(_MAX_COUNTS["values"], max_values)}).items():
        if counts[kind] > limit:
            raise SettingsError(f"{counts[kind]} {kind} in {name}", need=f"at most {limit}")


def validate(kind: type[Body], body: Json) -> Body:
    """Build a request from its fields. Raises SettingsError for the first wrong value."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))[:100]
        raise SettingsError(f"{field}: {first['msg'][:200]}") from error
