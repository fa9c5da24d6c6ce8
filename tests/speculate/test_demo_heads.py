"""The committed draft heads of the demonstration target: texts and passes."""

import torch
from support.serving import MODELS
from support.tiny import Pair, generate, prompt_of

from offload_rt import LLM, Output, SamplingParams
from offload_rt.cost.estimator import CostEstimator
from scripts.chat_text import BatchWriter

PROMPT = "def read_lines(path, encoding=None):\n    "
TARGET = str(MODELS / "demo-target")


def greedy(**settings: str | int) -> Output:
    with LLM(TARGET, device="cpu", dtype="float32", max_model_len=128, **settings) as llm:
        return llm.generate(PROMPT, SamplingParams(max_new_tokens=48))[0]


def test_trained_heads_draft_accepted_tokens(monkeypatch):
    # Rounds of the drafter then do not depend on measured times.
    monkeypatch.setattr(CostEstimator, "level", lambda *_: 0.0)
    plain = greedy(drafter="none")
    for head, least in ("demo-block", 2.8), ("demo-eagle3", 2.6):
        output = greedy(draft_model=str(MODELS / head), tree_size=32)
        assert output.token_ids == plain.token_ids
        assert output.stats.tokens_per_pass > least


def test_training_text_equals_transformers(pair: Pair) -> None:
    """Of prompts of several lengths, of which one ends early."""
    prompts = [prompt_of(seed, n) for seed, n in enumerate((14, 9, 13))]
    expected = [[*generate(pair.model, prompt, 12)] for prompt in prompts]
    end = expected[1][4]
    texts = [text[: text.index(end) + 1] if end in text else text for text in expected]
    writer = BatchWriter(pair.model, end)
    assert writer.write(prompts, torch.zeros(3), 12, unfinished=0.0) == texts
    assert sorted(map(len, texts))[0] < 12
