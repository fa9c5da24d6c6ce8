"""`offload-rt chat`: a conversation in the terminal, or a turn per line of any other stdin.

Answers stream to stdout, all other text to stderr. The KV cache is kept between turns.
"""

import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from io import TextIOWrapper
from typing import TYPE_CHECKING

from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.process import exit_code, interrupts_held, show_any_text
from offload_rt.cli.run import TemplateSettings
from offload_rt.config import EngineConfig, SamplingParams, setting
from offload_rt.errors import CapacityError, OffloadError, PromptError

if TYPE_CHECKING:
    from rich.console import Console

    from offload_rt.llm import LLM

_COMMANDS = """/reset   start a new conversation
/help    show this text
/exit    end, same as Ctrl-D
Ctrl-C   stop the answer; its text so far remains in the conversation"""
_CHANGE = "use /reset, or restart with a larger --max-model-len"


@dataclass(frozen=True)
class ChatSettings:
    """Output besides the conversation."""

    quiet: bool = setting(False, "no progress bar and no statistics")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    show_any_text()
    text = "Chat with a model larger than device memory."
    classes = EngineConfig, ChatSettings, TemplateSettings, SamplingParams
    parser = Parser("offload-rt chat", text, *classes, without=("n", "logprobs", "prompt_logprobs"))
    # answers end at an end token or at the context length
    parser.set_defaults(max_tokens=None)
    return exit_code(lambda: _chat(parser.parse_args(arguments)))


def _chat(flags: Namespace) -> None:
    settings = from_flags(ChatSettings, flags)
    config = from_flags(EngineConfig, flags)
    params = from_flags(SamplingParams, flags)
    template = from_flags(TemplateSettings, flags)
    # Imported late: report wrong flags and paths before loading torch, which takes seconds.
    from rich.console import Console

    from offload_rt.weights.checkpoint import check_paths

    check_paths(config)

    from offload_rt.cli.format import follow, load, quiet_libraries
    from offload_rt.llm import LLM
    from offload_rt.system.ranks import is_first
    from offload_rt.system.trace import Trace

    quiet_libraries()
    if not is_first():
        return follow(config)
    console = Console(stderr=True, quiet=settings.quiet)
    with LLM.open(config) as llm:
        # report a missing or failing template before loading
        template.encode(llm, [{"role": "user", "content": "Hello"}])
        load(llm, console, Trace(on=False), params)
        if flags.max_tokens is flags.max_new_tokens is None:
            params = replace(params, max_tokens=None)
        conversation = _Conversation(llm, template, params, console, [])
        for line in _lines():
            if line == "/exit":
                break
            if line == "/reset":
                conversation.turns = []
            elif re.fullmatch("/[a-z]+", line):
                print(
                    _COMMANDS if line == "/help" else f"unknown command {line}; see /help",
                    file=sys.stderr,
                )
            elif line:
                conversation.answer(line)


def _lines() -> Iterator[str]:
    """Yield lines of stdin until its end; of a terminal, until Ctrl-D or Ctrl-C."""
    if not sys.stdin.isatty():
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="replace")
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  # line editing in `input`

    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        yield line.strip()


@dataclass
class _Conversation:
    """turns  turns so far, without the system message"""

    llm: "LLM"
    template: TemplateSettings
    params: SamplingParams
    console: "Console"
    turns: list[dict[str, str]]

    def answer(self, text: str) -> None:
        """Stream the answer to a user turn. A rejected turn does not enter the conversation."""
        turns = [*self.turns, {"role": "user", "content": text}]
        try:
            ids = self.template.encode(self.llm, turns)
        except CapacityError as error:
            problem = "the conversation no longer fits the context"
            self._tell(CapacityError(problem, need=error.need, have=error.have, change=_CHANGE))
        except PromptError as error:
            self._tell(error)
        else:
            self.turns = [*turns, {"role": "assistant", "content": self._stream(ids)}]

    def _stream(self, ids: list[int]) -> str:
        text = ""
        n_tokens = 0
        n_passes = 0
        started = time.perf_counter()
        pieces = self.llm.stream(ids, self.params)
        with interrupts_held() as received, closing(pieces):  # type: ignore[type-var]  # a generator
            for piece in pieces:
                print(piece.text, end="", flush=True)
                text = text + piece.text
                n_tokens = n_tokens + len(piece.token_ids)
                n_passes = n_passes + 1
                if received:
                    break
        print(flush=True)
        rate = n_tokens / (time.perf_counter() - started)
        if self.console.is_terminal:
            figures = (
                f"{n_tokens} tokens, {rate:.2f} tokens/s, {n_tokens / n_passes:.2f} tokens per pass"
            )
            self.console.print(figures, style="dim", highlight=False)
        if len(ids) + n_tokens >= self.llm.max_model_len:
            have = f"room for {self.llm.max_model_len} tokens"
            self._tell(
                CapacityError(
                    "the answer is cut off: the context is full", have=have, change=_CHANGE
                )
            )
        return text

    def _tell(self, error: OffloadError) -> None:
        print(f"error: {error}", file=sys.stderr)
