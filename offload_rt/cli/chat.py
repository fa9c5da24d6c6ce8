"""`offload-rt chat`: a conversation in the terminal, or one message per line of stdin.

Answers go to stdout while they are produced, everything else to stderr. The KV cache of the
conversation is kept between messages.
"""

import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from offload_rt.cli.conversation import COMMANDS, PARAMETERS, Conversation, Message, split_command
from offload_rt.cli.flags import Parser, engine_config, from_flags
from offload_rt.cli.process import command, interrupts_held
from offload_rt.cli.run import TemplateSettings
from offload_rt.config import EngineConfig, setting
from offload_rt.errors import CapacityError, OffloadError
from offload_rt.sampling_params import SamplingParams
from offload_rt.system.files import cache_directory
from offload_rt.text.reasoning import THINK, ReasoningSplitter, TextPart

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from offload_rt.llm import LLM
    from offload_rt.models.image_prompt import EncodedPrompt

_KEYS = "Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer, Ctrl-D ends"
_DUMB_KEYS = "Enter sends, Ctrl-C stops an answer, Ctrl-D ends"
_CHANGE = "/reset starts a new conversation"
_LONGER = f"{_CHANGE}; raise --max-model-len for longer ones"


@dataclass(frozen=True)
class ChatSettings:
    """Output of a conversation."""

    quiet: bool = setting(False, "no progress bar, and no line of figures after an answer")
    hide_thinking: bool = setting(False, "do not show the reasoning between <think> and </think>")
    plain: bool = setting(False, "print answers as plain text, without rendering Markdown")


new_parser = partial(
    Parser,
    "offload-rt chat",
    "Talk with a model larger than the memory of its device.",
    *(EngineConfig, ChatSettings, TemplateSettings, SamplingParams),
    without=("n", "logprobs", "prompt_logprobs"),
    examples=(
        "offload-rt chat Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B",
        "offload-rt chat DIR --chat-template FILE --temperature 0.7 --hide-thinking",
    ),
    defaults={"max_tokens": None},  # an answer ends at an end token or with the context
)


@command(new_parser)
def main(flags: Namespace) -> None:
    """Run the command."""
    settings = from_flags(ChatSettings, flags)
    params = from_flags(SamplingParams, flags)
    template = from_flags(TemplateSettings, flags)
    config = engine_config(flags)
    # Imported late: a wrong flag or path is reported before torch loads for seconds.
    from offload_rt.cli.format import follows, load
    from offload_rt.llm import LLM
    from offload_rt.system.trace import Trace

    if follows(config):
        return
    console = Console(stderr=True, quiet=settings.quiet)
    with LLM.open(config) as llm:
        # Report a missing or failing template before loading.
        template.encode(llm.requests, [{"role": "user", "content": "Hello"}])
        load(llm, console, Trace(on=False), params)
        if flags.max_tokens is flags.max_new_tokens is None:
            params = replace(params, max_tokens=None)
        conversation = Conversation(params, template.system, has_vision=llm.supports_images)
        chat = _Chat(llm, template, settings, console, conversation)
        for line in filter(None, read_messages()):
            if line == "/exit":
                break
            chat.handle(line)


@dataclass
class _Chat:
    llm: "LLM"
    template: TemplateSettings
    settings: ChatSettings
    console: Console
    conversation: Conversation
    figures: str = "no answer yet"

    def handle(self, line: str) -> None:
        """Execute a command or answer a message. Print an error and keep the conversation."""
        try:
            command, _ = split_command(line)
            if command == "/stats":
                messages = self.conversation.messages
                n_tokens = len(self._encode(messages)) if messages else 0
                length = f"the conversation has {n_tokens} of {self.llm.max_model_len} tokens"
                print(f"{self.figures}; {length}", file=sys.stderr)
            elif command == "/regen":
                self._answer(self.conversation.regenerate())
            # Paths such as /usr/bin are messages.
            elif command.startswith("/") and command[1:].isalpha():
                print(self.conversation.run(line), file=sys.stderr)
            else:
                self._answer(self.conversation.ask(line))
        except OffloadError as error:
            print(f"error: {error.for_command_line}", file=sys.stderr)

    def _answer(self, messages: list[Message]) -> None:
        change = _LONGER if self.llm.requests.has_more_positions else _CHANGE
        try:
            prompt = self._encode(messages)
            self.llm.requests.check_prompt(prompt)
        except CapacityError as error:
            problem = "the conversation no longer fits the context"
            raise CapacityError(problem, need=error.need, have=error.have, change=change) from error
        with interrupts_held() as received:
            text, n_tokens = self._stream(prompt, received)
        self.conversation.add_answer(messages, text)
        if len(prompt) + n_tokens >= self.llm.max_model_len:
            have = f"room for {self.llm.max_model_len} tokens"
            problem = "the answer is cut off: the context is full"
            raise CapacityError(problem, have=have, change=change)

    def _encode(self, messages: list[Message]) -> "EncodedPrompt":
        template = replace(self.template, system=self.conversation.system)
        return template.encode(self.llm.requests, messages)

    def _stream(self, prompt: "EncodedPrompt", interrupts: list[int]) -> tuple[str, int]:
        """Print an answer until its end or an interrupt. Returns text and number of tokens."""
        from offload_rt.models.image_prompt import token_ids

        tokenizer = self.llm.tokenizer
        tail = "" if tokenizer is None else str(tokenizer.decode(token_ids(prompt)[-8:]))
        splitter = ReasoningSplitter(THINK.opens(tail))
        view = self._view()
        text = ""
        n_tokens = 0
        n_passes = 0
        started = time.perf_counter()
        pieces = self.llm.stream(prompt, self.conversation.params)
        with closing(pieces):  # type: ignore[type-var]  # a generator
            for piece in pieces:
                text += piece.text
                n_tokens += len(piece.token_ids)
                n_passes += 1
                is_last = piece.output is not None or bool(interrupts)
                for part in splitter.add(piece.text, is_last):
                    if not (part.is_reasoning and self.settings.hide_thinking):
                        view.add(part)
                if interrupts:
                    break
        view.close()
        rate = n_tokens / (time.perf_counter() - started)
        per_pass = n_tokens / n_passes
        self.figures = f"{n_tokens} tokens, {rate:.2f} tokens/s, {per_pass:.2f} tokens per pass"
        if self.console.is_terminal:
            self.console.print(self.figures, style="dim", highlight=False)
        return text, n_tokens

    def _view(self) -> "PlainView | MarkdownView":
        console = Console()
        is_plain = self.settings.plain or not console.is_interactive
        return PlainView() if is_plain else MarkdownView(console)


def read_messages() -> Iterator[str]:
    """Yield messages: edited in a terminal until Ctrl-D or Ctrl-C, otherwise lines of stdin."""
    if not sys.stdin.isatty():
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        yield from (line.strip() for line in sys.stdin)
        return
    from prompt_toolkit.utils import is_dumb_terminal

    is_dumb = is_dumb_terminal()
    prompt: Callable[[str], str] = input if is_dumb else _session().prompt
    keys = _DUMB_KEYS if is_dumb else _KEYS
    print(f"{keys}; /help lists commands", file=sys.stderr)
    while True:
        try:
            text = prompt("> ")
        except KeyboardInterrupt:  # pressed too late for an answer: keep the conversation
            print(keys, file=sys.stderr)
            continue
        except EOFError:
            return
        yield text.strip()


def _session() -> "PromptSession[str]":
    from prompt_toolkit import PromptSession, completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    # Not c-j: Enter pressed during an answer arrives as c-j.
    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    class CommandCompleter(completion.Completer):
        """Complete commands, and behind a command its paths or names."""

        paths = completion.PathCompleter(expanduser=True)
        lines = completion.WordCompleter(
            [*COMMANDS, *(f"/set {name}" for name in PARAMETERS)], sentence=True
        )

        def get_completions(
            self, document: Document, event: completion.CompleteEvent
        ) -> Iterator[completion.Completion]:
            command, space, rest = document.text_before_cursor.partition(" ")
            if space and command in ("/file", "/image", "/save", "/load"):
                yield from self.paths.get_completions(Document(rest), event)
            elif command.startswith("/"):
                yield from self.lines.get_completions(document, event)

    history = cache_directory() / "chat_history"
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        history.touch(mode=0o600)
    except OSError:
        history = Path("/dev/null")
    return PromptSession(
        multiline=True,
        key_bindings=keys,
        completer=CommandCompleter(),
        complete_while_typing=False,
        history=FileHistory(str(history)),
    )


class PlainView:
    """Print the answer to stdout as it is produced, with a blank line behind the reasoning."""

    _is_reasoning = False

    def add(self, part: TextPart) -> None:
        """Print the text."""
        if self._is_reasoning and not part.is_reasoning:
            print("\n")
        self._is_reasoning = part.is_reasoning
        print(part.text, end="", flush=True)

    def close(self) -> None:
        """Print a line break."""
        print(flush=True)


class MarkdownView:
    """Print each finished block of an answer as Markdown; the unfinished block follows live."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._reasoning = ""  # its last line
        self._live = Live(console=console, transient=True, refresh_per_second=10)
        self._live.start()

    def add(self, part: TextPart) -> None:
        """Show more text; reasoning is dimmed, and printed line by line."""
        from rich.markdown import Markdown  # imports for 0.1 s

        if part.is_reasoning:
            # The live display erases a line that it did not print itself.
            lines, line_break, self._reasoning = (self._reasoning + part.text).rpartition("\n")
            if line_break:
                self._console.print(Text(lines, style="dim"))
            self._live.update(Text(self._reasoning, style="dim"))
            return
        self._end_reasoning()
        self._text += part.text
        done, self._text = split_blocks(self._text)
        if done.strip():
            self._console.print(Markdown(done))
        n_lines = max(self._console.height - 2, 1)
        self._live.update(Text("\n".join(self._text.splitlines()[-n_lines:])))

    def close(self) -> None:
        """Print the last block."""
        from rich.markdown import Markdown

        self._end_reasoning()
        self._live.stop()
        if self._text.strip():
            self._console.print(Markdown(self._text))

    def _end_reasoning(self) -> None:
        if self._reasoning:
            self._live.update("")
            self._console.print(Text(f"{self._reasoning}\n", style="dim"))
            self._reasoning = ""


def split_blocks(text: str) -> tuple[str, str]:
    """Split Markdown after its last complete block: a blank line or the end of a fenced block."""
    end = 0
    offset = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        offset += len(line)
        if not line.endswith("\n"):
            break
        mark = re.match(r" {0,3}(`{3,}|~{3,})", line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip(" \n").strip(fence[0]):
                fence = ""
                end = offset
        elif mark:
            fence = mark[1]
        elif not line.strip():
            end = offset
    return text[:end], text[end:]
