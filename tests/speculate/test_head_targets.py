"""Published heads on all kinds of targets: texts, hidden states, and modules of the target."""

import pytest
import torch
from support.heads import small_target, write_head
from support.tiny import assert_continued, open_llm, prompt_of

from offload_rt import SamplingParams
from offload_rt.errors import UnsupportedModelError
from offload_rt.models.heads import HeadWeights
from offload_rt.models.native import EMBED, HEAD
from offload_rt.models.transformers import TransformersModel
from offload_rt.speculate.head_model import HeadModel

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(("kind", "head", "place"), [
    ("gpt_oss", "eagle", "disk"),
    # Embeddings are scaled in the model, not in the head. Output and embedding are tied.
    ("gemma2", "dflash2", "disk"),
    ("qwen3_5_text", "block", "resident"),
])  # fmt: skip
def test_heads_draft_for_models_of_transformers(tmp_path, monkeypatch, steady, kind, head, place):
    model = small_target(kind, tmp_path / "target")
    settings = write_head(tmp_path / "head", tmp_path / "target", head).settings
    states = {}
    observe = HeadModel.observe

    def observed(self, sequence, first, parts):
        states.update(enumerate(torch.cat(list(parts)), first))
        observe(self, sequence, first, parts)

    prompts = [prompt_of(seed, n, 8) for seed, n in enumerate((9, 1, 20))]
    with open_llm(place=place, **settings) as llm:
        assert isinstance(llm.spec.target.checkpoint.spec, TransformersModel)
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=16))
        llm.engine.reset_prefix_cache()
        with monkeypatch.context() as patch:
            patch.setattr(HeadModel, "observe", observed)
            outputs += llm.generate(prompts[0], SamplingParams(max_new_tokens=16))
        text = prompts[0] + outputs[0].token_ids
        outputs += llm.generate(text[:-7], SamplingParams(max_new_tokens=7))
        weights = llm.engine.draft.non_layer
        taps = llm.engine.draft.spec.taps
        assert isinstance(weights, HeadWeights)
        embedding = model.get_input_embeddings().weight
        assert torch.equal(weights.rows(torch.arange(8), EMBED), embedding)
        x = torch.randn(3, embedding.shape[1])
        product = x @ model.get_output_embeddings().weight.T
        shared = weights.target.linear(x, weights.shared[HEAD])
        torch.testing.assert_close(shared, product, atol=1e-4, rtol=1e-4)
    assert_continued(outputs[:-1], model, [*prompts, prompts[0]], 16)
    assert outputs[-1].token_ids == text[-7:]
    assert all(output.stats.nodes_per_tree > 1 for output in outputs)
    tokens = torch.tensor([text])
    with torch.no_grad():
        known = model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    for row, seen in states.items():
        expected = torch.stack([known[tap][0, row] for tap in taps if tap < len(known) - 1])
        torch.testing.assert_close(seen[: len(expected)], expected, atol=1e-3, rtol=1e-3)
    assert len(states) >= len(prompts[0]) + 11


def test_medusa_heads_and_copies_of_layers_need_a_native_target(tmp_path):
    small_target("gpt_oss", tmp_path / "target")
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"medusa_num_heads": 2}')
    for settings, what in (
        ({"draft_model": str(tmp_path / "head")}, "Medusa heads cannot draft for a model of"),
        ({"drafter": "self"}, "a model of type gpt_oss cannot draft for itself"),
    ):
        with pytest.raises(UnsupportedModelError, match=what):
            open_llm(tmp_path / "target", **settings)
