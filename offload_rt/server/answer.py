"""Answers to a request so far, independent of the API."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import nan

from transformers import PreTrainedTokenizerBase

from offload_rt.llm import Piece
from offload_rt.models.image_prompt import EncodedPrompt, token_ids
from offload_rt.sampling import Logprob
from offload_rt.server.bodies import Json
from offload_rt.server.call_format import AnswerParser, Parsed
from offload_rt.server.chat_format import ChatFormat
from offload_rt.server.prompts import GenerationRequest
from offload_rt.server.protocol import ChatRequest
from offload_rt.text.detokenize import TextStream

Logprobs = Sequence[dict[int, Logprob]]


@dataclass(frozen=True)
class Delta:
    """New parts of an answer.

    index    position of the answer in the request
    offsets  text offsets of the tokens in `logprobs`
    piece    result of the pass; None for an echo of the prompt
    """

    index: int
    parsed: Parsed
    logprobs: Logprobs
    offsets: Sequence[int]
    piece: Piece | None


@dataclass
class Choice:
    """One answer so far.

    parser    separates reasoning and calls; None for completions
    text      content without reasoning and calls
    end       finish reason of the sequence; None before the end
    stop      stop string or token that ended the answer
    position  position of the next token in the text; None unless log-probabilities need it
    """

    parser: AnswerParser | None = None
    text: str = ""
    reasoning: str = ""
    n_tokens: int = 0
    n_reasoning: int = 0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    end: str | None = None
    stop: str | int | None = None
    position: TextStream | None = None

    @property
    def finish_reason(self) -> str | None:
        """Finish reason as named by OpenAI; None before the end."""
        return "tool_calls" if self.end and self.calls else self.end

    def locate(self, tokens: Sequence[int]) -> list[int]:
        """Return the text offset of each token, and advance behind the tokens.

        Hidden tokens have no text. Tokens inside a character share its offset.
        """
        if self.position is None:
            return [0] * len(tokens)
        offsets = []
        for token in tokens:
            offsets.append(len(self.position.text))
            self.position.add(token)
        return offsets


@dataclass(eq=False)
class Answer:
    """All answers to one request; answers to the same prompt are adjacent."""

    request: GenerationRequest
    n: int
    tokenizer: PreTrainedTokenizerBase | None
    n_prompt: int = 0

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in range(self.n)]

    @property
    def n_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(choice.n_tokens for choice in self.choices)

    @property
    def n_reasoning(self) -> int:
        """Number of tokens of passes that began inside the reasoning."""
        return sum(choice.n_reasoning for choice in self.choices)

    def start(self, prompts: Sequence[EncodedPrompt], chat_format: ChatFormat) -> None:
        """Prepare the answers to tokenized prompts."""
        self.n_prompt = sum(map(len, prompts))
        request = self.request
        for i, choice in enumerate(self.choices):
            prompt = token_ids(prompts[i * len(prompts) // self.n])
            if isinstance(request, ChatRequest):
                functions = request.functions.items()
                schemas = {name: entry.get("parameters") or {} for name, entry in functions}
                choice.parser = chat_format.parser(schemas, chat_format.tail(prompt))
            elif request.logprobs is not None and self.tokenizer is not None:
                context = [] if request.echo else prompt
                skips_special = request.skip_special_tokens is not False
                choice.position = TextStream(self.tokenizer, context, (), skips_special)

    def echo(self, i: int, prompt: list[int], rows: Sequence[dict[int, Logprob] | None]) -> Delta:
        """Start an answer with its prompt, whose first token has no log-probabilities."""
        choice = self.choices[i]
        first = ""
        if self.tokenizer is not None:
            choice.text = str(self.tokenizer.decode(prompt, skip_special_tokens=True))
            first = str(self.tokenizer.decode(prompt[:1]))
        nothing = {prompt[0]: Logprob(nan, 0, first)}
        choice.logprobs = [candidates or nothing for candidates in rows]
        choice.offsets = choice.locate(prompt[: len(rows)])
        return Delta(i, Parsed(text=choice.text), choice.logprobs, choice.offsets, None)

    def add(self, i: int, piece: Piece) -> Delta:
        """Append the result of one pass to an answer."""
        choice = self.choices[i]
        if self.request.reads_only:
            piece = replace(piece, text="", token_ids=[], logprobs=[])
        parsed = Parsed(text=piece.text)
        if choice.parser is not None:
            choice.n_reasoning += len(piece.token_ids) if choice.parser.is_reasoning else 0
            parsed = choice.parser.feed(piece.text, piece.finish_reason is not None)
        choice.end = piece.finish_reason
        choice.stop = piece.stop_reason
        if self.request.parallel_tool_calls is False:
            parsed = parsed._replace(calls=parsed.calls[: 1 - len(choice.calls)])
        offsets = choice.locate(piece.token_ids) if piece.logprobs else []
        choice.reasoning += parsed.reasoning
        choice.text += parsed.text
        choice.calls += parsed.calls
        choice.n_tokens += len(piece.token_ids)
        choice.logprobs += piece.logprobs
        choice.offsets += offsets
        return Delta(i, parsed, piece.logprobs, offsets, piece)


def event(content: Json, name: str | None = None) -> str:
    """Format a server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"
