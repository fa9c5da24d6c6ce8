"""The committed draft heads of the demonstration target: the same text in fewer passes."""

import pytest
from support.serving import MODELS

from offload_rt import LLM, Output, SamplingParams
from offload_rt.cost.estimator import CostEstimator

PROMPT = "def read_lines(path, encoding=None):\n    "


def greedy(**settings: str | int) -> Output:
    """Generate 48 tokens with the target in float32."""
    target = str(MODELS / "demo-target")
    with LLM(target, device="cpu", dtype="float32", max_model_len=128, **settings) as llm:
        return llm.generate(PROMPT, SamplingParams(max_new_tokens=48))[0]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return greedy(drafter="none").token_ids


@pytest.mark.parametrize(("head", "least"), [("demo-block", 2.8), ("demo-eagle3", 2.6)])
def test_trained_head_drafts_accepted_tokens(monkeypatch, plain, head, least):
    # Rounds of the drafter then do not depend on measured times.
    monkeypatch.setattr(CostEstimator, "level", lambda *_: 0.0)
    output = greedy(draft_model=str(MODELS / head), tree_size=32)
    assert output.token_ids == plain
    assert output.stats.tokens_per_pass > least
