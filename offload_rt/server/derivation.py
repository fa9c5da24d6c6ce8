"""Derive the format of tool calls from a chat template: render probes and compare them."""

import json
import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

from offload_rt.server.call_format import ID, INDEX, KEY, NAME, CallFormat, Fields, Pairs, Style
from offload_rt.server.tool_parser import Json
from offload_rt.text.reasoning import Tags

# Renders messages and tools, with or without the prompt of an answer.
Render = Callable[[Sequence[Json], Sequence[Json], bool], str]

_USER, _CONTENT, _THOUGHT = "Xuserprobe", "Xcontentprobe", "Xthoughtprobe"
_NAMES = ("probe_alpha", "probe_gamma")
_KEYS = ("key_one", "key_two")
_IDS = ("Xq7Zk2Wv9", "Jm4Rt8Bn5")  # Mistral requires nine letters and digits
_LONG_IDS = ("call_Xq7Zk2Wv9", "call_Jm4Rt8Bn5")
_ID = rf"(?:call_)?(?:{'|'.join(_IDS)})"
_VALUES: Json = {
    "string": "Xstring",
    "integer": 7301,
    "number": 7.25,
    "boolean": True,
    "null": None,
    "array": [7302],
    "object": {"inner": 7303},
}
_TURN = {"role": "user", "content": _USER}
_TWO_TEXTS = ("string", "string")
_SCHEMA = {
    "type": "object",
    "properties": {key: {"type": "string", "description": "Probe"} for key in _KEYS},
}
TOOLS = [
    {"type": "function", "function": {"name": n, "description": "Probe", "parameters": _SCHEMA}}
    for n in _NAMES
]
_TAG = re.compile(r"<[^<>]*>|\[/?[A-Z_]+\]")
_OPEN_TAG = re.compile(r"(<[^<>]*|\[/?[A-Z_]+)\Z")
_WHOLE_TAGS = re.compile(r"(.*[>\]\n]|)(.*)", re.DOTALL)
_CLOSED_TAG = re.compile(r"[^<>\[]*>|/?[A-Z_]+\]")


_STYLES = [Style(*style) for style in product((False, True), repeat=2)]


class _Split(NamedTuple):
    """Texts of a rendered call and around it; see `CallFormat`."""

    before: str
    head: str
    middle: str
    tail: str
    after: str
    fields: Fields | None


def derive_calls(render: Render) -> CallFormat | None:
    """Derive the format of calls; None if the template renders no calls, or not recognisably.

    Raises any error of the template.
    """
    plain = _answer(render, {"content": _CONTENT})
    before, _, prompt = render([_TURN], TOOLS, True).rpartition(_USER)
    errors: list[Exception] = []
    for own in _STYLES:
        style = own._replace(shows_tools=_NAMES[0] in before + prompt)
        try:
            single = _calls(render, style, _TWO_TEXTS)
        except Exception as error:  # templates are programs and raise any class
            errors.append(error)
            continue
        if _NAMES[0] in single:
            break
    else:
        if errors:
            raise errors[0]
        return None
    try:
        text = _calls(render, style, _TWO_TEXTS, _TWO_TEXTS)
    except Exception:  # templates for one call
        text = single
    shared = _WHOLE_TAGS.sub(r"\1", _common_prefix(text, plain))
    n_shared = max(len(shared), len(_before_open_tag(_common_prefix(text, prompt))))
    text, single = text[n_shared:], single[n_shared:]
    pairs = None
    if (first := _split_json(single, _NAMES[0])) is None:
        pairs = _derive_pairs(render, style, single)
        if pairs is None:
            return None

    def split(text: str, name: str) -> _Split | None:
        return _split_pairs(text, name, pairs) if pairs else _split_json(text, name)

    end = plain.partition(_CONTENT)[2]
    first = split(text, _NAMES[0])
    if first is None:
        return None
    second = split(first.after, _NAMES[1])
    if second is None:
        before, head, middle, tail, after = (re.sub(_ID, ID, part) for part in first[:5])
        closing = _until_end(after, end)
        return CallFormat(
            "", before, head, middle, tail, closing, None, "", first.fields, pairs, style
        )
    first, second = _with_ids(first, second)
    before, head, middle, tail, _, fields = first
    gap = second.before
    after = _until_end(second.after, end)
    opening = _behind_closed_tag(_common_suffix(before, gap))
    closing = _before_open_tag(_common_prefix(gap, after))[: len(gap) - len(opening)]
    begin = before[: len(before) - len(opening)]
    between = gap[len(closing) : len(gap) - len(opening)]
    ending = _limited(after[len(closing) :], len(_TAG.findall(begin)))
    ending = ending if begin.strip() else ""
    return CallFormat(
        begin, opening, head, middle, tail, closing, between, ending, fields, pairs, style
    )


def _with_ids(first: _Split, second: _Split) -> tuple[_Split, _Split]:
    """Replace ids and indices of the calls by placeholders."""
    marks = [(_ID, _ID, ID)]
    marks += [(rf"(?<!\w){k}(?!\w)", rf"(?<!\w){k + 1}(?!\w)", INDEX) for k in (0, 1)]
    for own, other, mark in marks:
        patterns = (own, other)
        splits = (first, second)
        if all(
            re.search(pattern, "".join(split[:4]))
            for pattern, split in zip(patterns, splits, strict=True)
        ):
            first, second = (
                split._replace(
                    before=re.sub(pattern, mark, split.before),
                    head=re.sub(pattern, mark, split.head),
                    middle=re.sub(pattern, mark, split.middle),
                    tail=re.sub(pattern, mark, split.tail),
                )
                for pattern, split in zip(patterns, splits, strict=True)
            )
    return first, second


def _limited(text: str, n_tags: int) -> str:
    """Cut a text behind some tags."""
    ends = [match.end() for match in _TAG.finditer(text)]
    return text[: ends[n_tags - 1]] if 0 < n_tags < len(ends) else text


def shows_system(render: Render) -> bool:
    """Whether a template renders system messages. Raises any error of the template."""
    return _CONTENT in render([{"role": "system", "content": _CONTENT}, _TURN], [], True)


def derive_tags(render: Render) -> Tags | None:
    """Derive the texts around the reasoning; None for a template that renders no reasoning."""
    keys = ("reasoning_content", "thinking", "reasoning")
    message = {"content": _CONTENT} | dict.fromkeys(keys, _THOUGHT)
    before, thought, after = _answer(render, message).partition(_THOUGHT)
    opening = re.search(r"(<[^<>]*>|\[[A-Z_]+\])\s*\Z", before)
    closing = re.match(r"\s*(<[^<>]*>|\[/[A-Z_]+\])", after.partition(_CONTENT)[0])
    if not (thought and opening and closing):
        return None
    tags = Tags(opening[1], closing[1])
    # Tags of other texts, such as <|message|>, do not separate reasoning.
    empty = re.compile(rf"{re.escape(tags.opening)}\s*{re.escape(tags.closing)}")
    plain = empty.sub("", _answer(render, {"content": _CONTENT}))
    return None if tags.opening in plain else tags


def _answer(render: Render, message: Json) -> str:
    """Render the answer to a user's turn."""
    return render([_TURN, {"role": "assistant", **message}], TOOLS, False).rpartition(_USER)[2]


def _calls(render: Render, style: Style, *kinds: Sequence[str]) -> str:
    """Render an answer with calls.

    kinds  types of the arguments of each call
    """
    calls = []
    for name, call_id, types in zip(
        _NAMES, _IDS if style.has_nine else _LONG_IDS, kinds, strict=False
    ):
        arguments: Any = {key: _VALUES[kind] for key, kind in zip(_KEYS, types, strict=False)}
        arguments = json.dumps(arguments) if style.as_text else arguments
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})
    return _answer(render, {"content": "", "tool_calls": calls})


def _split_json(text: str, name: str) -> _Split | None:
    """Split a text at a call with arguments in JSON; None without such a call."""
    decoder = json.JSONDecoder()
    for brace in re.finditer("{", text):
        i = brace.start()
        try:
            value, j = decoder.raw_decode(text, i)
        except ValueError:
            continue
        if {*value} == {*_KEYS} and name in text[:i]:
            at = text.rindex(name, 0, i)
            before = text[:at].replace(name, NAME)
            return _Split(before, "", text[at + len(name) : i], "", text[j:], None)
        fields = _fields(value, name)
        if fields is None:
            continue
        head, _, rest = text[i:j].partition(f'"{name}"')
        at = rest.index("{")
        tail = rest[at + decoder.raw_decode(rest[at:])[1] :]
        return _Split(text[:i], head + '"', '"' + rest[:at], tail, text[j:], fields)
    return None


def _fields(value: Json, name: str) -> Fields | None:
    """Find the keys of name and arguments in an object or an object inside it."""
    name_key = next((key for key, part in value.items() if part == name), "")
    for key, part in value.items():
        if isinstance(part, dict) and {*part} == {*_KEYS} and (name_key or key == name):
            return Fields(name_key, key if name_key else "")
    inner = (_fields(part, name) for part in value.values() if isinstance(part, dict))
    return next((fields for fields in inner if fields), None)


def _derive_pairs(render: Render, style: Style, text: str) -> Pairs | None:
    """Derive the format of arguments between tags from a call with two texts."""
    if not all(key in text for key in _KEYS) or text.count(_VALUES["string"]) != 2:
        return None
    first, second = (text.index(key) for key in _KEYS)
    value = _VALUES["string"]
    middle = text[first + len(_KEYS[0]) : text.index(value)]
    gap = text[text.index(value) + len(value) : second].replace(_KEYS[0], KEY)
    after = text[text.rindex(value) + len(value) :].replace(_KEYS[1], KEY)
    before = text[text.rindex(_NAMES[0], 0, first) + len(_NAMES[0]) : first]
    opening = _behind_closed_tag(_common_suffix(before, gap))
    closing = _before_open_tag(_common_prefix(gap, after))[: len(gap) - len(opening)]
    closing = closing.rstrip("\n") or closing
    separator = gap[len(closing) : len(gap) - len(opening)]
    middles, closings = {"string": middle}, {"string": closing}
    for kind in _VALUES:
        if kind == "string":
            continue
        try:
            typed = _calls(render, style, ("string", kind))
        except Exception:  # templates are programs and raise any class
            continue
        shown = typed.partition(_KEYS[1])[2]
        for form in (json.dumps(_VALUES[kind]), repr(_VALUES[kind])):
            before, found, after = shown.rpartition(form)
            if found:
                middles[kind] = before
                closings[kind] = _common_prefix(after.replace(_KEYS[1], KEY), closing)
                break
    return Pairs(opening, middles, closings, separator)


def _split_pairs(text: str, name: str, pairs: Pairs) -> _Split | None:
    """Split a text at a call with two texts as arguments; None without such a call."""
    key = text.find(_KEYS[0], text.find(name))
    value = text.find(_VALUES["string"], text.find(_KEYS[1], key))
    if name not in text or key < 0 or value < 0:
        return None
    at = text.rindex(name, 0, key)
    middle = text[at + len(name) : key - len(pairs.opening)]
    end = value + len(_VALUES["string"])
    end += len(pairs.closings["string"].replace(KEY, _KEYS[1]))
    return _Split(text[:at].replace(name, NAME), "", middle, "", text[end:], None)


def _until_end(text: str, end: str) -> str:
    """Cut the end of the turn, as far as answers without calls have the same."""
    same = _behind_closed_tag(_common_suffix(text, end)).strip()
    return text.partition(same)[0] if same else text


def _common_prefix(a: str, b: str) -> str:
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(a, b, key=len) if n is None else a[:n]


def _common_suffix(a: str, b: str) -> str:
    return _common_prefix(a[::-1], b[::-1])[::-1]


def _before_open_tag(text: str) -> str:
    """Drop a tag without its end."""
    return _OPEN_TAG.sub("", text)


def _behind_closed_tag(text: str) -> str:
    """Drop a tag without its start."""
    match = _CLOSED_TAG.match(text)
    return text[match.end() :] if match else text
