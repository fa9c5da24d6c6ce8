"""Separate the reasoning of a model, between `<think>` and `</think>`, from its answer."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Tags(NamedTuple):
    """Texts around the reasoning."""

    opening: str = "<think>"
    closing: str = "</think>"

    def opens(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside the reasoning, as some chat templates do."""
        return prompt.rstrip().endswith(self.opening)

    def closes(self, prompt: str) -> bool:
        """Whether a rendered prompt ends behind the reasoning."""
        return prompt.rstrip().endswith(self.closing)


THINK = Tags()


class TextPart(NamedTuple):
    """Text that is either reasoning or answer."""

    text: str
    is_reasoning: bool


@dataclass
class ReasoningSplitter:
    """Split streamed text at the reasoning tags. Tags may be divided among pieces of text.

    Reasoning precedes the answer; tags inside the answer are text.
    is_reasoning  the text starts inside the reasoning
    tags          texts around the reasoning
    """

    is_reasoning: bool = False
    tags: Tags = THINK
    _pending: str = field(default="", init=False)
    _is_start: bool = field(init=False)  # drops blank lines behind a tag
    _is_answer: bool = field(default=False, init=False)  # no tag can follow

    def __post_init__(self) -> None:
        self._is_start = self.is_reasoning

    def add(self, text: str, is_last: bool = False) -> list[TextPart]:
        """Return the parts that are certain; `is_last` also returns the start of a possible tag."""
        self._pending += text
        parts = []
        if not (self._is_answer or self.is_reasoning):
            self._open(is_last)
        if self.is_reasoning:
            parts.append(self._close(is_last))
        if self._is_answer:
            parts.append(self._part(self._pending))
            self._pending = ""
        return [part for part in parts if part.text]

    def _open(self, is_last: bool) -> None:
        """Decide whether the text begins with the opening tag, once that is certain."""
        start = self._pending.lstrip()
        if start.startswith(self.tags.opening):
            self.is_reasoning = self._is_start = True
            self._pending = start[len(self.tags.opening) :]
        elif is_last or not self.tags.opening.startswith(start):
            self._is_answer = True

    def _close(self, is_last: bool) -> TextPart:
        before, tag, after = self._pending.partition(self.tags.closing)
        if tag:
            part = self._part(before)
            self.is_reasoning = False
            self._is_start = self._is_answer = True
            self._pending = after
            return part
        n_held = 0 if is_last else n_overlap(self._pending, self.tags.closing)
        part = self._part(self._pending[: len(self._pending) - n_held])
        self._pending = self._pending[len(self._pending) - n_held :]
        return part

    def _part(self, text: str) -> TextPart:
        """Drop blank lines at the start of the reasoning and of the answer."""
        if self._is_start:
            text = text.lstrip("\n")
            self._is_start = not text
        return TextPart(text, self.is_reasoning)


def n_overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that is a start of `tag`."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(tag[:n])), 0)


def prefix_of(a: str, b: str) -> str:
    """Return the longest common prefix of two texts."""
    n_equal = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
    return a[:n_equal]
