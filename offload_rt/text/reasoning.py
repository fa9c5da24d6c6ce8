"""Separate the reasoning of a model, between `<think>` and `</think>`, from its answer."""

from dataclasses import dataclass, field
from typing import NamedTuple

_OPEN = "<think>"
_CLOSE = "</think>"


class Part(NamedTuple):
    """Text that is either reasoning or answer."""

    text: str
    is_reasoning: bool


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside the reasoning, as some chat templates do."""
    return prompt.rstrip().endswith(_OPEN)


@dataclass
class ReasoningSplitter:
    """Split streamed text at the reasoning tags. Tags may be divided among pieces of text.

    is_reasoning  the text starts inside the reasoning
    """

    is_reasoning: bool = False
    _pending: str = field(default="", init=False)
    _is_start: bool = field(default=True, init=False)

    def add(self, text: str, is_last: bool = False) -> list[Part]:
        """Return the parts that are certain; `is_last` also returns the start of a possible tag."""
        self._pending += text
        parts = []
        while True:
            tag = _CLOSE if self.is_reasoning else _OPEN
            before, found, after = self._pending.partition(tag)
            if not found:
                break
            parts.append(self._part(before))
            self.is_reasoning = not self.is_reasoning
            self._is_start = True
            self._pending = after
        n_held = 0 if is_last else _n_overlap(self._pending, tag)
        parts.append(self._part(self._pending[: len(self._pending) - n_held]))
        self._pending = self._pending[len(self._pending) - n_held :]
        return [part for part in parts if part.text]

    def _part(self, text: str) -> Part:
        """Drop blank lines at the start of the reasoning and of the answer."""
        if self._is_start:
            text = text.lstrip("\n")
            self._is_start = not text
        return Part(text, self.is_reasoning)


def _n_overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a start of `tag`."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(tag[:n])), 0)
