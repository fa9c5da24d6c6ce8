"""Format of a model's answers: reasoning and tool calls."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from offload_rt.errors import SettingsError
from offload_rt.server.tool_parser import AnswerParser, Json, Parsed, ToolFormat
from offload_rt.server.xml_arguments import text_until
from offload_rt.system import registry
from offload_rt.text.reasoning import THINK, ReasoningSplitter, Tags

_FOLDER = "server.tool_formats"
_DEFAULT = "hermes"
_TAIL = 8  # tokens
_TAGS = {"think": THINK, "mistral": Tags("[THINK]", "[/THINK]")}


@dataclass
class TaggedParser(AnswerParser):
    """Parser of reasoning between tags, followed by content and tool calls."""

    splitter: ReasoningSplitter
    tools: AnswerParser

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self.splitter.is_reasoning

    def feed(self, text: str) -> Parsed:
        """Append generated text. Returns the parts that are now certain."""
        return self._parsed(text, is_last=False)

    def end(self) -> Parsed:
        """Return the rest."""
        return Parsed.join([self._parsed("", is_last=True), self.tools.end()])

    def _parsed(self, text: str, is_last: bool) -> Parsed:
        parts = self.splitter.add(text, is_last)
        return Parsed.join(
            Parsed(reasoning=part.text) if part.is_reasoning else self.tools.feed(part.text)
            for part in parts
        )


@dataclass
class PlainParser(AnswerParser):
    """Parser of channels without separate reasoning."""

    parser: AnswerParser

    def feed(self, text: str) -> Parsed:
        """Append generated text. Returns the parts that are now certain."""
        return _as_text(self.parser.feed(text))

    def end(self) -> Parsed:
        """Return the rest."""
        return _as_text(self.parser.end())


def _as_text(parsed: Parsed) -> Parsed:
    return Parsed(text=parsed.reasoning + parsed.text, calls=parsed.calls)


@dataclass(frozen=True)
class ChatFormat:
    """Format of the answers of a model.

    tool_format  format of tool calls
    tags         texts around the reasoning; None without such tags
    has_channel  whether the parser of `tool_format` separates the reasoning
    """

    tokenizer: PreTrainedTokenizerBase | None
    tool_format: ToolFormat
    tags: Tags | None
    has_channel: bool

    @classmethod
    def select(
        cls, tokenizer: PreTrainedTokenizerBase | None, tool_parser: str, reasoning_parser: str
    ) -> "ChatFormat":
        """Select the parsers; `auto` decides by the chat template.

        Raises SettingsError for unknown names and contradictory formats.
        """
        template = str(tokenizer and tokenizer.chat_template)
        name = _tool_format_of(template) if tool_parser == "auto" else tool_parser
        tool_format: ToolFormat = registry.find(_FOLDER, name).FORMAT
        has_channel = tool_format.around is not None
        known = ("harmony", "none") if has_channel else (*_TAGS, "none")
        if reasoning_parser == "auto":
            used = (kind for kind in _TAGS if not has_channel and _TAGS[kind].closing in template)
            reasoning_parser = next(used, "harmony" if has_channel else "none")
        elif reasoning_parser not in known:
            need = ", ".join(("auto", *known))
            problem = f"--reasoning-parser={reasoning_parser} with tool calls of {name}"
            raise SettingsError(problem, need=f"one of {need}")
        tags = _TAGS.get(reasoning_parser)
        return cls(tokenizer, tool_format, tags, reasoning_parser == "harmony")

    @property
    def needs_special(self) -> bool:
        """Whether the parser needs special tokens in the text."""
        special = {str(token) for token in self._added_tokens().values() if token.special}
        return not special.isdisjoint((*self.tool_format.markers, *(self.tags or ())))

    def tail(self, prompt: list[int]) -> str:
        """Return the end of a prompt, which shows whether the prompt contains reasoning tags."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(prompt[-_TAIL:]))

    def parser(self, tools: Mapping[str, Json], tail: str) -> AnswerParser:
        """Build the parser of an answer.

        tools  JSON schemas of the parameters, by name of the offered tools
        tail   end of the prompt
        """
        parser = self.tool_format.parser(tools)
        if self.tags is not None:
            return TaggedParser(ReasoningSplitter(self.tags.opens(tail), self.tags), parser)
        return parser if self.has_channel or not self.tool_format.around else PlainParser(parser)

    def call_grammar(self, functions: Sequence[Json], is_single: bool) -> str:
        """Build the Lark grammar of required calls; see `ToolFormat`."""
        return self.tool_format.grammar(functions, self._marker, is_single)

    def around(self, tail: str, has_calls: bool) -> str | None:
        """Build the grammar around a constrained answer; None if nothing precedes the answer.

        tail       end of the prompt
        has_calls  whether the constraint is a grammar of calls
        """
        if self.tool_format.around is not None:
            return self.tool_format.around(self._marker, has_calls)
        if self.tags is None or self.tags.closes(tail):
            return None
        rest = text_until("rest", self._marker(self.tags.closing))
        if self.tags.opens(tail):
            return f"start: rest @answer\n{rest}"
        return f"start: ({self._marker(self.tags.opening)} rest)? @answer\n{rest}"

    def _marker(self, text: str) -> str:
        # llguidance never spells added tokens such as <tool_call> in strings.
        matching = (i for i, token in self._added_tokens().items() if str(token) == text)
        token = next(matching, None)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def _added_tokens(self) -> Mapping[int, AddedToken]:
        return {} if self.tokenizer is None else self.tokenizer.added_tokens_decoder


def _tool_format_of(template: str) -> str:
    """Return the name of the tool format of a chat template."""
    formats = {name: registry.find(_FOLDER, name).FORMAT for name in registry.names(_FOLDER)}
    used = (
        name
        for name, entry in formats.items()
        if any(mark in template for mark in entry.template_marks)
    )
    return next(used, _DEFAULT)
