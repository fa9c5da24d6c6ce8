"""Calls of replaced functions."""

from collections.abc import Callable
from typing import Any

import pytest


def before_calls(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[..., Any]
) -> None:
    """Call `act` with the arguments of each call of a function; its error replaces the call."""
    call = getattr(owner, name)

    def wrapped(*given: Any, **how: Any) -> Any:
        act(*given, **how)
        return call(*given, **how)

    monkeypatch.setattr(owner, name, wrapped)
