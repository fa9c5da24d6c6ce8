"""gpt-oss: channels for reasoning, answers and calls, separated by special tokens.

The library openai-harmony parses token ids, but downloads its vocabulary at the first use.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offload_rt.server.tool_parser import (
    DECODER,
    TEXT,
    AnswerParser,
    Json,
    Lark,
    Parsed,
    ToolFormat,
    call_rules,
    json_rule,
    openai_call,
)
from offload_rt.text.reasoning import n_overlap

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
# The last message ends with an end token, which the text omits.
_END, _CALL = "<|end|>", "<|call|>"
_TO = " to=functions."  # behind the prompt of an answer
_HEAD = re.compile(r"<\|(?:start|channel)\|>| to=functions\.")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


@dataclass
class HarmonyParser(AnswerParser):
    """Parser of messages: a head with channel and recipient, and a body.

    tools  offered tools by name
    """

    tools: Mapping[str, Json]
    _buffer: str = field(default="", init=False)
    _channel: str | None = field(default=None, init=False)  # of the current body; None in a head
    _recipient: str | None = field(default=None, init=False)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the analysis."""
        return self._channel == "analysis"

    def feed(self, text: str) -> Parsed:
        """Append generated text. Returns the parts that are now certain."""
        self._buffer += text
        return Parsed.join(iter(self._next, None))

    def end(self) -> Parsed:
        """Return the rest."""
        rest = self._buffer
        self._buffer = ""
        return Parsed() if self._channel is None else self._part(rest)

    def _next(self) -> Parsed | None:
        """Consume a head or a part of a body; None if that requires more text."""
        if self._channel is None:
            return self._next_head()
        ends = (end for end in (_END, _CALL) if end in self._buffer)
        body, tag, rest = self._buffer.partition(next(ends, _END))
        if self._recipient is not None and not tag:
            return None
        if not tag:
            n_held = n_overlap(body, _END)
            body, rest = body[: len(body) - n_held], body[len(body) - n_held :]
            if not body:
                return None
        part = self._part(body)
        self._buffer = rest
        if tag:
            self._channel = self._recipient = None
        return part

    def _next_head(self) -> Parsed | None:
        head, tag, rest = self._buffer.partition(_MESSAGE)
        if not tag and (not self._buffer or _could_be_head(self._buffer)):
            return None
        self._buffer = rest if tag else self._buffer
        channel = _CHANNEL_NAME.search(head) if tag else None
        recipient = _RECIPIENT.search(head) if tag else None
        self._channel = channel[1] if channel else "final"
        self._recipient = recipient[1] if recipient else None
        return Parsed()

    def _part(self, text: str) -> Parsed:
        if self._recipient is not None:
            try:
                call = openai_call(self.tools, self._recipient, DECODER.decode(text.strip()))
            except (ValueError, RecursionError):
                call = None
            return Parsed(text=text) if call is None else Parsed(calls=[call])
        return Parsed(reasoning=text) if self.is_reasoning else Parsed(text=text)


def _could_be_head(text: str) -> bool:
    """Whether a text without <|message|> begins like the head of a message."""
    starts = (_START, _CHANNEL, _TO)
    return bool(_HEAD.match(text)) or any(tag.startswith(text) for tag in starts)


class Harmony(ToolFormat):
    """Format of gpt-oss."""

    text = _CHANNEL + _START + _MESSAGE + _END
    has_channels = True
    name = "harmony"

    def parser(self, tools: Mapping[str, Json]) -> AnswerParser:
        """Build the parser of an answer."""
        return HarmonyParser(tools)

    def grammar(self, functions: Sequence[Json], lark: Lark, is_single: bool) -> str:
        """Build the grammar of one call, which ends the answer."""

        def call(i: int, function: Json, schema: Json) -> list[str]:
            recipient = f"{_CHANNEL}commentary to=functions.{function['name']} "
            head = lark(f"{recipient}<|constrain|>json{_MESSAGE}")
            return [f"{head} arguments{i}", json_rule(f"arguments{i}", schema)]

        return "\n".join(["start: call", *call_rules(functions, call)])

    def around(self, lark: Lark, has_calls: bool) -> str:
        """Build the grammar of an optional analysis and the answer."""
        head = "" if has_calls else lark(f"{_CHANNEL}final{_MESSAGE}")
        analysis = lark(f"{_CHANNEL}analysis{_MESSAGE}")
        return "\n".join(
            [
                f"start: analysis? {head} @answer",
                f"analysis: {analysis} TEXT {lark(f'{_END}{_START}assistant')}",
                f"TEXT: {TEXT}",
            ]
        )


MARKS = ()  # found by the template alone
FORMAT = Harmony()
