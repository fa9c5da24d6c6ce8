"""Atomic writes, and cache files that are rebuilt when damaged."""

import hashlib
import json
import os
import secrets
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from offload_rt.errors import CacheError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: temporary file in the same folder, fsync, rename. Raises OSError."""
    # A random name: process ids repeat across containers. A short name: `path` may have the
    # maximum length.
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def cache_directory() -> Path:
    """Return the folder of cached measurements. Raises RuntimeError for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "offload_rt"


def read_cached(name: str, version: int) -> dict[str, Any]:
    """Return the entries of a cache file; empty if missing, damaged or of a different version."""
    try:
        content = json.loads((cache_directory() / name).read_text(encoding="utf-8"))
        entries: dict[str, Any] = content["entries"]
        is_sound = content["version"] == version and content["digest"] == _digest(entries)
    # RuntimeError also for deeply nested JSON
    except (OSError, ValueError, RuntimeError, LookupError, TypeError):
        return {}
    return entries if is_sound else {}


def write_cached(name: str, version: int, entries: dict[str, Any]) -> None:
    """Write a cache file of JSON; see `write_cache_file`."""
    content = {"version": version, "digest": _digest(entries), "entries": entries}
    write_cache_file(name, json.dumps(content))


def _digest(entries: object) -> str:
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:24]


def write_cache_file(name: str, content: str | bytes) -> None:
    """Write a file of the cache folder; warn with a CacheError if that fails."""
    try:
        folder = cache_directory()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, content)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        place = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        _warn(f"cannot save measurements in {place} ({reason})")


# Once per process: libraries reset Python's record of shown warnings.
@cache
def _warn(problem: str) -> None:
    change = "make room there, or set XDG_CACHE_HOME to a writable folder"
    warnings.warn(CacheError(problem, change=change), stacklevel=1)
