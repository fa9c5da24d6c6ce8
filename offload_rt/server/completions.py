"""Responses of completions and chat completions in the formats of OpenAI."""

import time
import uuid
from collections.abc import Sequence
from math import isnan

from offload_rt.llm import Piece
from offload_rt.sampling import Logprob
from offload_rt.server.answer import Answer, Choice, Delta, Logprobs, event
from offload_rt.server.bodies import Json
from offload_rt.server.protocol import ChatRequest, GenerationRequest, StreamOptions
from offload_rt.text.detokenize import token_bytes

_MIN_LOGPROB = -9999.0  # JSON has no infinity
_DONE = "data: [DONE]\n\n"


class CompletionWriter:
    """Formats answers to completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, answer: Answer, request: GenerationRequest, name: str) -> None:
        self.answer = answer
        self._options = request.stream_options or StreamOptions()
        self._head: Json = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "object": self.kind}
        self._head |= {"created": int(time.time()), "model": name}

    def start(self) -> list[str]:
        """Return the events before the first delta."""
        return []

    def add(self, delta: Delta) -> list[str]:
        """Return the chunk of a delta."""
        chunk = self._chunk([self._end(delta.index) | self._delta(delta)])
        if delta.piece is not None and self._options.include_passes:
            chunk["pass"] = _pass(delta.piece)
        return [event(chunk)]

    def end(self) -> list[str]:
        """Return the chunk with token counts, if requested, and the end of the stream."""
        usage = event(self._chunk([]) | {"usage": self.usage()})
        return [usage, _DONE] if self._options.include_usage else [_DONE]

    def error(self, error: Json) -> list[str]:
        """Return the last events of a stream that fails."""
        return [event({"error": error}), _DONE]

    def whole(self) -> Json:
        """Return the complete response."""
        answers = enumerate(self.answer.choices)
        choices = [self._end(i) | self._whole(choice) for i, choice in answers]
        return self._head | {"choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        """Count tokens so far."""
        n_prompt, n = self.answer.n_prompt, self.answer.n_tokens
        return {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}

    def _end(self, i: int) -> Json:
        choice = self.answer.choices[i]
        return {"index": i, "finish_reason": choice.finish_reason, "stop_reason": choice.stop}

    def _delta(self, delta: Delta) -> Json:
        return {"text": delta.parsed.text, "logprobs": _logprobs(delta.logprobs, delta.offsets)}

    def _whole(self, choice: Choice) -> Json:
        return {"text": choice.text, "logprobs": _logprobs(choice.logprobs, choice.offsets)}

    def _chunk(self, choices: list[Json]) -> Json:
        usage: Json = {}
        if self._options.include_usage:
            usage["usage"] = self.usage() if self._options.continuous_usage_stats else None
        return self._head | {"object": self.chunk_kind, "choices": choices} | usage


class ChatWriter(CompletionWriter):
    """Formats answers to chat completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, answer: Answer, request: ChatRequest, name: str) -> None:
        super().__init__(answer, request, name)
        self._n_top = request.top_logprobs or 0

    def start(self) -> list[str]:
        delta = {"role": "assistant", "content": ""}
        events = []
        for i in range(len(self.answer.choices)):
            head = {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = self._chunk([head])
            if chunk.get("usage"):  # the answers have tokens already
                chunk["usage"] |= {"completion_tokens": 0, "total_tokens": self.answer.n_prompt}
            events.append(event(chunk))
        return events

    def usage(self) -> Json:
        details = {"reasoning_tokens": self.answer.n_reasoning}
        return super().usage() | {"completion_tokens_details": details}

    def _delta(self, delta: Delta) -> Json:
        parsed = delta.parsed
        content: Json = {"reasoning_content": parsed.reasoning} if parsed.reasoning else {}
        if parsed.text:
            content["content"] = parsed.text
        if parsed.calls:
            n_earlier = len(self.answer.choices[delta.index].calls) - len(parsed.calls)
            calls = enumerate(parsed.calls, n_earlier)
            content["tool_calls"] = [{"index": k, **call} for k, call in calls]
        return {"delta": content, "logprobs": self._chat_logprobs(delta.logprobs)}

    def _whole(self, choice: Choice) -> Json:
        content = choice.text or (None if choice.calls else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = choice.calls
        return {"message": message, "logprobs": self._chat_logprobs(choice.logprobs)}

    def _chat_logprobs(self, logprobs: Logprobs) -> Json | None:
        """Convert log-probabilities for chats, with the `top_logprobs` best tokens each."""
        content = []
        for candidates in logprobs:
            best = sorted(candidates.items(), key=lambda item: item[1].rank)[: self._n_top]
            entry = self._token_logprob(*next(iter(candidates.items())))
            content.append(entry | {"top_logprobs": [self._token_logprob(*item) for item in best]})
        return {"content": content, "refusal": None} if content else None

    def _token_logprob(self, token: int, logprob: Logprob) -> Json:
        tokenizer = self.answer.tokenizer
        raw = b"" if tokenizer is None else token_bytes(tokenizer, token)
        value = max(logprob.logprob, _MIN_LOGPROB)
        return {"token": logprob.decoded_token or "", "logprob": value, "bytes": list(raw)}


def _pass(piece: Piece) -> Json | None:
    if piece.verified_in is None:
        return None
    topology, path, times = piece.verified_in
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
    content: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
    for candidates in logprobs:
        values: dict[str, float] = {}
        for candidate in candidates.values():
            # Parts of characters share a text; the first candidate is the token itself.
            text = candidate.decoded_token or ""
            values.setdefault(text, max(candidate.logprob, _MIN_LOGPROB))
        text, value = next(iter(values.items()))
        content["tokens"].append(text)
        content["token_logprobs"].append(None if isnan(value) else value)
        content["top_logprobs"].append(None if isnan(value) else values)
    return content | {"text_offset": list(offsets)}
