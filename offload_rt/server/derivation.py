"""Derive the format of tool calls from a chat template: render probes and compare them."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise, product
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from offload_rt.server.bodies import Json
from offload_rt.server.call_format import CallFormat, Fields, Mark, Pairs, Style
from offload_rt.text.reasoning import Tags, prefix_of

# Renders messages and tools, with or without the prompt of an answer. Raises TemplateError.
Render = Callable[[Sequence[Json], Sequence[Json], bool], str]

_USER, _CONTENT, _THOUGHT = "Xuserprobe", "Xcontentprobe", "Xthoughtprobe"
_NAMES = ("probe_alpha", "probe_gamma")
_KEYS = ("key_one", "key_two")
_IDS = ("Xq7Zk2Wv9", "Jm4Rt8Bn5")  # Mistral requires nine letters and digits
_ID = re.compile(rf"(?:call_)?(?:{'|'.join(_IDS)})")
_ID_FIELD = re.compile(r',\s*"\w+":\s*"\0"')
_INDICES = [re.compile(rf"(?<!\w){k}(?!\w)") for k in range(3)]
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
_DECODER = json.JSONDecoder(strict=False)  # placeholders are control characters
_Split = tuple[str, CallFormat, str]  # text before a call, its inner texts, text behind


def renderer(tokenizer: PreTrainedTokenizerBase) -> Render:
    """Render with the chat template of a tokenizer."""

    def render(turns: Sequence[Json], tools: Sequence[Json], has_prompt: bool) -> str:
        variables = tool_variables(str(tokenizer.chat_template), tools)
        options: Json = {"tokenize": False, "add_generation_prompt": has_prompt, **variables}
        try:
            return str(tokenizer.apply_chat_template([*turns], **options))
        except Exception as error:  # templates are programs and raise any class
            raise TemplateError(str(error)) from error

    return render


def tool_variables(template: str, tools: Sequence[Json] | None) -> Json:
    """Return the template variables that describe tools; Firefunction has names of its own."""
    if not {"functions", "datetime"} <= {*re.findall(r"\w+", template)}:
        return {"tools": tools}
    now = datetime.now().strftime("%b %d %Y %H:%M:%S")
    return {"tools": tools, "functions": json.dumps(tools or [], indent=2), "datetime": now}


def derive_calls(render: Render) -> CallFormat | None:
    """Derive the format of calls; None if the template renders no calls, or not recognisably.

    Raises TemplateError if the template fails without calls.
    """
    plain = _answer(render, {"content": _CONTENT})
    before, _, prompt = render([_TURN], TOOLS, True).rpartition(_USER)
    shows_tools = _NAMES[0] in before + prompt
    kinds = product((False, True), ("", "nine", "named"), [True], [shows_tools])
    styles = (Style(*kind) for kind in kinds)
    style = next((s for s in styles if _NAMES[0] in _calls(render, s, _TWO_TEXTS)), None)
    if style is None:
        return None
    single = _calls(render, style, _TWO_TEXTS)
    text = _calls(render, style, _TWO_TEXTS, _TWO_TEXTS) or single
    shared = _WHOLE_TAGS.sub(r"\1", prefix_of(text, plain))
    n_shared = max(len(shared), len(_OPEN_TAG.sub("", prefix_of(text, prompt))))
    text, single = (_ID.sub(Mark.ID, part[n_shared:]) for part in (text, single))
    pairs = None if _split_json(single, _NAMES[0]) else _derive_pairs(render, style, single)
    end = plain.partition(_CONTENT)[2]
    if (first := _split(text, _NAMES[0], pairs)) is None:
        return None
    before, form, after = first
    form = replace(form, pairs=pairs, style=style)
    if (second := _split(after, _NAMES[1], pairs)) is None:
        return replace(form, opening=before, closing=_until_end(after, end))
    gap, form_2, after = second
    inner = form.head + form.middle + form.tail, form_2.head + form_2.middle + form_2.tail
    for index, following in pairwise(_INDICES):
        if index.search(before + inner[0]) and following.search(gap + inner[1]):
            before, gap = index.sub(Mark.INDEX, before), following.sub(Mark.INDEX, gap)
            texts = (index.sub(Mark.INDEX, part) for part in (form.head, form.middle, form.tail))
            form = replace(form, head=next(texts), middle=next(texts), tail=next(texts))
    after = _until_end(after, end)
    opening, closing, between = _divided(before, gap, after)
    begin = before[: len(before) - len(opening)]
    # The end has as many tags as the begin.
    n_tags = len(_TAG.findall(begin))
    ends = [match.end() for match in _TAG.finditer(after, len(closing))]
    n = ends[n_tags - 1] if 0 < n_tags < len(ends) else len(after)
    ending = after[len(closing) : n] if begin.strip() else ""
    form = replace(form, begin=begin, opening=opening, between=between)
    return replace(form, closing=closing, end=ending)


def _divided(before: str, gap: str, after: str) -> tuple[str, str, str]:
    """Divide the text between two items: opening, closing, and the separator in the middle.

    before  text before the first item, which ends with the opening
    after   text behind the second item, which begins with the closing
    """
    suffix = prefix_of(before[::-1], gap[::-1])[::-1]
    tag = _CLOSED_TAG.match(suffix)  # without its start
    opening = suffix[tag.end() :] if tag else suffix
    closing = _OPEN_TAG.sub("", prefix_of(gap, after))[: len(gap) - len(opening)]
    return opening, closing, gap[len(closing) : len(gap) - len(opening)]


def shows_system(render: Render) -> bool:
    """Whether a template renders system messages. Raises TemplateError."""
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
    return None if tags.opening in empty.sub("", _answer(render, {"content": _CONTENT})) else tags


def _answer(render: Render, message: Json) -> str:
    return render([_TURN, {"role": "assistant", **message}], TOOLS, False).rpartition(_USER)[2]


def _calls(render: Render, style: Style, *kinds: Sequence[str]) -> str:
    """Render an answer with calls, by types of arguments; empty if the template fails."""
    calls = []
    for i, (name, types) in enumerate(zip(_NAMES, kinds, strict=False)):
        arguments: Any = {key: _VALUES[kind] for key, kind in zip(_KEYS, types, strict=True)}
        arguments = json.dumps(arguments) if style.as_text else arguments
        function = {"name": name, "arguments": arguments}
        ids = {"": f"call_{_IDS[i]}", "nine": _IDS[i], "named": f"functions.{name}:{i}"}
        calls.append({"id": ids[style.ids], "type": "function", "function": function})
    try:
        return _answer(render, {"content": "", "tool_calls": calls})
    except TemplateError:
        return ""


def _split(text: str, name: str, pairs: Pairs | None) -> _Split | None:
    if pairs is None:
        return _split_json(text, name)
    key = text.find(_KEYS[0], text.find(name))
    value = text.find(_VALUES["string"], text.find(_KEYS[1], key))
    if name not in text or key < 0 or value < 0:
        return None
    at = text.rindex(name, 0, key)
    end = value + len(_VALUES["string"] + pairs.closings["string"].replace(Mark.KEY, _KEYS[1]))
    form = CallFormat(middle=text[at + len(name) : key - len(pairs.opening)])
    return text[:at].replace(name, Mark.NAME), form, text[end:]


def _split_json(text: str, name: str) -> _Split | None:
    for brace in re.finditer("{", text):
        i = brace.start()
        try:
            value, j = _DECODER.raw_decode(text, i)
        except ValueError:
            continue
        if {*value} == {*_KEYS} and name in text[:i]:
            at = text.rindex(name, 0, i)
            form = CallFormat(middle=text[at + len(name) : i])
            return text[:at].replace(name, Mark.NAME), form, text[j:]
        if fields := _fields(value, name):
            head, _, rest = text[i:j].partition(f'"{name}"')
            middle, _, _ = rest.partition("{")
            tail = _ID_FIELD.sub("", rest[_DECODER.raw_decode(rest, len(middle))[1] :])
            form = CallFormat(head=head + '"', middle='"' + middle, tail=tail, fields=fields)
            return text[:i], form, text[j:]
    return None


def _fields(value: Json, name: str) -> Fields | None:
    name_key = next((key for key, part in value.items() if part == name), "")
    for key, part in value.items():
        if isinstance(part, dict) and {*part} == {*_KEYS} and (name_key or key == name):
            return Fields(name_key, key if name_key else "")
    inner = (_fields(part, name) for part in value.values() if isinstance(part, dict))
    return next((fields for fields in inner if fields), None)


def _derive_pairs(render: Render, style: Style, text: str) -> Pairs | None:
    """Derive the format of arguments between tags from a call with two texts."""
    value = _VALUES["string"]
    if not all(key in text for key in _KEYS) or text.count(value) != 2:
        return None
    first, second = (text.index(key) for key in _KEYS)
    middle = text[first + len(_KEYS[0]) : text.index(value)]
    gap = text[text.index(value) + len(value) : second].replace(_KEYS[0], Mark.KEY)
    after = text[text.rindex(value) + len(value) :].replace(_KEYS[1], Mark.KEY)
    before = text[text.rindex(_NAMES[0], 0, first) + len(_NAMES[0]) : first]
    opening, closing, _ = _divided(before, gap, after)
    closing = closing.rstrip("\n") or closing
    separator = gap[len(closing) : len(gap) - len(opening)]
    middles, closings = {"string": middle}, {"string": closing}
    for kind in [*_VALUES][1:]:
        shown = _calls(render, style, ("string", kind)).partition(_KEYS[1])[2]
        for form in (json.dumps(_VALUES[kind]), repr(_VALUES[kind])):
            before, found, after = shown.rpartition(form)
            if found:
                middles[kind] = before
                closings[kind] = prefix_of(after.replace(_KEYS[1], Mark.KEY), closing)
                break
    shown = _calls(render, style, ("string", "array")).partition(_KEYS[1])[2]
    element = re.search(rf"{re.escape(opening)}(\w+){re.escape(middle)}7302\b", shown)
    return Pairs(opening, middles, closings, separator, element[1] if element else "")


def _until_end(text: str, end: str) -> str:
    """Cut the end of the turn, as far as answers without calls have the same."""
    same = _divided(text, end, "")[0].strip()
    return text.partition(same)[0] if same else text
