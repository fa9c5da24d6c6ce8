"""Conversion of other APIs' conversations to the messages of chat completions."""

from dataclasses import dataclass, field

from offload_rt.server.bodies import Json


@dataclass
class Turns:
    """Messages of a conversation. Consecutive parts of an assistant's answer form one message."""

    messages: list[Json] = field(default_factory=list)

    def add(self, role: str, content: object) -> None:
        """Append a message other than the assistant's."""
        self.messages.append({"role": role, "content": content})

    def add_result(self, call_id: object, content: object) -> None:
        """Append the result of a tool call."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def add_reasoning(self, text: str) -> None:
        """Append reasoning of the assistant."""
        turn = self._assistant()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def add_answer(self, text: str) -> None:
        """Append text of the assistant."""
        self._assistant()["content"] += text

    def add_call(self, call_id: object, name: object, arguments: object) -> None:
        """Append a tool call of the assistant.

        arguments  as JSON text or as an object
        """
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self) -> Json:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add("assistant", "")
        return self.messages[-1]


def as_tool(name: object, description: object, parameters: object) -> Json:
    """Build a tool of chat completions."""
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}
