"""/v1/responses: OpenAI's API for agents, without stored responses."""

import reprlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from offload_rt.errors import SettingsError
from offload_rt.server.answer import Answer, Delta, event
from offload_rt.server.bodies import Json, Messages, ShortList, validate
from offload_rt.server.protocol import ChatRequest, text_of
from offload_rt.server.turns import Turns, as_response_format, as_tools, named_tool

# OpenAI's limits. A stream repeats the metadata three times.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
# Prefixes of ids and of events, by kind of output item.
_KINDS = {
    "reasoning": ("rs", "reasoning_text"),
    "message": ("msg", "output_text"),
    "function_call": ("fc", "function_call_arguments"),
}


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(BaseModel):
    """Body of /v1/responses."""

    model: str | None = None
    input: Annotated[Messages, BeforeValidator(_as_items)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    tools: ShortList[Json] | None = None
    tool_choice: Literal["none", "auto", "required"] | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Json | None = None
    text: Json | None = None
    prompt: Literal[None] = None
    truncation: Literal["disabled"] | None = None
    metadata: Metadata | None = None
    chat_template_kwargs: Json | None = None

    def generation(self) -> ChatRequest:
        """Convert to a chat request. Raises SettingsError or PromptError for unknown items."""
        turns = Turns()
        if self.instructions:
            turns.add("system", self.instructions)
        for item in self.input:
            kind = item.get("type", "message")
            content = item.get("content")
            if kind == "message" and item.get("role") == "assistant":
                turns.add_answer(text_of(content))
            elif kind == "message":
                turns.add(str(item.get("role")), content)
            elif kind == "function_call":
                turns.add_call(item.get("call_id"), item.get("name"), item.get("arguments"))
            elif kind == "function_call_output":
                turns.add("tool", item.get("output"), tool_call_id=item.get("call_id"))
            elif kind == "reasoning":
                turns.add_answer(text_of(content), "reasoning_content")
            else:
                need = "messages and calls"
                raise SettingsError(f"input of type {reprlib.repr(kind)}", need=need)
        own = {"input", "instructions", "max_output_tokens", "reasoning", "text", "metadata"}
        fields = self.model_dump(exclude_none=True, exclude=own | {"tools"})
        fields |= {"messages": turns, "max_tokens": self.max_output_tokens}
        fields["tools"] = as_tools(self.tools, "function", "parameters")
        if isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "function":
            fields["tool_choice"] = named_tool(self.tool_choice)
        fields["response_format"] = as_response_format(self.text)
        effort = (self.reasoning or {}).get("effort")
        if isinstance(effort, str):
            fields["reasoning_effort"] = effort
        return validate(ChatRequest, fields)

    def echo(self) -> Json:
        """Return the fields of the request that a response repeats."""
        names = {"instructions", "max_output_tokens", "temperature", "top_p"}
        return self.model_dump(include=names) | {
            "tools": self.tools or [],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": None, "summary": None, **(self.reasoning or {})},
            "text": self.text or {"format": {"type": "text"}},
            "metadata": self.metadata or {},
            "truncation": "disabled",
            "previous_response_id": None,
            "store": False,
        }


@dataclass
class _Item:
    """An output item of a stream; `event` is the prefix of its events."""

    kind: str
    event: str
    fields: Json
    text: str = ""

    def whole(self, status: str) -> Json:
        fields = {**self.fields, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return fields | {"arguments": self.text}
        is_begun = bool(self.text) or status != "in_progress"
        return fields | {"content": [self.content()] if is_begun else []}

    def content(self) -> Json:
        extra: Json = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": self.event, "text": self.text, **extra}


class ResponsesWriter:
    """Formats an answer as a response with output items: reasoning, message, calls."""

    def __init__(self, answer: Answer, request: ResponsesRequest, name: str) -> None:
        self._answer = answer
        self._items: list[_Item] = []
        self._n_events = 0
        self._head: Json = {"id": _new_id("resp"), "object": "response"}
        self._head |= {"created_at": int(time.time()), "model": name, **request.echo()}

    def start(self) -> list[str]:
        """Return the events before the first delta."""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, {"response": response}) for kind in kinds]

    def add(self, delta: Delta) -> list[str]:
        """Return the events of a delta."""
        return self._add(*delta.parsed)

    def end(self) -> list[str]:
        """Return the events after the last delta."""
        response = self.whole()
        status = response["status"]
        return [*self._close(status), self._event(f"response.{status}", {"response": response})]

    def error(self, error: Json) -> list[str]:
        """Return the last events of a stream that fails."""
        failure = {"code": error["code"] or "server_error", "message": error["message"]}
        response = self._response("failed") | {"error": failure}
        return [self._event("response.failed", {"response": response})]

    def whole(self) -> Json:
        """Return the complete response."""
        if not self._n_events:
            (choice,) = self._answer.choices
            self._add(choice.reasoning, choice.text, choice.calls)
            if not self._items:
                self._open("message")
        is_cut = self._answer.choices[0].end == "length"
        return self._response("incomplete" if is_cut else "completed")

    def _response(self, status: str) -> Json:
        n_prompt, n = self._answer.n_prompt, self._answer.n_tokens
        usage = {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": n,
            "output_tokens_details": {"reasoning_tokens": self._answer.n_reasoning},
            "total_tokens": n_prompt + n,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._head | {
            "status": status,
            "error": None,
            "incomplete_details": details,
            "output": [item.whole(self._state(item, status)) for item in self._items],
            "usage": None if status == "in_progress" else usage,
        }

    def _state(self, item: _Item, status: str) -> str:
        """Return the status of an output item; only the last text of an answer can be cut."""
        is_cut = item is self._items[-1] and item.kind != "function_call"
        return "incomplete" if is_cut and status != "completed" else "completed"

    def _add(self, reasoning: str, text: str, calls: Sequence[Json]) -> list[str]:
        parts: list[tuple[str, str, Json]] = [("reasoning", reasoning, {}), ("message", text, {})]
        parts += [("function_call", call["function"]["arguments"], call) for call in calls]
        events = []
        for kind, new, call in parts:
            if call or (new and (not self._items or self._items[-1].kind != kind)):
                events += self._close() + self._open(kind, call)
            if new:
                item = self._items[-1]
                item.text += new
                delta = self._place() | {"delta": new} | _logprobs(item)
                events.append(self._event(f"response.{item.event}.delta", delta))
        return events

    def _open(self, kind: str, call: Json | None = None) -> list[str]:
        fields: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
        if call:
            fields = {"call_id": call["id"], "name": call["function"]["name"]}
        prefix, name = _KINDS[kind]
        item = _Item(kind, name, {"id": _new_id(prefix), **fields})
        self._items.append(item)
        events = [self._item_event("response.output_item.added", "in_progress")]
        return events if call else [*events, self._part_event("added")]

    def _close(self, status: str = "completed") -> list[str]:
        """Return the last events of the current output item, for a response of this status."""
        if not self._items:
            return []
        item = self._items[-1]
        if item.kind == "function_call":
            call = self._place() | {"arguments": item.text, "name": item.fields["name"]}
            events = [self._event(f"response.{item.event}.done", call)]
        else:
            text = self._place() | {"text": item.text} | _logprobs(item)
            events = [self._event(f"response.{item.event}.done", text), self._part_event("done")]
        return [*events, self._item_event("response.output_item.done", self._state(item, status))]

    def _place(self) -> Json:
        item = self._items[-1]
        place: Json = {} if item.kind == "function_call" else {"content_index": 0}
        return {"item_id": item.fields["id"], "output_index": len(self._items) - 1, **place}

    def _part_event(self, end: str) -> str:
        part = self._place() | {"part": self._items[-1].content()}
        return self._event(f"response.content_part.{end}", part)

    def _item_event(self, kind: str, status: str) -> str:
        place = {"output_index": len(self._items) - 1}
        return self._event(kind, place | {"item": self._items[-1].whole(status)})

    def _event(self, kind: str, content: Json) -> str:
        self._n_events += 1
        return event({"type": kind, "sequence_number": self._n_events - 1, **content}, kind)


def _logprobs(item: _Item) -> Json:
    return {"logprobs": []} if item.kind == "message" else {}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
