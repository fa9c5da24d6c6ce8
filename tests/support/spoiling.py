"""Damage valid bytes, JSON texts and JSON values in many ways."""

import json
import random
import struct
from typing import Any

# Numbers, texts and containers that stand where they should not.
ODD = (
    None, True, False, 0, -1, 1, 2, 3, 7, 16, 63, 64, 65, 2**24, 2**24 + 1, 2**31, 2**32, 2**53,
    2**62, 2**63, 2**64, -(2**63),
    10**18, 10**400, 10**4299, -0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"),
    float("-inf"), "", "x", "F32",
    "BF16", "a\nb", "\x1b[2J", "\x00", "\ud800", "\u202e", "x" * 100_000, "0", "-1", "1e400",
    [], [[]], [None], [0, 0], [-4, 4], [4, 0],
    [0.0, 4.0], [True, 4], [0, 2**63], [2**62, 2**62], [1] * 1000, {}, {"": ""}, {"factor": 2.0},
    {"rope_type": "linear"},
)  # fmt: skip
# What no encoder writes, put into the text.
RAW = (
    "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "9" * 4000, "9" * 5000, "0" * 50,
    "[" * 2000 + "]" * 2000, "[" * 100_000,
    '{"a":' * 5000, '"\\ud800"', '"\\ud800\\u0041"', '"\\u0000"', "\ufeff{}", "//", "'x'", "01",
    "+1", ".5", "1.", "tru", "}",
    "]", ",", ":", "",
)  # fmt: skip


def spoil_value(value: Any, chance: random.Random) -> Any:
    """A JSON value with one thing in it replaced, removed, doubled or renamed."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return chance.choice(ODD)
    if isinstance(value, list):
        i = chance.randrange(len(value))
        before, after = value[:i], value[i + 1 :]
        inner = spoil_value(value[i], chance)
        return chance.choice(([*before, inner, *after], before + after, value * 2, value[::-1]))
    key = chance.choice(list(value))
    others = {name: field for name, field in value.items() if name != key}
    renamed = {str(chance.choice(ODD)): value[key]}
    inner = {key: spoil_value(value[key], chance)}
    return chance.choice((others, others | renamed, value | renamed, *[value | inner] * 5))


def spoil_text(text: str, chance: random.Random) -> str:
    """Insert invalid text or a duplicate key into JSON text."""
    if chance.random() < 0.2 and text.startswith("{"):
        return f"{text[:-1]}, {text[1:]}"
    marks = [i for i, letter in enumerate(text) if letter in ":,[{"]
    at = chance.choice(marks) + 1 if marks else 0
    end = min([i for i in (text.find(letter, at) for letter in ",]}") if i >= 0], default=len(text))
    return text[:at] + chance.choice(RAW) + text[end if chance.random() < 0.7 else at :]


def spoil_bytes(raw: bytes, chance: random.Random) -> bytes:
    """Bytes cut, lengthened, flipped, repeated or moved, or with another length of a header."""
    at = chance.randrange(len(raw) + 1)
    n = chance.choice((1, 2, 7, 8, 64, 1000))
    length = int.from_bytes(raw[:8], "little")
    lengths = (
        length - 1, length + 1, 0, 1, 2 * length, len(raw), len(raw) - 8, 10**8, 10**18, 2**63,
        2**64 - 1,
    )  # fmt: skip
    return chance.choice((
        raw[:at], raw + bytes(n), raw[:at] + raw[at + n :], bytes(n) + raw,
        raw[:at] + chance.randbytes(n) + raw[at + n :], raw[:at] + raw[at : at + n] + raw[at:],
        *[struct.pack("<Q", chance.choice(lengths) % 2**64) + raw[8:]] * 6,
    ))  # fmt: skip


def spoil_json(value: Any, chance: random.Random) -> bytes:
    """The bytes of a JSON file spoilt as a value, as text or as bytes, or more than once."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        value = spoil_value(value, chance)
    text = json.dumps(value)
    kind = chance.random()
    if kind < 0.2:
        text = spoil_text(text, chance)
    raw = text.encode("utf-8", "surrogatepass")
    return spoil_bytes(raw, chance) if kind > 0.93 else raw
