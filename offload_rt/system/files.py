"""Files the project writes for itself: whole or not at all, and rebuilt when damaged."""

import json
import os
import secrets
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: a temporary name in its folder, synced, renamed. Raises OSError."""
    # By chance, for process ids are the same in two containers; and short, for the name itself may be as long as can be.
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
    """Where measurements are kept between runs. Raises RuntimeError for a user without a home."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "offload_rt"


def read_cached(name: str, version: int) -> dict[str, Any]:
    """The object of a cache file; empty if there is none, it is damaged or of another version."""
    try:
        content = json.loads((cache_directory() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # the last of JSON that is too deep, too
        return {}
    fits = isinstance(content, dict) and content.get("version") == version and isinstance(content.get("entries"), dict)
    return content["entries"] if fits else {}


def write_cached(name: str, version: int, entries: dict[str, Any]) -> None:
    """Keep entries for later runs; where the cache cannot be written (read-only, full), later runs measure again."""
    try:
        cache_directory().mkdir(parents=True, exist_ok=True)
        write_atomically(cache_directory() / name, json.dumps({"version": version, "entries": entries}))
    except (OSError, RuntimeError):
        return
