"""/v1/messages: Anthropic's API."""

import json
import reprlib
import uuid

from pydantic import BaseModel

from offload_rt.errors import PromptError, SettingsError
from offload_rt.server.answer import Answer, Delta, event
from offload_rt.server.bodies import Json, Messages, ShortList, validate
from offload_rt.server.protocol import ChatRequest, Stops, text_of
from offload_rt.server.turns import Turns, as_response_format, as_tools, named_tool

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class CountRequest(BaseModel):
    """Body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: Messages
    system: str | ShortList[Json] | None = None
    tools: ShortList[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None

    def fields(self) -> Json:
        """Return the fields of a chat request. Raises SettingsError for unknown values."""
        turns = Turns()
        if self.system:
            turns.add("system", self.system)
        for message in self.messages:
            content = message.get("content")
            blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
            if not all(isinstance(block, dict) for block in blocks):
                raise PromptError("the content of a message", need="a text or blocks")
            (_add_answer if message.get("role") == "assistant" else _add_question)(turns, blocks)
        fields: Json = {"model": self.model, "messages": turns}
        last = turns[-1] if turns else {}
        if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
            # Anthropic's API continues an answer in the last message.
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        fields["tools"] = as_tools(self.tools, "custom", "input_schema")
        if choice := self.tool_choice:
            kind = choice.get("type")
            if kind != "tool" and kind not in _CHOICES:
                problem = f"tool_choice {reprlib.repr(kind)}"
                raise SettingsError(problem, need="auto, any, tool or none")
            fields["tool_choice"] = named_tool(choice) if kind == "tool" else _CHOICES[kind]
            fields["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
        if self.thinking is not None:
            is_on = self.thinking.get("type") != "disabled"
            fields["chat_template_kwargs"] = {"enable_thinking": is_on}
        return fields

    def generation(self) -> ChatRequest:
        """Convert to a chat request."""
        return validate(ChatRequest, self.fields())


class MessagesRequest(CountRequest):
    """Body of /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Stops | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    output_config: Json | None = None

    def fields(self) -> Json:
        names = {"max_tokens", "stream", "temperature", "top_p", "top_k"}
        fields = super().fields() | self.model_dump(include=names)
        fields["response_format"] = as_response_format(self.output_config)
        return fields | {"stop": self.stop_sequences or None}


def _add_answer(turns: Turns, blocks: list[Json]) -> None:
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            turns.add_answer(str(block.get("thinking", "")), "reasoning_content")
        elif kind == "tool_use":
            turns.add_call(block.get("id"), block.get("name"), block.get("input"))
        elif kind != "redacted_thinking":
            turns.add_answer(text_of([block]))


def _add_question(turns: Turns, blocks: list[Json]) -> None:
    texts = []
    for block in blocks:
        if block.get("type") == "tool_result":
            turns.add("tool", block.get("content"), tool_call_id=block.get("tool_use_id"))
        else:
            texts.append(block)
    if texts:
        turns.add("user", texts)


class MessagesWriter:
    """Formats an answer as content blocks: thinking, text, tool_use."""

    def __init__(self, answer: Answer, _: MessagesRequest, name: str) -> None:
        self._answer = answer
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message"}
        self._head |= {"role": "assistant", "model": name}
        self._n_blocks = 0
        self._kind: str | None = None  # of the open block

    def start(self) -> list[str]:
        """Return the events before the first delta."""
        reasons = {"stop_reason": None, "stop_sequence": None}
        message: Json = {**self._head, "content": [], **reasons, "usage": self._usage()}
        return [_event("message_start", {"message": message})]

    def add(self, delta: Delta) -> list[str]:
        """Return the events of a delta."""
        parsed = delta.parsed
        events = []
        for kind, text in (("thinking", parsed.reasoning), ("text", parsed.text)):
            if text:
                events += self._open(_block(kind, ""))
                events.append(self._delta({"type": f"{kind}_delta", kind: text}))
        for call in parsed.calls:
            events += self._close()
            events += self._open(_tool_use(call) | {"input": {}})
            arguments = call["function"]["arguments"]
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def end(self) -> list[str]:
        """Return the events after the last delta."""
        delta = {"delta": self._reasons(), "usage": self._usage()}
        return [*self._close(), _event("message_delta", delta), _event("message_stop", {})]

    def error(self, error: Json) -> list[str]:
        """Return the last events of a stream that fails."""
        return [_event("error", {"error": error})]

    def whole(self) -> Json:
        """Return the complete response."""
        (choice,) = self._answer.choices
        content = [_block("thinking", choice.reasoning)] if choice.reasoning else []
        if choice.text or not choice.calls:
            content.append(_block("text", choice.text))
        content += map(_tool_use, choice.calls)
        return {**self._head, "content": content, **self._reasons(), "usage": self._usage()}

    def _reasons(self) -> Json:
        (choice,) = self._answer.choices
        has_stop = isinstance(choice.stop, str) and not choice.calls
        default = "stop_sequence" if has_stop else "end_turn"
        reason = _STOP_REASONS.get(choice.finish_reason or "", default)
        return {"stop_reason": reason, "stop_sequence": choice.stop if has_stop else None}

    def _usage(self) -> Json:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        n_prompt = self._answer.n_prompt
        return {"input_tokens": n_prompt, "output_tokens": self._answer.n_tokens, **cached}

    def _open(self, block: Json) -> list[str]:
        if self._kind == block["type"]:
            return []
        events = self._close()
        self._kind = block["type"]
        place = {"index": self._n_blocks, "content_block": block}
        return [*events, _event("content_block_start", place)]

    def _delta(self, delta: Json) -> str:
        return _event("content_block_delta", {"index": self._n_blocks, "delta": delta})

    def _close(self) -> list[str]:
        if self._kind is None:
            return []
        self._kind = None
        self._n_blocks += 1
        return [_event("content_block_stop", {"index": self._n_blocks - 1})]


def _block(kind: str, text: str) -> Json:
    block: Json = {"type": kind, kind: text}
    return block | {"signature": ""} if kind == "thinking" else block


def _tool_use(call: Json) -> Json:
    function = call["function"]
    arguments = json.loads(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _event(kind: str, content: Json) -> str:
    return event({"type": kind, **content}, kind)
