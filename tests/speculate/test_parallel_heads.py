"""P-EAGLE heads in their published layouts, against a plain float64 reference."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.heads import (
    KEPT,
    few_tokens,
    layer_config,
    layer_shapes,
    mlp,
    record_states,
    rms,
    rotated,
    write_random,
)
from support.tiny import generate, open_llm, prompt_of, say
from transformers import PreTrainedModel

from offload_rt.errors import UnsupportedModelError
from offload_rt.speculate.head_model import ParallelModel

pytestmark = pytest.mark.numeric

N_LAYERS = 3
N_PARALLEL = 4
MASK = 7
SPECULATORS = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "speculators_config": {"proposal_methods": [{"speculative_tokens": N_PARALLEL}]},
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    "mask_token_id": MASK,
    "norm_before_fc": True,
    "norm_before_residual": True,
}
CASES = {
    "speculators": SPECULATORS,
    "speculators, EAGLE-3.1": SPECULATORS | {"norm_before_fc": False, "fc_norm": True},
    "vLLM": {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": MASK},
    "SpecForge": {"architectures": ["PEagleDraftModel"], "pard_token": MASK},
}


def write_parallel(folder: Path, model: PreTrainedModel, config: dict[str, Any]):
    """A target and a head of random weights; returns settings, config and weights."""
    d = model.config.hidden_size
    vocab = model.config.vocab_size
    layers = layer_config(model, "llama", N_LAYERS)
    is_nested = "speculators_model_type" in config
    raw = config | {"draft_vocab_size": len(KEPT)}
    raw |= {"transformer_layer_config": layers} if is_nested else layers
    shapes = {
        "fc.weight": (d, 3 * d),
        "norm.weight": (d,),
        "lm_head.weight": (len(KEPT), d),
        "embed_tokens.weight": (vocab, d),
        "mask_hidden": (1, 1, 3 * d) if is_nested else (1, 3 * d),
    }
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * d,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (d,) for i in range(3)}
    for i in range(N_LAYERS):
        first = "layers.0." if is_nested else "midlayer."
        prefix = f"layers.{i}." if i else first
        parts = layer_shapes(d, d if i else 2 * d)
        parts |= {} if i else {"hidden_norm": (d,)}
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in parts.items()}
    settings, weights = write_random(folder, model, raw, shapes, len(KEPT))
    return settings | {"drafter": "peagle"}, raw, weights


def reference(raw, weights, states, tokens, n_parallel):
    """Logits (n_parallel, vocabulary) from the hidden states of all tokens but the last.

    states  (n, 3, hidden_size)
    """
    w = {name: weight.double() for name, weight in weights.items() if name != "d2t"}
    masked = w["mask_hidden"].view(1, 3, -1).expand(n_parallel - 1, -1, -1)
    taps = torch.cat((states.double(), masked))
    if raw.get("fc_norm"):
        taps = torch.stack([rms(taps[:, i], w[f"fc_norm.{i}.weight"]) for i in range(3)], 1)
    fused = taps.flatten(1)
    if raw.get("norm_before_fc"):
        fused = rms(fused, w["input_norm.weight"])
    x = fused @ w["fc.weight"].T
    embedded = w["embed_tokens.weight"][[*tokens[1:], *[MASK] * (n_parallel - 1)]]
    n = len(x)
    for i in range(N_LAYERS):
        first = "layers.0." if "speculators_model_type" in raw else "midlayer."
        p = f"layers.{i}." if i else first
        if i:
            h = rms(x, w[f"{p}input_layernorm.weight"])
        else:
            normed = rms(x, w[f"{p}hidden_norm.weight"])
            h = torch.cat((rms(embedded, w[f"{p}input_layernorm.weight"]), normed), 1)
            x = normed if raw.get("norm_before_residual") else x
        q, k, v = ((h @ w[f"{p}self_attn.{name}_proj.weight"].T).view(n, -1, 8) for name in "qkv")
        q, k, v = (part.transpose(0, 1) for part in (rotated(q), rotated(k), v))
        scores = q @ k.transpose(1, 2) / 8**0.5
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        x = x + out.transpose(0, 1).flatten(1) @ w[f"{p}self_attn.o_proj.weight"].T
        h = rms(x, w[f"{p}post_attention_layernorm.weight"])
        x = x + mlp(w, p, h)
    logits = rms(x, w["norm.weight"])[-n_parallel:] @ w["lm_head.weight"].T
    whole = torch.full((n_parallel, len(w["embed_tokens.weight"])), -torch.inf).double()
    return whole.index_copy(1, torch.tensor(KEPT), logits)


@pytest.mark.parametrize("case", CASES)
def test_logits_of_consecutive_passes_equal_the_reference(tmp_path, monkeypatch, case):
    model = few_tokens()
    settings, raw, weights = write_parallel(tmp_path, model, CASES[case])
    states = record_states(monkeypatch, ParallelModel)
    drafts = []
    begin = ParallelModel._begin

    def begun(self, sequence, *args):
        state = begin(self, sequence, *args)
        n_committed = self.runner.n_committed(self._states[sequence].cache)
        assert n_committed == len(sequence.tokens) - 2
        drafts.append((list(sequence.tokens), states[0].clone(), self._logits[sequence].clone()))
        return state

    monkeypatch.setattr(ParallelModel, "_begin", begun)
    prompt = prompt_of(0, 9, model.config.vocab_size)
    with open_llm(dtype="float64", **settings) as llm:
        text = say(llm, prompt, 16)
        n_first = len(drafts)
        # Continue in the caches of a shared prefix.
        prompt_2 = [*prompt, *text[:5], 3, 1]
        text_2 = say(llm, prompt_2, 8)
    model.double()
    assert text == generate(model, prompt, 16) and text_2 == generate(model, prompt_2, 8)
    assert n_first > 4 and len(drafts) > n_first + 1
    n_parallel = N_PARALLEL if "speculators_config" in raw else 8
    for tokens, seen, logits in drafts:
        assert len(seen) == len(tokens) - 1
        expected = reference(raw, weights, seen, tokens, n_parallel)
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


def test_missing_mask_token_is_rejected(tmp_path):
    config = {"architectures": ["PEagleDraftModel"]}
    settings, _, _ = write_parallel(tmp_path, few_tokens(), config)
    with pytest.raises(UnsupportedModelError, match="mask_token_id is None"):
        open_llm(**settings)
