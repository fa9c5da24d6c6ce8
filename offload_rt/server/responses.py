"""/v1/responses: OpenAI's API for agents, without stored responses."""

import reprlib
import time
import uuid
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from offload_rt.errors import SettingsError
from offload_rt.server.answer import Answer, Delta, event
from offload_rt.server.bodies import FailFastList, Json, validate
from offload_rt.server.protocol import ChatRequest, text_of
from offload_rt.server.turns import Turns, as_response_format, as_tools, named_tool

# OpenAI's limits. A stream repeats the metadata three times.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


class ResponsesRequest(BaseModel):
    """Body of /v1/responses."""

    model: str | None = None
    input: str | FailFastList[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    tools: FailFastList[Json] | None = None
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
        own = {"input", "instructions", "max_output_tokens", "reasoning", "text", "metadata"}
        fields = self.model_dump(exclude_none=True, exclude=own | {"tools", "tool_choice"})
        choice = self.tool_choice
        fields |= {"messages": self._messages(), "max_tokens": self.max_output_tokens}
        fields["tools"] = as_tools(self.tools, "function", "parameters")
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = named_tool(choice)
        fields["tool_choice"] = choice
        fields["response_format"] = as_response_format(self.text)
        effort = (self.reasoning or {}).get("effort")
        if isinstance(effort, str):
            fields["reasoning_effort"] = effort
        return validate(ChatRequest, fields)

    def _messages(self) -> list[Json]:
        turns = Turns()
        if self.instructions:
            turns.add("system", self.instructions)
        items = self.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        for item in items:
            _add_item(turns, item)
        return turns.messages

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


def _add_item(turns: Turns, item: Json) -> None:
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") == "assistant":
        turns.add_answer(text_of(item.get("content")))
    elif kind == "message":
        turns.add(str(item.get("role")), item.get("content"))
    elif kind == "function_call":
        turns.add_call(item.get("call_id"), item.get("name"), item.get("arguments"))
    elif kind == "function_call_output":
        turns.add("tool", item.get("output"), tool_call_id=item.get("call_id"))
    elif kind == "reasoning":
        turns.add_reasoning(text_of(item.get("content")))
    else:
        raise SettingsError(f"input of type {reprlib.repr(kind)}", need="messages and calls")


@dataclass
class _Item:
    """An output item of a stream.

    kind   as in `type`
    part   type of its content part; empty for calls
    """

    kind: str
    part: str
    fields: Json
    text: str = ""

    def whole(self, status: str) -> Json:
        """Return the item with its text so far."""
        fields = {**self.fields, "status": status}
        if self.kind == "function_call":
            return fields | {"arguments": self.text}
        is_begun = bool(self.text) or status != "in_progress"
        return fields | {"content": [self.content()] if is_begun else []}

    def content(self) -> Json:
        """Return the content part of a message or of reasoning."""
        extra: Json = {}
        if self.part == "output_text":
            extra = {"annotations": [], "logprobs": []}
        return {"type": self.part, "text": self.text, **extra}


class ResponsesWriter:
    """Formats an answer as a response with output items: reasoning, message, calls."""

    def __init__(self, answer: Answer, request: ResponsesRequest, name: str) -> None:
        self._answer = answer
        self._items: list[_Item] = []
        self._n_events = 0
        self._head = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": name,
            **request.echo(),
        }

    def start(self) -> list[str]:
        """Return the events before the first delta."""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, {"response": response}) for kind in kinds]

    def add(self, delta: Delta) -> list[str]:
        """Return the events of a delta."""
        events = []
        parsed = delta.parsed
        if parsed.reasoning:
            events += self._add_text("reasoning", parsed.reasoning)
        if parsed.text:
            events += self._add_text("message", parsed.text)
        for call in parsed.calls:
            events += self._add_call(call)
        return events

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
            if choice.reasoning:
                self._open("reasoning").text = choice.reasoning
            if choice.text or not (choice.reasoning or choice.calls):
                self._open("message").text = choice.text
            for call in choice.calls:
                self._open("function_call", call).text = call["function"]["arguments"]
        return self._response(self._status())

    def _status(self) -> str:
        return "incomplete" if self._answer.choices[0].end == "length" else "completed"

    def _response(self, status: str) -> Json:
        n_prompt, n = self._answer.n_prompt, self._answer.n_tokens
        usage = {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": n,
            "output_tokens_details": {"reasoning_tokens": self._answer.n_reasoning},
            "total_tokens": n_prompt + n,
        }
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._head | {
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": [item.whole(self._state(item, status)) for item in self._items],
            "usage": None if status == "in_progress" else usage,
        }

    def _state(self, item: _Item, status: str) -> str:
        """Return the status of an output item; only the last text of an answer can be cut."""
        is_cut = item is self._items[-1] and item.kind != "function_call"
        return "incomplete" if is_cut and status != "completed" else "completed"

    def _open(self, kind: str, call: Json | None = None) -> _Item:
        """Append an output item."""
        if call is not None:
            fields = {"call_id": call["id"], "name": call["function"]["name"]}
            item = _Item(kind, "", {"id": _new_id("fc"), "type": kind, **fields})
        elif kind == "reasoning":
            item = _Item(kind, "reasoning_text", {"id": _new_id("rs"), "type": kind, "summary": []})
        else:
            fields = {"id": _new_id("msg"), "type": kind, "role": "assistant"}
            item = _Item(kind, "output_text", fields)
        self._items.append(item)
        return item

    def _add_text(self, kind: str, text: str) -> list[str]:
        events = []
        if not self._items or self._items[-1].kind != kind:
            events += self._close()
            item = self._open(kind)
            events.append(self._item_event("response.output_item.added", "in_progress"))
            part = {"part": item.content(), "content_index": 0}
            events.append(self._event("response.content_part.added", self._place() | part))
        item = self._items[-1]
        item.text += text
        delta = {"delta": text, "content_index": 0} | _logprobs(item)
        events.append(self._event(f"response.{item.part}.delta", self._place() | delta))
        return events

    def _add_call(self, call: Json) -> list[str]:
        events = self._close()
        item = self._open("function_call", call)
        events.append(self._item_event("response.output_item.added", "in_progress"))
        item.text = call["function"]["arguments"]
        delta = self._place() | {"delta": item.text}
        events.append(self._event("response.function_call_arguments.delta", delta))
        return events

    def _close(self, status: str = "completed") -> list[str]:
        """Return the last events of the current output item.

        status  of the response
        """
        if not self._items:
            return []
        item = self._items[-1]
        if item.kind == "function_call":
            done = self._place() | {"arguments": item.text, "name": item.fields["name"]}
            events = [self._event("response.function_call_arguments.done", done)]
        else:
            place = self._place() | {"content_index": 0}
            done = place | {"text": item.text} | _logprobs(item)
            part = place | {"part": item.content()}
            events = [
                self._event(f"response.{item.part}.done", done),
                self._event("response.content_part.done", part),
            ]
        state = self._state(item, status)
        return [*events, self._item_event("response.output_item.done", state)]

    def _place(self) -> Json:
        """Return the fields that locate the current output item."""
        return {"item_id": self._items[-1].fields["id"], "output_index": len(self._items) - 1}

    def _item_event(self, kind: str, status: str) -> str:
        place = {"output_index": len(self._items) - 1}
        return self._event(kind, place | {"item": self._items[-1].whole(status)})

    def _event(self, kind: str, content: Json) -> str:
        self._n_events += 1
        number = self._n_events - 1
        return event({"type": kind, "sequence_number": number, **content}, kind)


def _logprobs(item: _Item) -> Json:
    return {"logprobs": []} if item.part == "output_text" else {}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
