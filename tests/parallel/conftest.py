"""Ranks that are threads take the place of those of torchrun."""

import pytest
from support.thread_ranks import MINE

import offload_rt.llm
from offload_rt.engine import ranks_spec


@pytest.fixture(autouse=True)
def threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ranks_spec, offload_rt.llm):
        monkeypatch.setattr(module, "joined", lambda: getattr(MINE, "ranks", None))
