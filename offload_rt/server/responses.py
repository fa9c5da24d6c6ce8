"""Responses in the formats of OpenAI: whole answers and chunks of a stream."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from typing import Any

from transformers import PreTrainedTokenizerBase

from offload_rt.llm import Piece
from offload_rt.sampling import Logprob
from offload_rt.server.protocol import ChatRequest, CompletionRequest
from offload_rt.server.tools import ToolParser
from offload_rt.text.detokenize import TextStream, token_bytes

Json = dict[str, Any]
Logprobs = Sequence[dict[int, Logprob]]
_MIN_LOGPROB = -9999.0  # JSON has no infinity


@dataclass
class Choice:
    """One answer so far.

    text      content without tool calls
    end       finish reason of the sequence; None before the end
    position  position of the next token in the text; None unless log-probabilities need it
    """

    tools: ToolParser
    text: str = ""
    n_tokens: int = 0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    end: str | None = None
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


class Answer:
    """All answers to one request; answers to the same prompt are adjacent.

    n_prompt  tokens of all prompts
    """

    def __init__(
        self,
        request: CompletionRequest | ChatRequest,
        name: str,
        n: int,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self.n_prompt = 0
        self._chat = request if isinstance(request, ChatRequest) else None
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        tool_names = self._chat.tool_names if self._chat else frozenset[str]()
        self.choices = [Choice(ToolParser(tool_names)) for _ in range(n)]

    def start(self, prompts: Sequence[list[int]]) -> None:
        """Prepare the answers to tokenized prompts."""
        self.n_prompt = sum(map(len, prompts))
        has_offsets = self._chat is None and self._request.logprobs is not None
        if self._tokenizer is None or not has_offsets:
            return
        n = len(self.choices) // len(prompts)
        for i, choice in enumerate(self.choices):
            context = [] if self._request.echo else prompts[i // n]
            choice.position = TextStream(self._tokenizer, context, ())

    def role_chunks(self) -> list[Json]:
        """Return the first chunks of a chat stream, with the role of each answer."""
        if self._chat is None:
            return []
        delta = {"role": "assistant", "content": ""}
        head = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": i, **head}]) for i in range(len(self.choices))]

    def echo(self, i: int, prompt: list[int], logprobs: Logprobs) -> Json:
        """Start an answer with its prompt. Returns the chunk of a stream."""
        choice = self.choices[i]
        if self._tokenizer is not None:
            choice.text = str(self._tokenizer.decode(prompt, skip_special_tokens=True))
        choice.logprobs = [*logprobs]
        choice.offsets = choice.locate(prompt[: len(logprobs)])
        part = {"index": i, "text": choice.text, "finish_reason": None}
        return self._chunk([part | {"logprobs": _logprobs(logprobs, choice.offsets)}])

    def add(self, i: int, piece: Piece) -> Json:
        """Append the result of one pass to an answer. Returns the chunk of a stream."""
        choice = self.choices[i]
        if self._request.reads_only:
            piece = replace(piece, text="", token_ids=[], logprobs=[])
        text, calls = choice.tools.feed(piece.text)
        if piece.finish_reason is not None:
            choice.end = piece.finish_reason
            rest = choice.tools.end()
            text += rest.text
            calls += rest.calls
        first_call = len(choice.calls)
        if self._chat and self._chat.max_calls is not None:
            calls = calls[: self._chat.max_calls - first_call]
        offsets = choice.locate(piece.token_ids) if piece.logprobs else []
        choice.text += text
        choice.calls += calls
        choice.n_tokens += len(piece.token_ids)
        choice.logprobs += piece.logprobs
        choice.offsets += offsets
        part: Json = {"index": i, "finish_reason": choice.finish_reason}
        if self._chat is None:
            part |= {"text": text, "logprobs": _logprobs(piece.logprobs, offsets)}
        else:
            delta: Json = {"content": text} if text else {}
            if calls:
                indexed = [{"index": k, **call} for k, call in enumerate(calls, first_call)]
                delta["tool_calls"] = indexed
            part |= {"delta": delta, "logprobs": self._chat_logprobs(piece.logprobs)}
        return self._chunk([part]) | self._extras(piece)

    def usage_chunk(self) -> Json:
        """Return the last chunk of a stream with `include_usage`."""
        return self._chunk([]) | {"usage": self.usage()}

    def whole(self) -> Json:
        """Return the complete response."""
        choices = [self._whole(i) for i in range(len(self.choices))]
        return self._head | {"choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        """Count tokens so far."""
        n = sum(choice.n_tokens for choice in self.choices)
        total = self.n_prompt + n
        return {"prompt_tokens": self.n_prompt, "completion_tokens": n, "total_tokens": total}

    def _whole(self, i: int) -> Json:
        choice = self.choices[i]
        part: Json = {"index": i, "finish_reason": choice.finish_reason}
        if self._chat is None:
            logprobs = _logprobs(choice.logprobs, choice.offsets)
            return part | {"text": choice.text, "logprobs": logprobs}
        calls = {"tool_calls": choice.calls} if choice.calls else {}
        content = choice.text or (None if calls else "")
        message = {"role": "assistant", "content": content, "refusal": None, **calls}
        return part | {"message": message, "logprobs": self._chat_logprobs(choice.logprobs)}

    def _chunk(self, choices: list[Json]) -> Json:
        kind = {"object": "chat.completion.chunk"} if self._chat else {}
        usage = {"usage": None} if self._request.options.include_usage else {}
        return self._head | kind | {"choices": choices} | usage

    def _extras(self, piece: Piece) -> Json:
        """Return the fields of a chunk that `stream_options` requests."""
        options = self._request.options
        usage = {"usage": self.usage()} if options.continuous_usage_stats else {}
        return usage | ({"pass": _pass(piece)} if options.include_passes else {})

    def _chat_logprobs(self, logprobs: Logprobs) -> Json | None:
        """Convert log-probabilities for chats, with the `top_logprobs` best tokens each."""
        n_top = (self._chat and self._chat.top_logprobs) or 0
        content = []
        for candidates in logprobs:
            best = sorted(candidates.items(), key=lambda item: item[1].rank)[:n_top]
            entry = self._token_logprob(*next(iter(candidates.items())))
            content.append(entry | {"top_logprobs": [self._token_logprob(*item) for item in best]})
        return {"content": content, "refusal": None} if content else None

    def _token_logprob(self, token: int, logprob: Logprob) -> Json:
        raw = b"" if self._tokenizer is None else token_bytes(self._tokenizer, token)
        value = max(logprob.logprob, _MIN_LOGPROB)
        return {"token": logprob.decoded_token or "", "logprob": value, "bytes": list(raw)}


def _pass(piece: Piece) -> Json | None:
    """Describe the pass of a piece: parents of the tree nodes, accepted path, and times."""
    if piece.made_by is None:
        return None
    topology, path, times = piece.made_by
    seconds = times.ended - times.started
    busy = min(times.link_busy_s / seconds, 1.0)
    tree = {"parents": topology.parents.tolist(), "path": [*path]}
    return {"tokens": len(piece.token_ids), **tree, "seconds": seconds, "link_busy": busy}


def _logprobs(logprobs: Logprobs, offsets: Sequence[int]) -> Json | None:
    """Convert log-probabilities for completions; None without any.

    logprobs  per token its candidates, the token itself first; NaN for the first prompt token
    """
    if not logprobs:
        return None
    tokens = []
    values: list[float | None] = []
    candidates_by_text: list[dict[str, float] | None] = []
    for candidates in logprobs:
        token = next(iter(candidates.values()))
        tokens.append(token.decoded_token or "")
        if isnan(token.logprob):
            values.append(None)
            candidates_by_text.append(None)
            continue
        values.append(max(token.logprob, _MIN_LOGPROB))
        by_text: dict[str, float] = {}
        for candidate in candidates.values():
            # Parts of characters share a text; the first candidate is the token itself.
            text = candidate.decoded_token or ""
            by_text.setdefault(text, max(candidate.logprob, _MIN_LOGPROB))
        candidates_by_text.append(by_text)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": candidates_by_text,
        "text_offset": list(offsets),
    }
