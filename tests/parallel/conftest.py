"""Ranks that are threads take the place of those of torchrun."""

import functools
from pathlib import Path

import pytest
from support.thread_ranks import MINE

import offload_rt.llm
from offload_rt.engine import ranks_spec
from offload_rt.weights.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture(autouse=True)
def threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ranks_spec, offload_rt.llm):
        monkeypatch.setattr(module, "joined", lambda: getattr(MINE, "ranks", None))


@pytest.fixture(autouse=True)
def ranks_parse_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a checkpoint once in each rank, which plans it several times."""
    parsed = functools.cache(lambda ranks, path: open_checkpoint(path))

    def read(path: Path) -> Checkpoint:
        ranks = getattr(MINE, "ranks", None)
        return parsed(ranks, path) if ranks else open_checkpoint(path)

    monkeypatch.setattr(offload_rt.llm, "open_checkpoint", read)
