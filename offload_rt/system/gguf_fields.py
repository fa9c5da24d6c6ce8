"""Fields and metadata of GGUF files; all counts are bounded.

Layout: magic, counts of tensors and metadata, metadata, tensor entries (name, shape, type, offset),
padding, tensor bytes (github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

import mmap
import struct
from collections.abc import Container
from typing import Any

_NUMBERS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?")))
_NUMBERS |= {10: "<Q", 11: "<q", 12: "<d"}
_TEXT = 8
_ARRAY = 9
# A vocabulary has about 2^18 entries, a chat template a few kilobytes.
_MAX_ENTRIES = 1 << 22
_LONGEST = 1 << 24
_LONGEST_KEPT = 1 << 10


class Fields:
    """Consecutive fields of a file from byte `at`; raise ValueError or struct.error if invalid."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def metadata(self, arrays: Container[str] = ()) -> tuple[int, dict[str, Any]]:
        """Read from the magic on; returns the number of tensors, and the metadata.

        arrays  names of the arrays of text, and of more than 1,024 numbers, whose values are
                needed; the others are None
        """
        if (magic := self.number("4s")) != b"GGUF":
            raise ValueError(f"it begins with {magic}")
        if (version := self.number("<I")) not in (2, 3):
            raise ValueError(f"version {version}, not 2 or 3")
        n_tensors = self.count()
        names = (self.text() for _ in range(self.count()))
        return n_tensors, {name: self._value(name in arrays) for name in names}

    def number(self, form: str) -> Any:
        """Read a value of a format of `struct`."""
        value = struct.unpack_from(form, self._data, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def count(self, limit: int = _MAX_ENTRIES) -> int:
        """Read a number of entries or bytes."""
        n: int = self.number("<Q")
        if n > limit:
            raise ValueError(f"a count or length of {n}")
        return n

    def text(self) -> str:
        """Read a text."""
        n = self.count(_LONGEST)
        self.at += n
        return self._data[self.at - n : self.at].decode()

    def _value(self, is_needed: bool) -> Any:
        kind = self.number("<I")
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_form(kind))
        kind = self.number("<I")
        n = self.count()
        if kind == _TEXT:
            return self._texts(n, is_needed)
        form = _form(kind)
        at = self.at
        self.at += n * struct.calcsize(form)
        if is_needed or n <= _LONGEST_KEPT:
            return list(struct.unpack_from(f"<{n}{form[1]}", self._data, at))
        return None

    def _texts(self, n: int, is_needed: bool) -> list[str] | None:
        data, at = self._data, self.at
        texts = []
        for _ in range(n):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if is_needed:
                texts.append(data[start:at].decode())
        self.at = at
        return texts if is_needed else None


def _form(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"a value of type {kind}")
    return _NUMBERS[kind]
