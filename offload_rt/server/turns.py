"""Conversion of other APIs' conversations to the messages of chat completions."""

import reprlib

from offload_rt.errors import SettingsError
from offload_rt.server.bodies import Json


class Turns(list[Json]):
    """Messages of a conversation. Consecutive parts of an assistant's answer form one message."""

    def add(self, role: str, content: object, **fields: object) -> None:
        """Append a message other than the assistant's."""
        self.append({"role": role, "content": content, **fields})

    def add_answer(self, text: str, key: str = "content") -> None:
        """Append text of the assistant, or its "reasoning_content"."""
        turn = self._assistant()
        turn[key] = turn.get(key, "") + text

    def add_call(self, call_id: object, name: object, arguments: object) -> None:
        """Append a tool call of the assistant, with arguments as JSON text or as an object."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self) -> Json:
        if not self or self[-1]["role"] != "assistant":
            self.add("assistant", "")
        return self[-1]


def as_tools(tools: list[Json] | None, kind: str, schema: str) -> list[Json] | None:
    """Convert tools to those of chat completions. Raises SettingsError for other types."""
    converted = []
    for tool in tools or ():
        if tool.get("type", kind) != kind:
            raise SettingsError(f"tools of type {reprlib.repr(tool['type'])}", need=f"type {kind}")
        function = {name: tool.get(name) or "" for name in ("name", "description")}
        function["parameters"] = tool.get(schema) or {}
        converted.append({"type": "function", "function": function})
    return converted or None


def named_tool(choice: Json) -> Json:
    """Convert the choice of a named tool."""
    return {"type": "function", "function": {"name": choice.get("name")}}


def as_response_format(settings: Json | None) -> Json | None:
    """Convert the settings of an answer; None without a format."""
    wanted = (settings or {}).get("format")
    if not isinstance(wanted, dict):
        return None
    return {"type": wanted.get("type"), "json_schema": wanted}
