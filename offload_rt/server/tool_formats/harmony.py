"""gpt-oss: channels for reasoning, answers and calls, separated by special tokens.

The library openai-harmony parses token ids, but downloads its vocabulary at the first use.
"""

from collections.abc import Mapping

import regex  # type: ignore[import-untyped]  # matches a part of a pattern

from offload_rt.server.bodies import Json
from offload_rt.server.call_format import AnswerParser, CallFormat, Lark, Parsed, Style
from offload_rt.server.call_grammar import TEXT
from offload_rt.server.call_parser import openai_call
from offload_rt.text.reasoning import n_overlap

_CHANNEL, _MESSAGE, _END = "<|channel|>", "<|message|>", "<|end|>"
# The prompt of an answer may continue with a recipient.
_HEAD = regex.compile(r"(?:<\|(?:start|channel)\|>| to=functions\.).*?<\|message\|>", regex.DOTALL)
# The last message ends with an end token, which the text omits.
_BODY = regex.compile(r"(.*?)<\|(?:end|call)\|>", regex.DOTALL)
_CHANNEL_NAME = regex.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = regex.compile(r"to=functions\.([^\s<]+)")


class HarmonyParser(AnswerParser):
    """Parser of messages: a head with channel and recipient, and a body."""

    def __init__(self, form: CallFormat, tools: Mapping[str, Json]) -> None:
        self._tools = tools
        self._has_channels = form.has_channels
        self._buffer = ""
        self._channel: str | None = None  # of the current body; None in a head
        self._recipient: str | None = None

    @property
    def is_reasoning(self) -> bool:
        return self._has_channels and self._channel == "analysis"

    def feed(self, text: str, is_last: bool = False) -> Parsed:
        self._buffer += text
        parsed = Parsed.join(iter(self._next, None))
        if not is_last or self._channel is None:
            return parsed
        return Parsed.join([parsed, self._part(self._buffer)])

    def _next(self) -> Parsed | None:
        if self._channel is None:
            head = _HEAD.match(self._buffer, partial=True)
            if head and head.partial:
                return None
            text = head[0] if head else ""
            self._buffer = self._buffer[len(text) :]
            channel, recipient = _CHANNEL_NAME.search(text), _RECIPIENT.search(text)
            self._channel = channel[1] if channel else "final"
            self._recipient = recipient[1] if recipient else None
            return Parsed()
        body = _BODY.match(self._buffer)
        n_held = n_overlap(self._buffer, _END)
        text = body[1] if body else self._buffer[: len(self._buffer) - n_held]
        if not body and (self._recipient is not None or not text):
            return None
        part = self._part(text)
        self._buffer = self._buffer[body.end() if body else len(text) :]
        if body:
            self._channel = self._recipient = None
        return part

    def _part(self, text: str) -> Parsed:
        if self._recipient is not None:
            call = openai_call(self._tools, self._recipient, text.strip())
            return Parsed(text=text) if call is None else Parsed(calls=[call])
        return Parsed(reasoning=text) if self.is_reasoning else Parsed(text=text)


class Harmony(CallFormat):
    """Format of gpt-oss; an answer has one call."""

    def around(self, lark: Lark, has_calls: bool) -> str:
        head = "" if has_calls else lark(f"{_CHANNEL}final{_MESSAGE}")
        analysis = lark(f"{_CHANNEL}analysis{_MESSAGE}")
        end = lark(f"{_END}<|start|>assistant")
        rules = (f"start: analysis? {head} @answer", f"analysis: {analysis} TEXT {end}")
        return "\n".join([*rules, f"TEXT: {TEXT}"])


MARKS = ()  # found by the template alone
FORMAT = Harmony(
    opening=f"{_CHANNEL}commentary to=functions.",
    middle=f" <|constrain|>json{_MESSAGE}",
    style=Style(),
    name="harmony",
    parser=HarmonyParser,
    has_channels=True,
)
