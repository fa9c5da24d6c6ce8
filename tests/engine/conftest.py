"""Fixtures of engines."""

from collections.abc import Callable
from typing import Any

import pytest
from support.fake_gpu import record_graph
from support.heads import HEADS, few_tokens, random_head
from support.tiny import open_llm

from offload_rt import LLM
from offload_rt.executor.captured_passes import capture_passes
from offload_rt.executor.cuda_graphs import GraphShape
from offload_rt.models.families import FAMILIES


@pytest.fixture
def opened(zoo, steady, tmp_path, monkeypatch) -> Callable[..., tuple[LLM, Any]]:
    """An LLM of some kind, and transformers' model."""

    def make(kind: str, **settings: Any) -> tuple[LLM, Any]:
        if kind in HEADS:
            model = few_tokens()
            return open_llm(**random_head(tmp_path, kind, model).settings, **settings), model
        pair = zoo.pair("llama", 0)
        if kind == "general":
            monkeypatch.delitem(FAMILIES, "llama")
        if kind in ("plain", "general"):
            return open_llm(pair.target, "disk", **settings), pair.model
        if kind == "graphs":
            llm = open_llm(pair.target, draft_model=str(pair.draft), **settings)
            most = llm.spec.memory.cache_rows, llm.spec.memory.limits.n_nodes
            for runner, n_rows in (
                (llm.engine.runner, most[0]),
                (llm.engine.draft, most[0] + most[1]),
            ):
                capture_passes(runner, GraphShape(16, n_rows, 32), record_graph)
            return llm, pair.model
        return open_llm(pair.target, **pair.settings(kind), **settings), pair.model

    return make
