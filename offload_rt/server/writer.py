"""Interface of APIs that format answers."""

import json
from typing import Protocol

from offload_rt.server.answer import Delta
from offload_rt.server.bodies import Json


class Writer(Protocol):
    """Formats an answer, as server-sent events or whole."""

    def start(self) -> list[str]:
        """Return the events before the first delta."""

    def add(self, delta: Delta) -> list[str]:
        """Return the events of a delta."""

    def end(self) -> list[str]:
        """Return the events after the last delta."""

    def error(self, error: Json) -> list[str]:
        """Return the last events of a stream that fails."""

    def whole(self) -> Json:
        """Return the complete response."""


def event(content: Json, name: str | None = None) -> str:
    """Format a server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(content, ensure_ascii=False)}\n\n"
