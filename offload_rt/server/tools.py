"""Calls of tools in the text of an answer, as most models write them: JSON between <tool_call> and </tool_call>."""

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

_OPEN = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


@dataclass
class ToolText:
    """The text of an answer that may call tools: what is said comes through, calls are held back until the end.

    is_on  whether tools were offered; else all text comes through
    """

    is_on: bool
    _held: str = ""

    def take(self, text: str) -> str:
        """What of the text so far is certainly no call and was not given before."""
        if not self.is_on:
            return text
        self._held += text
        at = self._held.find(_OPEN)
        if at < 0:  # its end may be the beginning of a call
            begun = next((n for n in range(len(_OPEN), 0, -1) if self._held.endswith(_OPEN[:n])), 0)
            at = len(self._held) - begun
        said, self._held = self._held[:at], self._held[at:]
        return said

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left of the text, and the calls in OpenAI's form. What is not a call after all is text."""
        calls = [_call_of(match.group(1)) for match in _CALL.finditer(self._held)]
        found = [call for call in calls if call is not None]
        return ("", found) if calls and len(found) == len(calls) else (self._held, [])


def _call_of(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
        function = {"name": found["name"], "arguments": json.dumps(found.get("arguments", {}), ensure_ascii=False)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
