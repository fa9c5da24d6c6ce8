"""Incremental parser of tool calls, built from the description of their format."""

import ast
import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import regex  # type: ignore[import-untyped]  # matches parts of a pattern, and nested brackets

from offload_rt.server.bodies import Json
from offload_rt.server.call_format import AnswerParser, CallFormat, Fields, Mark, Pairs, Parsed
from offload_rt.server.call_grammar import properties_of, type_names
from offload_rt.text.reasoning import n_overlap, prefix_of

_PIECES = regex.compile(r"<[^<>]*>|\[/?[A-Z_]+\]|[\0-\3]|[^\s<\[\0-\3]+|[<\[]")
_TRIGGER = regex.compile(r"\s*(<[^<>\s\0-\3]*>|\[[A-Z_]+\]|[^\s\0-\3]+)")
_ANY_ID = r"[\w.:-]*"
_KEY = r"[^\n]{1,256}?"
_STRING = r'"(?:[^"\\]++|\\.)*+"'
_JSON = rf'[^"\[\]{{}}]++|{_STRING}'
_DEPTH = 16  # of nested brackets; recursive patterns take milliseconds per kilobyte
_N_TRIED = 256  # characters of a call before its end is awaited
_BARE_KEY = regex.compile(r"([{,]\s*)([\w.-]+)\s*:|\b(True|False|None)\b")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}


class CallParser(AnswerParser):
    """Parser of calls. Everything except calls of offered tools is content."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Json]) -> None:
        self._form = form
        self._tools = tools
        names = sorted(map(regex.escape, tools), key=len, reverse=True)
        self._special = {Mark.ID: _ANY_ID, Mark.INDEX: _ANY_ID}
        self._special[Mark.NAME] = f"(?P<name>{'|'.join(names)})"
        starts = map(_TRIGGER.match, (form.begin + form.opening, form.between or ""))
        self._trigger = next((match[1] for match in starts if match), "")  # precedes most calls
        self._is_first = not (form.begin + form.opening).strip()  # calls begin the answer
        self._last = (_PIECES.findall(form.closing) or ["}"])[-1]  # ends every call
        self._patterns = self._compiled(is_last=False) if tools else {}
        self._state = "start" if self._is_first else "text"
        self._buffer = ""
        self._n_tried = 0  # characters of the buffer that are no whole call
        self._is_last = False
        self._is_behind = False  # drops white space behind calls

    def feed(self, text: str, is_last: bool = False) -> Parsed:
        """Append generated text. The last call needs no closing text."""
        if not self._tools:
            return Parsed(text=text)
        self._buffer += text
        self._is_last = is_last
        if is_last and (self._state != "text" or self._trigger in self._buffer):
            self._patterns = self._compiled(is_last=True)
        return Parsed.join(iter(self._next, None))

    def _compiled(self, is_last: bool) -> dict[str, "regex.Pattern[str]"]:
        form = self._form
        call = rf"\s*(?P<json>(?=\{{){_nested(_JSON)})"
        if form.pairs:
            # Pairs begin like the end of a call in MiniMax M3.
            start = (form.pairs.separator + form.pairs.opening).lstrip()
            closing = form.closing.lstrip()
            n_shared = len(prefix_of(closing, start))
            call = self._arguments(form.pairs, self._closing(closing, is_last, n_shared + 1))
        else:
            call += self._closing(form.closing, is_last, 0)
        if not form.fields:
            call = self._spelled(Mark.NAME + form.middle) + call
        between = r"[\s;,]*" if form.between is None else self._spelled(form.between)
        first = self._spelled(form.begin + form.opening) + call
        later = between + self._spelled(form.opening) + call
        end = self._closing(form.end, is_last, 0)
        first, later, end = (regex.compile(part, regex.DOTALL) for part in (first, later, end))
        trigger = later if self._is_first else first
        return {"start": first, "trigger": trigger, "behind": later, "end": end}

    def _spelled(self, text: str) -> str:
        """Convert a text to a pattern with optional white space between tags and words."""
        pieces = _PIECES.findall(text)
        return "".join(r"\s*" + (self._special.get(part) or regex.escape(part)) for part in pieces)

    def _closing(self, text: str, is_last: bool, n_required: int) -> str:
        """Build the pattern of a closing text, whose last characters may be missing at the end."""
        lengths = range(n_required, len(text)) if is_last else ()
        cut = [self._spelled(text[:n]) + r"\s*\Z" for n in lengths]
        return f"(?:{'|'.join([self._spelled(text), *cut])})"

    def _arguments(self, pairs: Pairs, closing: str) -> str:
        """Build the pattern of pairs and the closing text.

        A value ends where its closing text precedes a pair or the end of the call.
        """
        quote = regex.escape(pairs.closings["string"])
        string = rf"{quote}(?:\\.|(?!{quote})[^\\])*+{quote}|{_STRING}|'(?:[^'\\]++|\\.)*+'"
        word = rf"{string}|(?!{quote})[^\"'\[\](){{}}]"
        opening, separator = self._spelled(pairs.opening), self._spelled(pairs.separator)
        middles = "|".join(self._spelled(text.rstrip()) for text in pairs.kinds)
        start = rf"{opening}\s*{_KEY}(?:{middles})"
        behind = rf"(?={closing}|{separator}{start})"
        kinds = []
        for middle, kind in pairs.kinds.items():
            before, after = middle[len(middle.rstrip()) :], pairs.closings.get(kind, "")
            text = regex.escape(after.lstrip()).replace(Mark.KEY, "(?P=key)")
            value = ".*?" if text else f"(?:{word}|{_nested(word)})*?"
            lines = (before, after[: len(after) - len(after.lstrip())])
            before, after = (f"(?:{regex.escape(line)})?" for line in lines)
            named = f"(?P<middle>{self._spelled(middle.rstrip())}){before}(?P<value>{value})"
            kinds.append(f"{named}{after}{text}{behind}")
        # Without atomic groups, keys and values would extend over later pairs.
        pair = rf"(?>(?>{opening}\s*(?P<key>{_KEY})(?={middles}))(?:{'|'.join(kinds)}))"
        return f"(?:(?:(?!{closing}){pair}(?:{separator}(?={start}))?)*+{closing})"

    def _next(self) -> Parsed | None:
        """Consume text or a call; None if that requires more text."""
        if self._state == "text":
            return self._next_text()
        start = max(self._n_tried - len(self._last), 0)
        self._n_tried = len(self._buffer)
        is_long = self._n_tried > _N_TRIED and not self._is_last
        if is_long and self._last not in self._buffer[start:]:
            return None
        match = self._match(self._state)
        if match and match.partial:
            return None
        self._n_tried = 0
        call = match and self._call(match)
        if call:
            self._buffer = self._buffer[match.end() :]
            self._state, self._is_behind = "behind", True
            return Parsed(calls=[call])
        n_text = len(self._trigger) if self._state == "trigger" else 0
        if self._state == "behind":
            if (match := self._match("end")) and match.partial:
                return None
            self._buffer = self._buffer[match.end() if match else 0 :]
        self._state = "text"
        return self._text(n_text)

    def _match(self, state: str) -> Any:
        return self._patterns[state].match(self._buffer, partial=not self._is_last)

    def _next_text(self) -> Parsed | None:
        trigger = self._trigger
        n_text = self._buffer.find(trigger) if trigger else -1
        if n_text >= 0:
            self._state = "trigger"
            return self._text(n_text)
        n_held = 0 if self._is_last else n_overlap(self._buffer, trigger)
        n_text = len(self._buffer) - n_held
        return self._text(n_text) if n_text else None

    def _text(self, n: int) -> Parsed:
        text = self._buffer[:n]
        self._buffer = self._buffer[n:]
        if self._is_behind:
            text = text.lstrip()
            self._is_behind = not text
        return Parsed(text=text)

    def _call(self, match: Any) -> Json | None:
        form = self._form
        if form.pairs:
            name = match["name"]
            value: Any = dict(_items(form.pairs, match, properties_of(self._tools[name])))
        elif form.fields:
            name, value = _named(decoded(match["json"]), form.fields)
        else:
            name, value = match["name"], decoded(match["json"])
        return openai_call(self._tools, name, value)


def parser_of(form: CallFormat, tools: Mapping[str, Json]) -> AnswerParser:
    """Build the parser of an answer from the JSON schemas of the offered tools, by name."""
    return (form.parser or CallParser)(form, tools)


def _nested(text: str) -> str:
    """Build the pattern of brackets around texts and brackets."""
    inner = text
    for _ in range(_DEPTH):
        inner = rf"{text}|[\[({{](?:{inner})*+[\])}}]"
    return inner.removeprefix(f"{text}|")


def _items(pairs: Pairs, match: Any, properties: Json) -> Iterator[tuple[str, Any]]:
    """Convert the arguments of a call by the JSON schemas of its properties."""
    kinds = {"".join(middle.split()): kind for middle, kind in pairs.kinds.items()}
    quote = pairs.closings["string"] if len(kinds) > 1 else ""
    groups = map(match.captures, ("key", "middle", "value"))
    for key, middle, value in zip(*groups, strict=True):
        name = key.strip()
        text = value.removeprefix("<![CDATA[")
        text = value if text == value else text.removesuffix("]]>")
        is_text = type_names(properties.get(name)) == {"string"}
        if quote:
            is_text = kinds["".join(middle.split())] == "string"
        if pairs.item and not is_text:
            yield name, _nested_value(pairs, text, properties.get(name))
        else:
            yield name, text if is_text else _value(text.strip(), quote)


def _nested_value(pairs: Pairs, text: str, schema: Any) -> Any:
    """Convert nested pairs. Without a schema, a list has only elements, and a text is JSON."""
    parts = [*_nested_pairs(pairs, text)]
    kinds = type_names(schema)
    schema = schema if isinstance(schema, dict) else {}
    if not parts and (text or not kinds & {"array", "object"}):
        return text if kinds == {"string"} else _value(text.strip(), "")
    if "array" in kinds or ("object" not in kinds and all(key == pairs.item for key, _ in parts)):
        return [_nested_value(pairs, part, schema.get("items")) for _, part in parts]
    return {key: _nested_value(pairs, part, properties_of(schema).get(key)) for key, part in parts}


def _nested_pairs(pairs: Pairs, text: str) -> Iterator[tuple[str, str]]:
    """Yield keys and values up to the first other text."""
    middle, closing = (regex.escape(part["string"]) for part in (pairs.middles, pairs.closings))
    start = regex.compile(rf"\s*{regex.escape(pairs.opening)}([\w.-]+){middle}")
    position = 0
    while first := start.match(text, position):
        tag = rf"(?P<end>{closing.replace(Mark.KEY, first[1])})|{regex.escape(first[0].lstrip())}"
        depth = 1  # of the same key
        for last in regex.finditer(tag, text, pos=first.end()):
            depth += -1 if last["end"] else 1
            if depth == 0:
                yield first[1], text[first.end() : last.start()]
                position = last.end()
                break
        else:
            return


def _named(value: Any, fields: Fields) -> tuple[Any, Any]:
    """Return name and arguments of a call in JSON, also inside a further object."""
    if not isinstance(value, dict):
        return None, None
    if not fields.name:
        return next(iter(value.items())) if len(value) == 1 else (None, None)
    if fields.name in value:
        return value[fields.name], value.get(fields.arguments) or {}
    inner = (part for part in value.values() if isinstance(part, dict) and fields.name in part)
    return _named(next(inner, None), fields)


def _value(text: str, quote: str) -> Any:
    """Convert a value in JSON, in Python or with its own quotation marks."""
    for convert in (DECODER.decode, ast.literal_eval, lambda text: _relaxed(text, quote)):
        try:
            value = convert(text)
            json.dumps(value)
            return value
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def _relaxed(text: str, quote: str) -> Any:
    """Convert JSON with keys without quotes and special quotation marks."""

    def strict(match: "regex.Match[str]") -> str:
        return f'{match[1]}"{match[2]}":' if match[2] else _CONSTANTS[match[3]]

    parts = enumerate(text.split(quote) if quote else [text])
    pieces = [json.dumps(part) if k % 2 else _BARE_KEY.sub(strict, part) for k, part in parts]
    return DECODER.decode("".join(pieces))


def openai_call(tools: Mapping[str, Json], name: Any, arguments: Any) -> Json | None:
    """Build a call in OpenAI's format; None unless an offered tool is called with an object."""
    if isinstance(arguments, str):
        arguments = decoded(arguments)
    is_offered = isinstance(name, str) and name in tools
    if not is_offered or not isinstance(arguments, dict):
        return None
    # Lone surrogates are valid in JSON as escapes only. Mistral's templates require ids of nine
    # letters and digits.
    text = json.dumps(arguments, ensure_ascii=False).encode("utf-8", "backslashreplace")
    function = {"name": name, "arguments": text.decode()}
    return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


def decoded(text: str) -> Any:
    """Convert JSON; None for anything else."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Models write line breaks inside strings, which strict JSON forbids.
DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)
