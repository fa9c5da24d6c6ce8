"""Input and output of a conversation: a terminal with line editing, or plain streams."""

import re
import sys
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offload_rt.cli.conversation import COMMANDS, PARAMETERS
from offload_rt.system.files import cache_directory
from offload_rt.text.reasoning import TextPart

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from rich.console import Console

_KEYS = "Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer, Ctrl-D ends"
_DUMB_KEYS = "Enter sends, Ctrl-C stops an answer, Ctrl-D ends"


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
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import (
        CompleteEvent,
        Completer,
        Completion,
        PathCompleter,
        WordCompleter,
    )
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

    class CommandCompleter(Completer):
        """Complete commands, and behind a command its paths or names."""

        commands = WordCompleter(list(COMMANDS), WORD=True)
        paths = PathCompleter(expanduser=True)
        names = WordCompleter(PARAMETERS)

        def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
            command, space, rest = document.text_before_cursor.partition(" ")
            if not command.startswith("/"):
                return
            if not space:
                yield from self.commands.get_completions(document, event)
            elif command in ("/file", "/image", "/save", "/load"):
                yield from self.paths.get_completions(Document(rest), event)
            elif command == "/set":
                yield from self.names.get_completions(Document(rest), event)

    return PromptSession(
        multiline=True,
        key_bindings=keys,
        completer=CommandCompleter(),
        complete_while_typing=False,
        history=FileHistory(str(_history_file())),
    )


def _history_file() -> Path:
    """File with earlier messages; the null device when no file can be written."""
    try:
        folder = cache_directory()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "chat_history"
        path.touch(mode=0o600)
    except OSError:
        return Path("/dev/null")
    return path


class AnswerView(Protocol):
    """Shows an answer while it is produced."""

    def add(self, part: TextPart) -> None:
        """Show more text."""

    def close(self) -> None:
        """End the answer with a line break."""


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

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        self._console = console
        self._text = ""
        self._reasoning = ""  # its last line
        self._live = Live(console=console, transient=True, refresh_per_second=10)
        self._live.start()

    def add(self, part: TextPart) -> None:
        """Show more text; reasoning is dimmed, and printed line by line."""
        from rich.markdown import Markdown
        from rich.text import Text

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
        """Print the last line of the reasoning and a blank line."""
        from rich.text import Text

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
