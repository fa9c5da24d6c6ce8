"""Command lines of tests: programs, prompts and checks of error messages."""

import os
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "the quick brown"
BUDGET = "1000000"  # of six layers one is resident, and three fit into slots
SMALL = ["--device", "cpu", "--max-model-len", "64", "--device-memory", BUDGET]


def surroundings(**changes: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | changes


Line = Callable[..., tuple[int, str, str]]
Speaks = Callable[..., list[str]]


def one_sentence(err: str, *words: str) -> None:
    """Assert that stderr is one error line with these words."""
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 2000, err
    assert all(word in lines[0] for word in words), err
