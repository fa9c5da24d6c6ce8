"""How many faults were tried, and how many survived."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Count:
    """Adds up over a session."""

    tried: int = 0
    survived: int = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """A fault: survived if the body says nothing against it."""
        self.tried += 1
        yield
        self.survived += 1

    def __str__(self) -> str:
        return f"faults: {self.tried:,} tried, {self.survived:,} survived"
