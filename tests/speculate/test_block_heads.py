"""Block drafters in their published layouts, against a plain float64 reference."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.heads import few_tokens
from support.texts import (
    VOCABULARY,
    assert_distribution,
    exact_distributions,
    sampled_texts,
    small_model,
)
from support.tiny import drafter_of, generate, open_llm, prompt_of, runner_of
from torch import Tensor
from transformers import PreTrainedModel

from offload_rt import SamplingParams
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.errors import SettingsError, UnsupportedModelError
from offload_rt.speculate.block_model import BlockModel
from offload_rt.speculate.select import rule_of

pytestmark = pytest.mark.numeric

N_LAYERS = 2
BLOCK = 4
MASK = 5
KEPT = [0, 2, 3, 6]
RANK = 3
DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_config": {},
    "speculators_version": "0.9.0",
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": BLOCK,
    "mask_token_id": MASK,
}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "use_sliding_window": True,
}


def layer_config(model: PreTrainedModel, **changes: Any) -> dict[str, Any]:
    """The config of the drafter's layers."""
    config = model.config
    return {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 24,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        **changes,
    }


def write_block(folder: Path, model: PreTrainedModel, config: dict[str, Any], **layers: Any):
    """A target and a block drafter of random weights; returns settings, config and weights."""
    inner = layer_config(model, **layers)
    if "speculators_model_type" in config:
        raw = config | {"transformer_layer_config": inner}
    else:
        raw = inner | config
    d = inner["hidden_size"]
    vocab = inner["vocab_size"]
    n_tokens = config.get("draft_vocab_size", vocab)
    shapes = {"fc.weight": (d, 2 * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    for i in range(N_LAYERS):
        parts = {
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
            "self_attn.q_proj": (16, d),
            "self_attn.k_proj": (8, d),
            "self_attn.v_proj": (8, d),
            "self_attn.o_proj": (d, 16),
            "self_attn.q_norm": (8,),
            "self_attn.k_norm": (8,),
            "mlp.gate_proj": (24, d),
            "mlp.up_proj": (24, d),
            "mlp.down_proj": (d, 24),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in parts.items()}
    if n_tokens != vocab:
        shapes["lm_head.weight"] = (n_tokens, d)
    if config.get("speculators_model_type") == "dspark":
        shapes["markov_head.markov_w1.weight"] = (vocab, RANK)
        shapes["markov_head.markov_w2.weight"] = (n_tokens, RANK)
    generator = torch.Generator().manual_seed(4)
    weights = {
        name: 0.4 * torch.randn(shape, generator=generator) + float(len(shape) == 1)
        for name, shape in shapes.items()
    }
    if n_tokens != vocab:
        weights["d2t"] = torch.tensor(KEPT) - torch.arange(n_tokens)
    model.save_pretrained(folder / "target")
    (folder / "head").mkdir()
    save_file(weights, folder / "head" / "model.safetensors")
    (folder / "head" / "config.json").write_text(json.dumps(raw))
    settings = {"directory": folder / "target", "drafter": "block"}
    return settings | {"draft_model": str(folder / "head")}, raw, weights


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def reference(raw, weights, model, states, tokens):
    """Logits (predictions, vocabulary) of a block, recomputed from all hidden states.

    states  (n, 2, hidden_size) of all tokens but the last
    """
    w = {name: weight.double() for name, weight in weights.items() if name != "d2t"}
    embedding = model.get_input_embeddings().weight.detach().double()
    is_nested = "speculators_model_type" in raw
    layers = raw["transformer_layer_config"] if is_nested else raw
    context = rms(states.double().flatten(1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = embedding[[tokens[-1], *[MASK] * (BLOCK - 1)]]
    n = len(context)
    positions = torch.arange(n + BLOCK)
    frequencies = 1 / (10000.0 ** (torch.arange(0, 8, 2).float() / 8))
    angles = (positions[:, None].float() * frequencies).repeat(1, 2)
    cos, sin = angles.cos().double(), angles.sin().double()

    def rotated(x: Tensor, first: int) -> Tensor:
        turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
        return x * cos[first:, None] + turned * sin[first:, None]

    for i in range(N_LAYERS):
        p = f"layers.{i}."
        h = rms(x, w[f"{p}input_layernorm.weight"])
        both = torch.cat((context, h))
        q = (h @ w[f"{p}self_attn.q_proj.weight"].T).view(BLOCK, 2, 8)
        k = (both @ w[f"{p}self_attn.k_proj.weight"].T).view(-1, 1, 8)
        v = both @ w[f"{p}self_attn.v_proj.weight"].T
        q = rotated(rms(q, w[f"{p}self_attn.q_norm.weight"]), n)
        k = rotated(rms(k, w[f"{p}self_attn.k_norm.weight"]), 0)
        is_windowed = layers.get("layer_types", [""] * N_LAYERS)[i] == "sliding_attention"
        is_causal = is_windowed
        if raw.get("sliding_window_non_causal"):
            is_causal = False
        if raw.get("dflash_config", {}).get("causal_head"):
            is_causal = True
        out = torch.zeros(BLOCK, 2, 8, dtype=torch.float64)
        for row in range(BLOCK):
            seen = [
                key
                for key in range(n + BLOCK)
                if not (is_causal and key > n + row)
                and not (is_windowed and is_nested and key < n - 4)
                and not (is_windowed and not is_nested and abs(n + row - key) >= 4)
            ]
            for head in range(2):
                scores = k[seen, 0] @ q[row, head] / 8**0.5
                out[row, head] = torch.softmax(scores, 0) @ v[seen]
        x = x + out.flatten(1) @ w[f"{p}self_attn.o_proj.weight"].T
        h = rms(x, w[f"{p}post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(h @ w[f"{p}mlp.gate_proj.weight"].T)
        x = x + (gate * (h @ w[f"{p}mlp.up_proj.weight"].T)) @ w[f"{p}mlp.down_proj.weight"].T
    hidden = rms(x, w["norm.weight"])
    is_dspark = raw.get("speculators_model_type") == "dspark"
    if not raw.get("sample_from_anchor", is_dspark):
        hidden = hidden[1:]
    if "lm_head.weight" in w:
        logits = hidden @ w["lm_head.weight"].T
    else:
        logits = hidden @ model.lm_head.weight.detach().double().T
    if is_dspark:
        previous = w["markov_head.markov_w1.weight"][previous_tokens(len(hidden))]
        logits = logits + previous @ w["markov_head.markov_w2.weight"].T
    if "d2t" not in weights:
        return logits
    whole = torch.full((len(logits), len(embedding)), -torch.inf, dtype=torch.float64)
    return whole.index_copy(1, torch.tensor(KEPT), logits)


def previous_tokens(n: int) -> Tensor:
    """Tokens before the predictions of a comparison."""
    return torch.arange(n) + 1


CASES = {
    "DFlash": (DFLASH, {}),
    "DFlash, windows": (DFLASH, WINDOWS),
    "JetSpec": (DFLASH | {"dflash_config": DFLASH["dflash_config"] | {"causal_head": True}}, {}),
    "speculators' DFlash": (SPECULATORS | {"draft_vocab_size": len(KEPT)}, WINDOWS),
    "speculators' DFlash, not causal": (SPECULATORS | {"sliding_window_non_causal": True}, WINDOWS),
    "DSpark": (SPECULATORS | {"speculators_model_type": "dspark", "markov_rank": RANK}, {}),
    "DSpark without the anchor": (
        SPECULATORS
        | {"speculators_model_type": "dspark", "markov_rank": RANK, "sample_from_anchor": False},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_consecutive_blocks_equal_the_reference(tmp_path, monkeypatch, case):
    model = few_tokens()
    settings, raw, weights = write_block(tmp_path, model, CASES[case][0], **CASES[case][1])
    states: list[Tensor] = []
    blocks = []
    observe = BlockModel.observe
    begin = BlockModel._begin

    def observed(self, sequence, first, parts):
        known = torch.cat(states)[:first] if states else torch.empty(0)
        states[:] = [torch.cat((known, *parts)) if first else torch.cat(list(parts))]
        observe(self, sequence, first, parts)

    def begun(self, sequence, *args):
        state = begin(self, sequence, *args)
        hidden = self._hidden[sequence]
        tokens = previous_tokens(len(hidden))
        logits = self._spec.logits(self.runner.non_layer, hidden, tokens)
        blocks.append((list(sequence.tokens), states[0].clone(), logits))
        return state

    monkeypatch.setattr(BlockModel, "observe", observed)
    monkeypatch.setattr(BlockModel, "_begin", begun)
    prompt = prompt_of(0, 9, model.config.vocab_size)
    with open_llm(dtype="float64", **settings) as llm:
        text = llm.generate(prompt, SamplingParams(max_new_tokens=16))[0].token_ids
    assert text == generate(model.double(), prompt, 16)
    assert len(blocks) > 4
    for tokens, seen, logits in blocks:
        assert len(seen) == len(tokens) - 1
        expected = reference(raw, weights, model, seen, tokens)
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("changes", "layers", "error", "message"),
    [
        ({"dflash_config": {"selector_rank": 4}}, {}, UnsupportedModelError, "'selector_rank'"),
        ({"something": 1}, {}, UnsupportedModelError, "'something'"),
        (
            {"dflash_config": {"mask_token_id": 99, "target_layer_ids": [0, 2]}},
            {},
            UnsupportedModelError,
            "mask_token is 99",
        ),
        ({}, {"vocab_size": 9}, SettingsError, "vocabulary differs"),
        ({}, {"num_target_layers": 9}, SettingsError, "number of layers differs"),
        (
            {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 7]}},
            {},
            SettingsError,
            "hidden states differs",
        ),
    ],
)
def test_other_configs_are_rejected_by_name(tmp_path, changes, layers, error, message):
    settings, _, _ = write_block(tmp_path, few_tokens(), DFLASH | changes, **layers)
    with pytest.raises(error, match=message):
        open_llm(**settings)


@pytest.mark.slow
def test_joint_distribution_of_sampled_trees(tmp_path):
    """Children are drawn from the distributions of the block."""
    model = small_model(VOCABULARY, n_layers=5, sureness=0.5)
    config = DFLASH | {"dflash_config": DFLASH["dflash_config"] | {"mask_token_id": 3}}
    settings, _, _ = write_block(tmp_path, model, config)
    with open_llm(max_model_len=64, **settings) as llm:
        drafter = drafter_of(llm, "block", "coupled", DraftLimits(6, 4))
        texts = sampled_texts(runner_of(llm), drafter, rule_of("coupled"), 6)
    for found, probs in zip(texts, exact_distributions(model), strict=True):
        assert_distribution(found, probs)
