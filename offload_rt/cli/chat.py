"""`offload-rt chat`: a conversation in the terminal, or one message per line of stdin.

Answers go to stdout while they are produced, everything else to stderr. The KV cache of the
conversation is kept between messages.
"""

import sys
import time
from argparse import Namespace
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offload_rt.cli.conversation import Conversation, Message, split_command
from offload_rt.cli.flags import Parser, from_flags
from offload_rt.cli.process import exit_code, interrupts_held, show_any_text
from offload_rt.cli.run import TemplateSettings
from offload_rt.config import EngineConfig, setting
from offload_rt.errors import CapacityError, OffloadError
from offload_rt.sampling_params import SamplingParams
from offload_rt.text.reasoning import THINK, ReasoningSplitter

if TYPE_CHECKING:
    from rich.console import Console

    from offload_rt.cli.terminal import AnswerView
    from offload_rt.llm import LLM
    from offload_rt.models.image_prompt import EncodedPrompt

_CHANGE = "/reset starts a new conversation"
_LONGER = f"{_CHANGE}; raise --max-model-len for longer ones"


@dataclass(frozen=True)
class ChatSettings:
    """Output of a conversation."""

    quiet: bool = setting(False, "no progress bar, and no line of figures after an answer")
    hide_thinking: bool = setting(False, "do not show the reasoning between <think> and </think>")
    plain: bool = setting(False, "print answers as plain text, without rendering Markdown")


def new_parser() -> Parser:
    """Return the parser of the command."""
    text = "Talk with a model larger than the memory of its device."
    classes = EngineConfig, ChatSettings, TemplateSettings, SamplingParams
    parser = Parser(
        "offload-rt chat",
        text,
        *classes,
        without=("n", "logprobs", "prompt_logprobs"),
        examples=(
            "offload-rt chat Qwen/Qwen3-8B --draft-model Qwen/Qwen3-0.6B",
            "offload-rt chat DIR --chat-template FILE --temperature 0.7 --hide-thinking",
        ),
    )
    # An answer ends at an end token or at the end of the context.
    parser.set_defaults(max_tokens=None)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns its exit code."""
    show_any_text()
    parser = new_parser()
    return exit_code(lambda: _chat(parser.parse_args(arguments)))


def _chat(flags: Namespace) -> None:
    settings = from_flags(ChatSettings, flags)
    config = from_flags(EngineConfig, flags)
    params = from_flags(SamplingParams, flags)
    template = from_flags(TemplateSettings, flags)
    # Imported late: a wrong flag or path is reported before torch loads for seconds.
    from rich.console import Console

    from offload_rt.weights.locate import check_paths

    check_paths(config)

    from offload_rt.cli.format import follow, load, quiet_libraries
    from offload_rt.cli.terminal import read_messages
    from offload_rt.llm import LLM
    from offload_rt.system.ranks import is_first
    from offload_rt.system.trace import Trace

    quiet_libraries()
    if not is_first():
        return follow(config)
    console = Console(stderr=True, quiet=settings.quiet)
    with LLM.open(config) as llm:
        # Report a missing or failing template before loading.
        template.encode(llm.requests, [{"role": "user", "content": "Hello"}])
        load(llm, console, Trace(on=False), params)
        if flags.max_tokens is flags.max_new_tokens is None:
            params = replace(params, max_tokens=None)
        conversation = Conversation(params, template.system, has_vision=llm.supports_images)
        chat = _Chat(llm, template, settings, console, conversation)
        for line in read_messages():
            if line == "/exit":
                break
            if line:
                chat.handle(line)


@dataclass
class _Chat:
    """Connects a conversation with a model, its input and its output.

    figures  figures of the last answer
    """

    llm: "LLM"
    template: TemplateSettings
    settings: ChatSettings
    console: "Console"
    conversation: Conversation
    figures: str = "no answer yet"

    def handle(self, line: str) -> None:
        """Execute a command or answer a message. Print an error and keep the conversation."""
        try:
            command, _ = split_command(line)
            if command == "/stats":
                print(f"{self.figures}; {self._length()}", file=sys.stderr)
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
        """Print the answer to a conversation that ends with a message of the user.

        Raises CapacityError or PromptError if the messages cannot be answered.
        """
        template = replace(self.template, system=self.conversation.system)
        change = _LONGER if self.llm.requests.has_more_positions else _CHANGE
        try:
            prompt = template.encode(self.llm.requests, messages)
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

    def _view(self) -> "AnswerView":
        from rich.console import Console

        from offload_rt.cli.terminal import MarkdownView, PlainView

        console = Console()
        is_plain = self.settings.plain or not console.is_interactive
        return PlainView() if is_plain else MarkdownView(console)

    def _length(self) -> str:
        """Tokens of the conversation, and the most that fit."""
        template = replace(self.template, system=self.conversation.system)
        messages = self.conversation.messages
        n_tokens = len(template.encode(self.llm.requests, messages)) if messages else 0
        return f"the conversation has {n_tokens} of {self.llm.max_model_len} tokens"
