"""Processes that tests start and look for."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal, and restore its handler at the end."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def is_written(path: Path) -> bool:
    """Whether a process has left its number there."""
    return path.exists() and path.read_text() != ""


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
