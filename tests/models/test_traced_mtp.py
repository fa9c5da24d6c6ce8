"""Multi-token prediction layers of models with gated delta nets: logits and texts."""

import copy
import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import assert_plain_texts, probe
from support.tiny import (
    assert_continued,
    open_llm,
    prompt_of,
)
from torch import Tensor

from bench.models.tiny import config_of, random_model
from offload_rt import SamplingParams
from offload_rt.speculate import head_model

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("steady")]
# A mixture, one beside pictures, a dense layer beside pictures, and a text model alone.
KINDS = ["qwen3_next", "qwen3_5_moe", "qwen3_5", "qwen3_5_text"]


class Target:
    """A model of few tokens with a random layer for multi-token prediction, in published names."""

    def __init__(self, kind: str, folder: Path) -> None:
        config = config_of(kind)
        config.get_text_config().vocab_size = 8
        self.model = random_model(config)
        self.folder = folder
        single = copy.deepcopy(self.model.config)
        text = single.get_text_config()
        text.num_hidden_layers = 1
        text.layer_types = ["full_attention"]
        self.layer = random_model(single, seed=3)  # whose last norm is the layer's
        d = text.hidden_size
        draw = torch.Generator().manual_seed(1)
        self.own = {"mtp.fc.weight": 0.2 * torch.randn(d, 2 * d, generator=draw)}
        for name in ("embedding", "hidden"):
            self.own[f"mtp.pre_fc_norm_{name}.weight"] = 0.2 * torch.randn(d, generator=draw)
        self.layer.save_pretrained(folder)
        file = folder / "model.safetensors"
        for name, tensor in load_file(file).items():
            short = name.removeprefix("model.").removeprefix("language_model.")
            if short.startswith(("layers.0.", "norm.")):
                self.own[f"mtp.{short}"] = tensor
        self.model.save_pretrained(folder)
        save_file(load_file(file) | self.own, file, {"format": "pt"})

    @torch.no_grad()
    def expected_logits(self, tokens: list[int], path: Sequence[int]) -> Tensor:
        """Logits of the layer after the last token of a path, by transformers' modules."""
        embedding = self.model.get_input_embeddings()
        decoder = self.layer.get_decoder()
        ids = torch.tensor([tokens[:-1]])
        hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
        inputs = tokens[1:]
        for token in [*path, None]:
            parts = {"embedding": embedding(torch.tensor(inputs)), "hidden": hidden}
            x = torch.cat([self._normed(name, part) for name, part in parts.items()], 1)
            x = (x @ self.own["mtp.fc.weight"].T)[None]
            given = decoder(inputs_embeds=x, use_cache=False).last_hidden_state[0]
            hidden = torch.cat((hidden, given[-1:]))
            inputs = [*inputs, token]
        return self.model.lm_head(given[-1])

    def _normed(self, name: str, x: Tensor) -> Tensor:
        eps = self.model.config.get_text_config().rms_norm_eps
        weight = 1 + self.own[f"mtp.pre_fc_norm_{name}.weight"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.fixture(scope="module")
def target_of(tmp_path_factory):
    """Of a type; each is made once."""
    return functools.cache(lambda kind: Target(kind, tmp_path_factory.mktemp(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_mtp_layer_equals_its_definition(target_of, monkeypatch, kind):
    """After chunked prompts and after trees with accepted and rejected nodes."""
    monkeypatch.setattr(head_model, "CHUNK_ROWS", 4)
    target = target_of(kind)
    with open_llm(target.folder, drafter="mtp") as llm:
        probed = list(probe(llm, "mtp", 3))
    for tokens, path, logits in probed:
        wanted = target.expected_logits(tokens, path)
        # States of trees and of whole texts are rounded differently.
        torch.testing.assert_close(logits, wanted, atol=1e-3 * float(wanted.abs().max()), rtol=0)


@pytest.mark.parametrize(("kind", "place"), [("qwen3_next", "disk"), ("qwen3_5", "resident")])
def test_greedy_tokens_equal_transformers(target_of, kind, place):
    """Prompts of a batch end before and behind borders of state blocks."""
    target = target_of(kind)
    prompts = [prompt_of(seed, n, 8) for seed, n in enumerate((9, 1, 66))]
    with open_llm(target.folder, place, drafter="auto") as llm:
        assert llm.spec.draft.drafting.name == "mtp"
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=12))
        llm.engine.reset_prefix_cache()
        assert not llm.engine.drafter._model._inputs and not llm.engine.draft._caches, (
            "ended sequences are released"
        )
    assert_continued(outputs, target.model, prompts, 12)
    assert all(output.stats.nodes_per_tree > 1 for output in outputs)


def test_sampled_texts_equal_plain_decoding(target_of):
    with open_llm(target_of("qwen3_5_text").folder, drafter="mtp") as llm:
        assert_plain_texts(llm, "mtp", "coupled")
