"""Format of a model's answers: reasoning and tool calls."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from jinja2 import TemplateError
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from offload_rt.errors import SettingsError
from offload_rt.server.bodies import Json
from offload_rt.server.call_format import AnswerParser, CallFormat, Parsed
from offload_rt.server.call_grammar import text_until
from offload_rt.server.call_parser import parser_of
from offload_rt.server.derivation import Render, derive_calls, derive_tags, renderer, shows_system
from offload_rt.system import registry
from offload_rt.text.reasoning import THINK, ReasoningSplitter, Tags

_T = TypeVar("_T")
_FOLDER = "server.tool_formats"
_TAGS = {"think": THINK, "mistral": Tags("[THINK]", "[/THINK]")}


@dataclass
class TaggedParser(AnswerParser):
    """Parser of reasoning between tags, followed by content and tool calls."""

    splitter: ReasoningSplitter
    tools: AnswerParser

    @property
    def is_reasoning(self) -> bool:
        return self.splitter.is_reasoning

    def feed(self, text: str, is_last: bool = False) -> Parsed:
        parts = [
            Parsed(reasoning=part.text) if part.is_reasoning else self.tools.feed(part.text)
            for part in self.splitter.add(text, is_last)
        ]
        return Parsed.join([*parts, self.tools.feed("", is_last)])


@dataclass(frozen=True)
class ChatFormat:
    """Format of the answers of a model; `tags` are the texts around its reasoning."""

    tokenizer: PreTrainedTokenizerBase | None
    tool_format: CallFormat
    tags: Tags | None

    @classmethod
    def select(
        cls, tokenizer: PreTrainedTokenizerBase | None, tool_parser: str, reasoning_parser: str
    ) -> "ChatFormat":
        """Select the parsers; `auto` decides by the chat template.

        Raises SettingsError for unknown names and contradictory formats.
        """
        render = renderer(tokenizer) if tokenizer is not None and tokenizer.chat_template else None
        template = str(tokenizer and tokenizer.chat_template)
        tool_format = _tool_format_of(tokenizer, template, render)
        if tool_parser != "auto":
            tool_format = registry.find(_FOLDER, tool_parser).FORMAT
        style = tool_format.style._replace(has_system=bool(_derived(shows_system, render)))
        has_channels = tool_format.has_channels
        known = ("auto", *(["harmony"] if has_channels else _TAGS), "none")
        if reasoning_parser not in known:
            problem = f"--reasoning-parser={reasoning_parser} with tool calls of {tool_parser}"
            raise SettingsError(problem, need=f"one of {', '.join(known)}")
        tags = _TAGS.get(reasoning_parser)
        if reasoning_parser == "auto" and not has_channels:
            used = (tags for tags in _TAGS.values() if tags.closing in template)
            tags = _derived(derive_tags, render) or next(used, None)
        has_channels &= reasoning_parser != "none"
        tool_format = replace(tool_format, style=style, has_channels=has_channels)
        return cls(tokenizer, tool_format, tags)

    @property
    def is_unknown(self) -> bool:
        """Whether the template supports tools, but its format of calls is a guess."""
        template = str(self.tokenizer and self.tokenizer.chat_template)
        return self.tool_format.name not in ("derived", "harmony") and "tools" in template

    @property
    def needs_special(self) -> bool:
        """Whether the parser needs special tokens in the text."""
        text = "".join((self.tool_format.text, *(self.tags or ())))
        return any(token.special and str(token) in text for token in self._added_tokens().values())

    def tail(self, prompt: list[int]) -> str:
        """Return the end of a prompt, which shows whether the prompt contains reasoning tags."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(prompt[-8:]))

    def parser(self, tools: Mapping[str, Json], tail: str) -> AnswerParser:
        """Build the parser of an answer from JSON schemas of tools by name and the prompt's end."""
        parser = parser_of(self.tool_format, tools)
        if self.tags is None:
            return parser
        return TaggedParser(ReasoningSplitter(self.tags.opens(tail), self.tags), parser)

    def around(self, tail: str, has_calls: bool) -> str | None:
        """Build the grammar around a constrained answer; None if nothing precedes the answer."""
        around = self.tool_format.around(self.lark, has_calls)
        if around is not None or self.tags is None or self.tags.closes(tail):
            return around
        opening = f"({self.lark(self.tags.opening)} rest)?"
        if self.tags.opens(tail):
            opening = "rest"
        return f"start: {opening} @answer\n{text_until('rest', self.lark(self.tags.closing))}"

    def lark(self, text: str) -> str:
        """Convert a text to a Lark expression of strings and special tokens."""
        # llguidance never spells added tokens such as <tool_call> in strings.
        parts = self._added.split(text) if self._ids else [text]
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {str(token): i for i, token in self._added_tokens().items()}

    @cached_property
    def _added(self) -> re.Pattern[str]:
        names = sorted(map(re.escape, self._ids), key=len, reverse=True)
        return re.compile(f"({'|'.join(names)})")

    def _added_tokens(self) -> Mapping[int, AddedToken]:
        return {} if self.tokenizer is None else self.tokenizer.added_tokens_decoder


def _tool_format_of(
    tokenizer: PreTrainedTokenizerBase | None, template: str, render: Render | None
) -> CallFormat:
    form: CallFormat = registry.find(_FOLDER, "harmony").FORMAT
    if "<|channel|>" in template:
        return form
    if derived := _derived(derive_calls, render):
        return derived
    known = template + " ".join(tokenizer.get_added_vocab() if tokenizer else ())
    form = registry.find(_FOLDER, "generic").FORMAT
    for name in registry.names(_FOLDER) if "tools" in template else ():
        entry = registry.find(_FOLDER, name)
        form = entry.FORMAT if any(mark in known for mark in entry.MARKS) else form
    return form


def _derived(derive: Callable[[Render], _T], render: Render | None) -> _T | None:
    try:
        return derive(render) if render else None
    except TemplateError:
        return None
