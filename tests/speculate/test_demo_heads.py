"""The committed draft heads of the demonstration target: logits of training, texts, passes."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.heads import Probe
from support.serving import MODELS
from support.tiny import Pair, drafter_of, engine_of, generate, prompt_of
from transformers import LlamaForCausalLM

from offload_rt import LLM, Output, SamplingParams
from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.executor.sequence import Sequence
from scripts.chat_text import BatchWriter
from scripts.demo_heads import (
    BLOCK_SIZE,
    DEMO_TAPS,
    MASK_TOKEN,
    DFlash,
    DraftLayers,
    Eagle3,
    tapped_states,
    taught,
)

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


@pytest.mark.parametrize("kind", ["block", "eagle"])
@torch.no_grad()
def test_draft_logits_equal_the_forward_of_training(kind):
    """After the last token, and after a drafted token."""
    folder = MODELS / {"block": "demo-block", "eagle": "demo-eagle3"}[kind]
    target = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    head = {"block": DFlash, "eagle": Eagle3}[kind](target, DEMO_TAPS)
    head.load_state_dict(load_file(folder / "model.safetensors"))
    settings = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "tree_size": 8}
    with LLM(TARGET, str(folder), **settings) as llm:
        drafter = drafter_of(llm, kind, "match", DraftLimits(8, 3, fixed_size=True))
        engine = engine_of(llm, drafter)
        sequence = Sequence(llm.tokenizer.encode(PROMPT), SamplingParams(8), 128)
        engine.add(sequence)
        for _ in range(2):
            engine.step()
        drafted = sequence.tokens[0]
        probe = Probe(drafter._model.start(sequence, 8, is_alone=False), [([0], [drafted])])
        drafter._model.grow([probe])
    tokens = torch.tensor([[*sequence.tokens, drafted]])
    n = tokens.shape[1] - 2
    taps, _ = tapped_states(target, tokens, DEMO_TAPS)
    embedding = target.get_input_embeddings().weight
    if isinstance(head, DFlash):
        block = torch.full((1, BLOCK_SIZE), MASK_TOKEN)
        block[0, 0] = sequence.tokens[-1]
        hidden = head(taps[:, :n], F.embedding(block, embedding), torch.tensor([[n]]))
        expected = F.linear(hidden[0, :2], embedding)
    else:
        passes = head(taps[:, :-1], F.embedding(tokens[:, 1:], embedding))
        outputs = torch.stack((next(passes)[0, -2], next(passes)[0, -1]))
        expected = head.lm_head(head.norm(outputs))
    torch.testing.assert_close(torch.stack(probe.logits), expected, atol=1e-3, rtol=0)


def test_training_text_equals_transformers(pair: Pair) -> None:
    """Of prompts of several lengths, of which one ends early."""
    prompts = [prompt_of(seed, n) for seed, n in enumerate((14, 9, 13))]
    expected = [[*generate(pair.model, prompt, 12)] for prompt in prompts]
    end = expected[1][4]
    texts = [text[: text.index(end) + 1] if end in text else text for text in expected]
    writer = BatchWriter(pair.model, end)
    assert writer.write(prompts, torch.zeros(3), 12, unfinished=0.0) == texts
    assert sorted(map(len, texts))[0] < 12


@pytest.mark.parametrize("n_layers", [5, 6])
@torch.no_grad()
def test_draft_of_all_layers_is_the_target(n_layers):
    target = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    text = taught(target, torch.randint(1, 4096, (2, 24)), DEMO_TAPS).rows(torch.arange(2))
    draft = DraftLayers(target, n_layers, torch.arange(100)).float()
    assert (draft.loss(target, text) < 1e-3) == (n_layers == 6)
    ends = [model.model.layers[-1].mlp.up_proj.weight for model in (draft.llama, target)]
    assert torch.equal(*ends)
