"""Answers in OpenAI's shapes: whole ones, and the chunks of a stream."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import isnan
from typing import Any

from offload_rt.llm import Output, Piece
from offload_rt.sampling import Logprob
from offload_rt.server.protocol import ChatRequest, CompletionRequest
from offload_rt.server.tools import ToolText

Json = dict[str, Any]
Logprobs = Sequence[dict[int, Logprob]]
_LEAST = -9999.0  # of logarithms: JSON has no infinity


@dataclass
class Choice:
    """One of the answers to a request, as far as it has come.

    text      without calls of tools, which are in `calls` at the end
    logprobs  of its tokens, where they were asked for
    """

    tools: ToolText
    text: str = ""
    n_tokens: int = 0
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    output: Output | None = None

    @property
    def finish_reason(self) -> str | None:
        """By OpenAI's names; None while it goes on."""
        return None if self.output is None else "tool_calls" if self.calls else self.output.finish_reason


class Answer:
    """What becomes of a request of either kind, in n answers. Those to a prompt come one behind the other.

    n_prompt  tokens of all prompts
    """

    def __init__(self, request: CompletionRequest | ChatRequest, name: str, n: int) -> None:
        self._request, self.n_prompt = request, 0
        self._chat = request if isinstance(request, ChatRequest) else None
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        offered = self._chat is not None and bool(self._chat.offered_tools)
        self.choices = [Choice(ToolText(offered)) for _ in range(n)]

    def begin(self) -> list[Json]:
        """The first chunks of a stream: who speaks in each answer of a chat."""
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(len(self.choices))
        ]
        return [self._chunk([one]) for one in choices] if self._chat else []

    def echo(self, i: int, text: str, logprobs: Logprobs) -> Json:
        """Begin an answer with its prompt; returns the chunk of a stream."""
        self.choices[i].text, self.choices[i].logprobs = text, [*logprobs]
        return self._chunk([{"index": i, "text": text, "logprobs": _logprobs(logprobs, 0), "finish_reason": None}])

    def take(self, i: int, piece: Piece) -> Json:
        """Add what a pass brought to an answer; returns the chunk of a stream."""
        choice = self.choices[i]
        if self._request.reads_only:
            piece = replace(piece, text="", token_ids=[], logprobs=[])
        n_before, text = len(choice.text), choice.tools.take(piece.text)
        if piece.output is not None:
            rest, choice.calls = choice.tools.end()
            text, choice.output = text + rest, piece.output
        choice.text += text
        choice.n_tokens += len(piece.token_ids)
        choice.logprobs += piece.logprobs
        part: Json = {"index": i, "finish_reason": choice.finish_reason}
        if self._chat is None:
            part |= {"text": text, "logprobs": _logprobs(piece.logprobs, n_before)}
        else:
            calls = [{"index": k, **call} for k, call in enumerate(choice.calls)]
            delta = ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})
            part |= {"delta": delta, "logprobs": _chat_logprobs(piece.logprobs, self._chat.top_logprobs or 0)}
        chunk = self._chunk([part])
        options = self._request.options
        if options.continuous_usage_stats:
            chunk["usage"] = self.usage()
        if options.include_passes:
            chunk["pass"] = _pass(piece)
        return chunk

    def end(self) -> Json:
        """The last chunk of a stream whose request asked for the usage."""
        return self._chunk([]) | {"usage": self.usage()}

    def whole(self) -> Json:
        """The answer in one piece."""
        return self._head | {"choices": [self._whole(i) for i in range(len(self.choices))], "usage": self.usage()}

    def usage(self) -> Json:
        """Tokens so far."""
        n = sum(one.n_tokens for one in self.choices)
        return {"prompt_tokens": self.n_prompt, "completion_tokens": n, "total_tokens": self.n_prompt + n}

    def _whole(self, i: int) -> Json:
        choice = self.choices[i]
        part: Json = {"index": i, "finish_reason": choice.finish_reason}
        if self._chat is None:
            return part | {"text": choice.text, "logprobs": _logprobs(choice.logprobs, 0)}
        calls = {"tool_calls": choice.calls} if choice.calls else {}
        message = {"role": "assistant", "content": choice.text or (None if calls else ""), "refusal": None, **calls}
        return part | {"message": message, "logprobs": _chat_logprobs(choice.logprobs, self._chat.top_logprobs or 0)}

    def _chunk(self, choices: list[Json]) -> Json:
        kind = {"object": "chat.completion.chunk"} if self._chat else {}
        usage = {"usage": None} if self._request.options.include_usage else {}
        return self._head | kind | {"choices": choices} | usage


def _pass(piece: Piece) -> Json | None:
    """The pass that brought a piece: its tree by parents, the nodes that were accepted, and what it took."""
    if piece.made_by is None:
        return None
    topology, path, times = piece.made_by
    seconds = times.ended - times.started
    busy = min(times.link_busy_s / seconds, 1.0)
    tree = {"parents": topology.parents.tolist(), "path": [*path]}
    return {"tokens": len(piece.token_ids), **tree, "seconds": seconds, "link_busy": busy}


def _logprobs(logprobs: Logprobs, offset: int) -> Json | None:
    """Of tokens that begin at a character of the text, as completions have them; None without any.

    Each has the token itself first. That of a prompt's first token, which nothing predicts, is not a number.
    """
    if not logprobs:
        return None
    own = [next(iter(one.values())) for one in logprobs]
    tokens = [one.decoded_token or "" for one in own]
    is_known = [not isnan(one.logprob) for one in own]
    return {
        "tokens": tokens,
        "token_logprobs": [
            max(one.logprob, _LEAST) if known else None for one, known in zip(own, is_known, strict=True)
        ],
        "top_logprobs": [
            {some.decoded_token: max(some.logprob, _LEAST) for some in one.values()} if known else None
            for one, known in zip(logprobs, is_known, strict=True)
        ],
        "text_offset": [*accumulate(map(len, tokens[:-1]), initial=offset)],
    }


def _chat_logprobs(logprobs: Logprobs, n_top: int) -> Json | None:
    """The same as chats have them, with the `n_top` most probable tokens in each place."""
    content = []
    for one in logprobs:
        own, best = next(iter(one.values())), sorted(one.values(), key=lambda some: some.rank)[:n_top]
        content.append({**_token(own), "top_logprobs": [_token(some) for some in best]})
    return {"content": content, "refusal": None} if content else None


def _token(one: Logprob) -> Json:
    text = one.decoded_token or ""
    return {"token": text, "logprob": max(one.logprob, _LEAST), "bytes": list(text.encode())}
