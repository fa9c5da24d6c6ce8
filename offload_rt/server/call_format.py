"""Description of a format of tool calls, with its incremental parser and its grammar."""

import ast
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import regex  # type: ignore[import-untyped]  # matches a part of a pattern

from offload_rt.server.tool_parser import (
    DECODER,
    AnswerParser,
    Json,
    Lark,
    Parsed,
    ToolFormat,
    call_rules,
    json_rule,
    openai_call,
    properties_of,
    type_names,
    value_rules,
)
from offload_rt.text.reasoning import n_overlap

# Placeholders in the texts of a format: ids, indices, the key of an argument, the function's name.
ID, INDEX, KEY, NAME = "\0", "\1", "\2", "\3"
_IDS = {ID: "/[A-Za-z0-9_-]{1,40}/", INDEX: "/[0-9]+/"}
_PIECES = regex.compile(r"<[^<>]*>|\[/?[A-Z_]+\]|[\0-\3]|[^\s<\[\0-\3]+|[<\[]")
_TRIGGER = regex.compile(r"\s*(<[^<>\s\0-\3]*>|\[[A-Z_]+\]|[^\s\0-\3]+)")
_ID_FIELD = regex.compile(r',\s*"\w+":\s*"\0"')
_KEY = r"(?P<key>[^\n]{1,256}?)"
_JSON_TEXT = regex.compile(r'(?:[^"\\]++|\\.)++', regex.DOTALL)
_JSON_OTHER = regex.compile(r'[^"\[{\]}]++')
_BARE = regex.compile(r"([{,]\s*)([\w.-]+)\s*:|\b(True|False|None)\b")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
Steps = Generator[None, None, Any]


class Fields(NamedTuple):
    """Keys of a call in JSON; both empty if the function's name is the key of the arguments."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Pairs:
    """Arguments as keys and values between texts.

    opening    text before a key
    middles    text between key and value, by JSON type
    closings   text behind a value, by JSON type
    separator  text between two arguments
    """

    opening: str
    middles: Mapping[str, str]
    closings: Mapping[str, str]
    separator: str

    def render(self, key: str, value: Any) -> str:
        """Render an argument."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        kind = "string" if isinstance(value, str) else "integer"
        closing = self.closings[kind].replace(KEY, key)
        return f"{self.opening}{key}{self.middles[kind]}{text}{closing}"

    @property
    def kinds(self) -> dict[str, str]:
        """A type of each text between key and value, longest text first."""
        kinds = {middle: kind for kind, middle in reversed([*self.middles.items()])}
        return dict(sorted(kinds.items(), key=lambda item: -len(item[0])))


class Style(NamedTuple):
    """Properties of a chat template.

    as_text      expects arguments as JSON text
    has_nine     requires ids of nine letters and digits
    shows_calls  renders calls
    shows_tools  renders the offered tools
    has_system   renders system messages
    """

    as_text: bool = False
    has_nine: bool = False
    shows_calls: bool = True
    shows_tools: bool = True
    has_system: bool = True


@dataclass(frozen=True)
class CallFormat(ToolFormat):
    """Texts of an answer with tool calls: begin (opening call closing) between (...) end.

    A call is head, name, middle, arguments, tail.
    begin    text before the first call and behind the last call (`end`)
    between  text between two calls; None if the template renders a single call
    fields   keys of a call that is a JSON object; None otherwise
    pairs    format of arguments other than JSON
    style    properties of the chat template
    """

    begin: str = ""
    opening: str = ""
    head: str = ""
    middle: str = ""
    tail: str = ""
    closing: str = ""
    between: str | None = None
    end: str = ""
    fields: Fields | None = None
    pairs: Pairs | None = None
    style: Style = field(default_factory=lambda: Style(shows_calls=False))
    name: str = "derived"

    @property
    def text(self) -> str:
        """All texts, which may contain special tokens."""
        pairs = self.pairs
        inner = [pairs.opening, *pairs.middles.values(), *pairs.closings.values()] if pairs else []
        outer = [self.begin, self.opening, self.middle, self.closing, self.between or "", self.end]
        return "".join([*outer, *inner])

    @property
    def trigger(self) -> str:
        """Text that begins an answer with calls; empty if calls are the whole answer."""
        starts = map(_TRIGGER.match, (self.begin + self.opening, self.between or ""))
        return next((match[1] for match in starts if match), "")

    def parser(self, tools: Mapping[str, Json]) -> AnswerParser:
        """Build the parser of an answer from the JSON schemas of the offered tools, by name."""
        return CallParser(self, tools)

    def adapt(self, turns: list[Json], tools: list[Json] | None) -> tuple[list[Json], Any]:
        """Convert messages to what the chat template renders, and describe tools that it omits."""
        style = self.style
        adapted = []
        for turn in turns:
            entry = {**turn}
            calls = [{**call, "function": {**call["function"]}} for call in calls_of(turn)]
            for part, key in ((entry, "tool_call_id"), *((call, "id") for call in calls)):
                if style.has_nine and isinstance(part.get(key), str):
                    part[key] = _nine(part[key])
            functions = [call["function"] for call in calls]
            if calls and not style.shows_calls:
                given = [(str(f.get("name")), f.get("arguments")) for f in functions]
                text = f"{turn.get('content') or ''}{self.render(given)}"
                entry = {"role": turn["role"], "content": text}
            elif calls:
                entry["tool_calls"] = calls
                for function in functions if style.as_text else ():
                    function["arguments"] = json.dumps(function.get("arguments"))
            adapted.append(entry)
        if tools and not style.shows_tools:
            lines = [self.instructions, *(json.dumps(tool.get("function")) for tool in tools)]
            role = "system" if style.has_system else "user"
            adapted.insert(0, {"role": role, "content": "\n".join(lines)})
        return joined(adapted) if tools and not style.shows_tools else adapted, tools

    @property
    def instructions(self) -> str:
        """Description of calls for the model."""
        example = self.render([("name", {"key": "value"})])
        return f"To call a tool, answer like this:\n{example}\nTools:"

    def render(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Render calls of functions by name, with arguments."""
        texts = []
        for i, (name, arguments) in enumerate(calls):
            value = json.dumps(arguments, ensure_ascii=False)
            if self.pairs:
                items = arguments.items() if isinstance(arguments, dict) else ()
                pairs = [self.pairs.render(*item) for item in items]
                value = self.pairs.separator.join(pairs)
            call = self.opening + self.head + NAME + self.middle
            call += "\4" + _ID_FIELD.sub("", self.tail) + self.closing
            marks = {ID: f"call{i:05}", INDEX: str(i), NAME: name, "\4": value}
            texts.append("".join(marks.get(part, part) for part in regex.split("([\0-\4])", call)))
        return self.begin + (self.between or "").join(texts) + self.end

    def grammar(self, functions: Sequence[Json], lark: Lark, is_single: bool) -> str:
        """Build the Lark grammar of required calls."""

        def spell(text: str, name: str = "") -> str:
            parts = regex.split(r"([\0\1])", text.replace(NAME, name))
            return " ".join(_IDS[part] if part in _IDS else lark(part) for part in parts if part)

        def call(i: int, function: Json, schema: Json) -> list[str]:
            name = function["name"]
            head = spell(self.opening + self.head + NAME + self.middle, name)
            tail = spell(_ID_FIELD.sub("", self.tail) + self.closing, name)
            if self.pairs is None:
                return [f"{head} arguments{i} {tail}", json_rule(f"arguments{i}", schema)]
            rules = _pair_rules(self.pairs, i, schema, lark)
            return [f"{head} arguments{i} {tail}", *rules]

        more = "" if is_single or self.between is None else f" ({spell(self.between)} call)*"
        start = f"start: {spell(self.begin)} call{more} {spell(self.end)}"
        return "\n".join([start, *call_rules(functions, call)])


def calls_of(turn: Json) -> list[Json]:
    """Return the calls of a message; none if any is malformed, so that the template decides."""
    calls = turn.get("tool_calls")
    calls = calls if isinstance(calls, list) else []
    is_valid = all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)
    return calls if is_valid else []


def joined(turns: Sequence[Json]) -> list[Json]:
    """Join texts of the same role, because many templates require alternating roles."""
    result: list[Json] = []
    for turn in turns:
        last = result[-1] if result else {}
        texts = [last.get("content"), turn.get("content")]
        is_plain = last.keys() | turn.keys() == {"role", "content"}
        if is_plain and last.get("role") == turn["role"] and all(isinstance(t, str) for t in texts):
            last["content"] = "\n\n".join(map(str, texts))
        else:
            result.append({**turn})
    return result


def _nine(call_id: str) -> str:
    """Convert an id to nine letters and digits."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _pair_rules(pairs: Pairs, i: int, schema: Json, lark: Lark) -> list[str]:
    """Build the rules of arguments in the order of the schema."""
    properties = properties_of(schema)
    separator = lark(pairs.separator) if pairs.separator else ""
    rules = [f"arguments{i}: first{i}_0"]
    for j, (name, value) in enumerate(properties.items()):
        pair = f"pair{i}_{j}"
        is_optional = name not in (schema.get("required") or ())
        for prefix, start in (("first", ""), ("rest", separator)):
            skip = f" | {prefix}{i}_{j + 1}" if is_optional else ""
            rules.append(f"{prefix}{i}_{j}: {start} {pair} rest{i}_{j + 1}{skip}")
        types = type_names(value)
        kind = next((kind for kind in pairs.middles if {kind} == types), "object")
        middle = pairs.middles.get(kind, pairs.middles["integer"])
        closing = pairs.closings.get(kind, pairs.closings["integer"]).replace(KEY, name)
        rules.append(f"{pair}: {lark(pairs.opening + name + middle)} value{i}_{j}")
        rules += value_rules(f"value{i}_{j}", schema, value, lark(closing) if closing else "")
    return [*rules, *(f'{prefix}{i}_{len(properties)}: ""' for prefix in ("first", "rest"))]


@dataclass
class CallParser(AnswerParser):
    """Parser of calls. Everything except calls of offered tools is content."""

    form: CallFormat
    tools: Mapping[str, Json]
    _buffer: str = field(default="", init=False)
    _is_ended: bool = field(default=False, init=False)
    _is_behind: bool = field(default=False, init=False)  # drops white space behind calls
    _out: list[Parsed] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        form = self.form
        closing = self._spelled(form.closing)
        pair = more = ""
        if form.pairs:
            middles = "|".join(f"({self._spelled(text.rstrip())})" for text in form.pairs.kinds)
            pair = rf"{self._spelled(form.pairs.opening)}\s*{_KEY}(?:{middles})"
            more = self._spelled(form.pairs.separator) + pair
        self._pair, self._more = regex.compile(pair), regex.compile(more)
        self._next = regex.compile(f"{closing}|{more}" if more else closing)
        self._closing = regex.compile(closing)
        self._end = regex.compile(self._spelled(form.end))
        start = r"\s*(?=\{)"
        if form.pairs:
            start = f"(?={closing}|{pair})"
        if not form.fields:
            start = self._spelled(NAME + form.middle) + start
        self._first = regex.compile(self._spelled(form.begin + form.opening) + start)
        between = r"[\s;,]*" if form.between is None else self._spelled(form.between)
        self._later = regex.compile(between + self._spelled(form.opening) + start)
        self._steps = self._parse()

    def _spelled(self, text: str) -> str:
        """Convert a text to a pattern with optional white space between tags and words."""
        names = sorted(map(regex.escape, self.tools), key=len, reverse=True)
        special = {ID: r"[\w.:-]*", INDEX: r"[\w.:-]*", NAME: f"(?P<name>{'|'.join(names)})"}
        pieces = _PIECES.findall(text)
        return "".join(r"\s*" + (special.get(piece) or regex.escape(piece)) for piece in pieces)

    def feed(self, text: str) -> Parsed:
        """Append generated text. Returns the content and the calls that are now complete."""
        if not self.tools:
            return Parsed(text=text)
        self._buffer += text
        next(self._steps, None)
        out, self._out = self._out, []
        return Parsed.join(out)

    def end(self) -> Parsed:
        """Return the rest. The last call needs no closing text."""
        self._is_ended = True
        return self.feed("")

    def _parse(self) -> Steps:
        """Parse the buffer; each step waits for more text."""
        trigger = self.form.trigger
        first = self._first
        if not (self.form.begin + self.form.opening).strip():  # calls begin the answer
            yield from self._calls(first)
            first = self._later
        while True:
            start = self._buffer.find(trigger) if trigger else -1
            n_held = n_overlap(self._buffer, trigger) if trigger and not self._is_ended else 0
            self._emit(start if start >= 0 else len(self._buffer) - n_held)
            if start < 0:
                yield
            elif not (yield from self._calls(first)):
                self._emit(len(trigger))

    def _emit(self, n: int) -> None:
        """Move characters from the buffer to the content."""
        text = self._buffer[:n]
        self._buffer = self._buffer[n:]
        if self._is_behind:
            text = text.lstrip()
            self._is_behind = not text
        self._out.append(Parsed(text=text))

    def _calls(self, pattern: "regex.Pattern[str]") -> Steps:
        """Consume calls at the start of the buffer. Returns whether there are any."""
        has_calls = False
        while (end := (yield from self._call(pattern))) is not None:
            self._buffer = self._buffer[end:]
            has_calls = self._is_behind = True
            pattern = self._later
        if has_calls and self.form.end and (match := (yield from self._match(self._end, 0))):
            self._buffer = self._buffer[match.end() :]
        return has_calls

    def _call(self, pattern: "regex.Pattern[str]") -> Steps:
        """Emit a call at the start of the buffer. Returns its end; None for anything else."""
        match = yield from self._match(pattern, 0)
        if match is None or match.partial:
            return None
        start = match.end()
        fields = self.form.fields
        name = None if fields else match["name"]
        if self.form.pairs:
            value, end = yield from self._arguments(start, properties_of(self.tools[str(name)]))
        else:
            value, end = yield from self._json(start)
        if end is None:
            return None
        if fields:
            name, value = _named(value, fields)
        call = openai_call(self.tools, name, value)
        if call is None:
            return None
        self._out.append(Parsed(calls=[call]))
        return end

    def _match(self, pattern: "regex.Pattern[str]", at: int) -> Steps:
        """Match a pattern, once that is certain; at the end of the answer also in part."""
        while True:
            match = pattern.match(self._buffer, at, partial=True)
            if match is None or not match.partial or self._is_ended:
                return match
            yield

    def _json(self, start: int) -> Steps:
        """Parse a JSON object and the closing text. Returns the value and the end."""
        at, depth, is_string = start, 0, False
        while True:
            if match := (_JSON_TEXT if is_string else _JSON_OTHER).match(self._buffer, at):
                at = match.end()
            bracket = self._buffer[at : at + 1]
            if bracket in ("", "\\"):  # the rest of an escape follows
                if self._is_ended:
                    return None, None
                yield
                continue
            at += 1
            if bracket == '"':
                is_string = not is_string
            else:
                depth += 1 if bracket in "[{" else -1
            if depth <= 0:
                break
        try:
            value = DECODER.decode(self._buffer[start:at])
        except (ValueError, RecursionError):
            return None, None
        match = yield from self._match(self._closing, at)
        return value, match and match.end()

    def _arguments(self, at: int, properties: Json) -> Steps:
        """Parse pairs and the closing text. Returns the arguments and the end."""
        pairs = self.form.pairs
        assert pairs is not None
        arguments: Json = {}
        while True:
            match = yield from self._match(self._closing, at)
            pattern = self._more if arguments else self._pair
            pair = pattern.match(self._buffer, at, partial=True)
            if match and not (match.partial and pair):
                return arguments, match.end()
            pair = yield from self._match(pattern, at)
            if pair is None or pair.partial:
                return None, None
            rest = self._buffer[pair.start(pair.lastindex) :]
            if not self._is_ended and any(text.startswith(rest) for text in pairs.kinds):
                yield  # a longer text may follow
                continue
            key = pair["key"].strip()
            text_kinds = [*pairs.kinds.items()]
            middle, kind = text_kinds[(pair.lastindex or 0) - 2]
            closing = pairs.closings.get(kind, "").replace(KEY, key)
            start = pair.end()
            end = yield from self._value_end(start, closing.lstrip())
            if end is None:
                return None, None
            at = end + len(closing.lstrip())
            text = self._buffer[start:end]
            text = text.removeprefix(middle[len(middle.rstrip()) :])
            text = text.removesuffix(closing[: len(closing) - len(closing.lstrip())])
            text = text.removeprefix("<![CDATA[").removesuffix("]]>") if "<![C" in text else text
            quote = pairs.closings["string"] if len(text_kinds) > 1 else ""
            is_text = kind == "string" if quote else type_names(properties.get(key)) == {"string"}
            arguments[key] = text if is_text else _value(text, quote)

    def _value_end(self, at: int, closing: str) -> Steps:
        """Find the end of a value: its closing text, followed by a pair or the end of the call."""
        quote = self.form.pairs.closings["string"] if self.form.pairs else ""
        depth = 0
        while True:
            end = self._buffer.find(closing, at) if closing else at
            if end < 0 or end >= len(self._buffer):
                if self._is_ended:
                    return None
                at = at if not closing else max(at, len(self._buffer) - len(closing) + 1)
                yield
                continue
            if depth == 0:
                match = yield from self._match(self._next, end + len(closing))
                if match and (closing or not match.partial):
                    return end
            if closing:
                at = end + 1
                continue
            bracket = self._buffer[at]
            if self._buffer.startswith(quote, at) or bracket in "\"'":
                mark = quote if self._buffer.startswith(quote, at) else bracket
                inner = regex.escape(mark)
                text = regex.compile(rf"{inner}(?:\\.|(?!{inner})[^\\])*+{inner}", regex.DOTALL)
                match = yield from self._match(text, at)
                at = match.end() if match else at + 1
            else:
                depth += (bracket in "[{(") - (bracket in ")}]")
                at += 1


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
    text = text.strip()
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
    parts = text.split(quote) if quote else [text]

    def strict(match: "regex.Match[str]") -> str:
        return f'{match[1]}"{match[2]}":' if match[2] else _CONSTANTS[match[3]]

    pieces = [
        json.dumps(part) if k % 2 else _BARE.sub(strict, part) for k, part in enumerate(parts)
    ]
    return DECODER.decode("".join(pieces))
